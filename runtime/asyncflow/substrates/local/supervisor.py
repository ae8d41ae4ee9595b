"""The supervisor: places each replica as a process, starts again what may start again, ends everything in order.

It only carries out what ``crew`` and ``ending`` decide. Invariants: when ``run`` returns or raises, no process of the
run is alive; when this process is killed instead, its roles die by their leash and the reaper ends the rest; a disk
that fails for a while puts off what must be on record first, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from asyncflow import leash
from asyncflow.errors import AsyncFlowError, DeadlineExceeded, DiskError, RoleFailed
from asyncflow.plan.roles import Role
from asyncflow.substrates.local import reaper
from asyncflow.substrates.local.crew import Crew, Seat, Start, State, Verdict
from asyncflow.substrates.local.ending import stages
from asyncflow.substrates.local.events import Ended, Event, Restarting, Started, Stopping
from asyncflow.substrates.local.exits import CANNOT_START, ExitStatus
from asyncflow.substrates.local.folder import RunFolder
from asyncflow.substrates.local.logs import RoleLog
from asyncflow.substrates.local.process import Process
from asyncflow.substrates.local.record import Placed, Record, attempts_in_logs, load_record
from asyncflow.substrates.local.terms import Launch, Limits, Outcome
from asyncflow.substrates.local.watchdog import Watchdog

_log = logging.getLogger(__name__)

FAREWELL_S = 3.0
"""Seconds that the other roles have to end by themselves once the job has succeeded."""

DISK_S = 300.0
"""Seconds for which the disk may refuse the record before the job ends."""

_AGAIN_S = 0.2
_GANG_END_S = 2.0
_LAST_S = 1.0


@dataclass(slots=True)
class _Running:
    process: Process
    attempt: int
    told_to_end: bool = False


class Supervisor:
    """One run of one crew. All roles start at once: each waits by itself, with a deadline, for those that it needs.

    It owns SIGINT, SIGTERM and SIGHUP of this process while ``run`` goes on. observe: is told every event, on the event
    loop, and must not block.
    """

    def __init__(
        self,
        *,
        roles: Sequence[Role],
        launch: Callable[[Seat, int], Launch],
        folder: RunFolder,
        driver: str = "",
        http: str = "",
        limits: Limits | None = None,
    ) -> None:
        """Prepare; nothing starts yet.

        launch: how to start a seat as an attempt; driver, http: addresses to note in the record. Raises ManifestError
        where an earlier run's record cannot be read now.
        """
        self._launch = launch
        self._folder = folder
        self.observe: Callable[[Event], None] = lambda _: None
        self._limits = limits or Limits()
        previous = load_record(folder.processes)
        attempts = previous.next_attempts() if previous is not None else attempts_in_logs(folder.path)
        self._crew = Crew(roles, now=time.monotonic(), attempts=attempts)
        self._record = Record(mark=uuid.uuid4().hex, supervisor=os.getpid(), started=_now(), driver=driver, http=http)
        self._first = {seat: attempt for seat, (_, attempt) in self._crew.seats.items()}
        self._started = dict.fromkeys(self._first, "")
        self._http = dict.fromkeys(self._first, "")
        self._running: dict[Seat, _Running] = {}
        self._logs = {seat: RoleLog(folder.log(str(seat))) for seat in self._first}
        self._changed = asyncio.Event()
        self._unsaved_since: float | None = None
        self._unwritable: DiskError | None = None
        self._stop_signal = 0
        self._hurry = False

    @property
    def placed(self) -> list[Placed]:
        """Every replica as it is now, in plan order; may be read from any thread."""
        return self._record.processes

    def stop(self, number: int) -> None:
        """End the job in order because of signal ``number``; asked a second time, at once."""
        self._hurry = self._stop_signal != 0
        self._stop_signal = self._stop_signal or number
        self._crew.stop(signal.Signals(number).name)
        self._changed.set()

    async def run(self) -> Outcome:
        """Run the crew to its end. Everything has ended when this returns."""
        with self._signals():
            leash.adopt_orphans(enabled=True)
            self._watchdog = Watchdog(mark=self._record.mark, log=self._folder.path / "run" / "reaper.log")
            try:
                with self._deadline():
                    verdict = await self._follow()
                return await self._conclude(verdict)
            finally:
                await self._leave_nothing()
                await self._watchdog.close()
                leash.adopt_orphans(enabled=False)

    async def _follow(self) -> Verdict:
        """Start what is due, until the crew has its verdict."""
        while self._crew.verdict is None:
            due_at = self._crew.wake_at()
            is_due = due_at is not None and due_at <= time.monotonic()
            if (is_due or self._unsaved_since is not None) and self._save():
                for start in self._crew.due(time.monotonic()):
                    self._start(start)
                self._save()
            put_off = self._unsaved_since is not None
            await self._wait_for_change(time.monotonic() + _AGAIN_S if put_off else self._crew.wake_at())
        return self._crew.verdict

    async def _conclude(self, verdict: Verdict) -> Outcome:
        if verdict.ok:
            farewell = time.monotonic() + FAREWELL_S
            while self._running and not self._stop_signal and time.monotonic() < farewell:
                await self._wait_for_change(farewell)
            await self._end_all()
            return Outcome(exit_code=0)
        self.observe(Stopping(reason=f"{verdict.culprit} failed" if verdict.culprit else verdict.reason))
        failure = None if self._stop_signal and not verdict.culprit else self._unwritable or self._failure(verdict)
        await self._end_all()
        code = 1 if failure else 128 + self._stop_signal
        return Outcome(exit_code=code, failure=failure, refused=bool(verdict.culprit) and verdict.status.final)

    async def _end_all(self) -> None:
        begun = time.monotonic()
        for stage in stages(self._running, within_s=self._limits.end_s):
            self._terminate(stage.seats)
            await self._until_gone(stage.seats, begun + stage.by_s)
            self._kill(stage.seats)

    async def _leave_nothing(self) -> None:
        self._kill(self._running)
        sessions = [running.process.pid for running in self._running.values()]
        left = await asyncio.to_thread(reaper.sweep, mark=self._record.mark, sessions=sessions)
        if left:
            _log.error("these processes of the run do not die: %s", left)
        deadline = time.monotonic() + _LAST_S
        while self._running and time.monotonic() < deadline:
            await self._wait_for_change(deadline)
        self._save()

    async def _until_gone(self, seats: Iterable[Seat], deadline: float) -> None:
        seats = list(seats)
        while any(seat in self._running for seat in seats) and not self._hurry and time.monotonic() < deadline:
            await self._wait_for_change(deadline)

    async def _wait_for_change(self, until: float | None) -> None:
        timeout = None if until is None else max(0.0, until - time.monotonic())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout)
        self._changed.clear()

    def _start(self, start: Start) -> None:
        """Start a seat, unless another of its gang could not be started since that was decided."""
        seat, attempt = start
        if self._crew.seats[seat] != (State.RUNNING, attempt):
            return
        launch = self._launch(seat, attempt)
        self._http[seat] = launch.http
        log = self._logs[seat]
        log.begin(attempt=attempt, argv=launch.argv)
        own = {leash.PARENT: str(os.getpid()), reaper.MARK: self._record.mark, "PYTHONUNBUFFERED": "1"}
        env = {**os.environ, **launch.env, **own}
        try:
            process = Process(launch.argv, env=env, log=log.path, on_exit=lambda status: self._ended(seat, status))
        except OSError as error:
            log.note(f"cannot be started: {error}")
            self._take_end(seat, ExitStatus(status=CANNOT_START), attempt, wanted=False)
            return
        self._watchdog.add(process.pid)
        self._running[seat] = _Running(process, attempt)
        self._started[seat] = _now()
        self.observe(Started(seat=seat, attempt=attempt, pid=process.pid))

    def _ended(self, seat: Seat, status: ExitStatus) -> None:
        running = self._running.pop(seat)
        self._watchdog.remove(running.process.pid)
        self._take_end(seat, status, running.attempt, wanted=running.told_to_end)

    def _take_end(self, seat: Seat, status: ExitStatus, attempt: int, *, wanted: bool) -> None:
        others, restart = self._crew.ended(seat, status, time.monotonic())
        self._end_gang(others)
        self._changed.set()
        self._logs[seat].note(f"attempt {attempt} ended: {status}")
        self.observe(Ended(seat=seat, attempt=attempt, status=status, wanted=wanted))
        if restart:
            self.observe(Restarting(restart=restart))
        self._save()

    def _end_gang(self, seats: Sequence[Seat]) -> None:
        """End the rest of a gang; ranks that have not been started yet are down at once."""
        self._terminate(seats)
        for seat in seats:
            if running := self._running.get(seat):
                asyncio.get_running_loop().call_later(_GANG_END_S, running.process.kill)
            else:
                self._crew.ended(seat, ExitStatus(status=CANNOT_START), time.monotonic())

    def _terminate(self, seats: Iterable[Seat]) -> None:
        for seat in seats:
            if running := self._running.get(seat):
                running.told_to_end = True
                running.process.terminate()

    def _kill(self, seats: Iterable[Seat]) -> None:
        for seat in list(seats):
            if running := self._running.get(seat):
                running.told_to_end = True
                running.process.kill()

    def _failure(self, verdict: Verdict) -> AsyncFlowError:
        if verdict.culprit is None:
            hint = "Give limits.activeDeadlineSeconds more, and continue with --resume"
            return DeadlineExceeded(verdict.reason, where=str(self._folder.path), hint=hint)
        log = self._logs[verdict.culprit]
        last = "".join(f"\n    {line}" for line in log.tail())
        hint = f"Its last words:{last}" if last else "It has written nothing to its log"
        return RoleFailed(
            f"{verdict.culprit} ended with {verdict.status} and {verdict.reason}", where=str(log.path), hint=hint
        )

    def _save(self) -> bool:
        """Write the record: before anything starts, so that no attempt is ever used twice, and after each change.

        False where the disk refuses it: it is tried again soon, unless that is of no use; then the job ends.
        """
        processes = [
            Placed(
                role=seat.role,
                index=seat.index,
                attempt=attempt,
                state=state,
                pid=self._running[seat].process.pid if seat in self._running else 0,
                started=self._started[seat],
                restarts=attempt - self._first[seat],
                log=str(self._logs[seat].path),
                http=self._http[seat],
            )
            for seat, (state, attempt) in self._crew.seats.items()
        ]
        self._record = msgspec.structs.replace(self._record, processes=processes)
        try:
            self._record.save(self._folder.processes)
        except OSError as error:
            self._put_off(error)
            return False
        self._unsaved_since = None
        return True

    def _put_off(self, error: OSError) -> None:
        now = time.monotonic()
        if self._unsaved_since is None:
            _log.warning("%s cannot be written, which is tried again: %s", self._folder.processes, error)
            self._unsaved_since = now
            self._changed.set()
        if error.errno == errno.EROFS or now - self._unsaved_since > DISK_S:
            what = f"the run's folder cannot be written any more: {error.strerror}"
            hint = "Make it writable, or free some space, and continue with --resume"
            self._unwritable = DiskError(what, where=str(self._folder.path), hint=hint)
            self._crew.stop(what)

    @contextlib.contextmanager
    def _deadline(self) -> Iterator[None]:
        """Fail the job when its time is over."""
        if self._limits.active_s is None:
            yield
            return
        reason = f"the job has not finished within its {self._limits.active_s:.0f} s"
        timer = asyncio.get_running_loop().call_later(self._limits.active_s, self._out_of_time, reason)
        try:
            yield
        finally:
            timer.cancel()

    def _out_of_time(self, reason: str) -> None:
        self._crew.stop(reason)
        self._changed.set()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Have the signals that end a program end the job in order; one that was ignored (nohup) stays ignored."""
        loop = asyncio.get_running_loop()
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self.stop, int(number))
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
