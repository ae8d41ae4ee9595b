"""The supervisor: starts a process for each replica, restarts failed ones, and ends all processes in order.

It carries out the decisions of ``lifecycle``, and sets the number of rollouts that ``scaling`` returns. A role that may
be forked starts once the fork server has imported its modules; if the fork server has failed, it is spawned.

Invariants:

* When ``run`` returns or raises, no process of the run is alive. If this process is killed instead, its roles die with
  it, and the reaper ends the other processes of the run.
* A temporary failure of the disk delays only the starts that must be recorded first.
* A replica that is no longer wanted gets its drain time to hand on its work.
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
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import msgspec

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, DiskError, RoleFailed
from asyncflow.local import reaper
from asyncflow.local.folder import RunFolder
from asyncflow.local.forkserver import ForkServer
from asyncflow.local.lifecycle import (
    CANNOT_START,
    WITHIN_S,
    Event,
    ExitStatus,
    JobResult,
    LocalReplica,
    ProcessEnded,
    ProcessStarted,
    ProcessTable,
    Restarting,
    Scaled,
    Start,
    Stopping,
    end_stages,
)
from asyncflow.local.placement import Launch
from asyncflow.local.process import Process, Watchdog
from asyncflow.local.record import Placed, Record, RoleLog, first_attempts, load_record
from asyncflow.local.scaling import Scale, Scaling
from asyncflow.plan.roles import Role
from asyncflow.process import PARENT, adopt_orphans

_log = logging.getLogger(__name__)

GRACE_S = 3.0
"""Seconds in which the other roles may end by themselves once the job has succeeded."""
DISK_S = 300.0
"""Seconds for which writes of the record may fail before the job ends."""
LOOK_S = 0.5
"""Interval in seconds at which the wanted number of replicas is read."""
DRAIN_S = 10.0
"""Seconds after the end of its drain time at which a leaving replica is killed."""
_RETRY_S = 0.2
_GANG_END_S = 2.0
_LAST_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Time limits of one run in seconds. active_s: until the job fails if it has not finished; end_s: for shutdown."""

    active_s: float | None = None
    end_s: float = WITHIN_S


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOutcome:
    """Outcome of a run.

    exit_code: 0, 1, or 128 + signal; failure: the error to report, if it failed; refused: whether a role refused its
    input.
    """

    exit_code: int
    failure: AsyncFlowError | None = None
    refused: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticRole:
    """The role whose number of replicas changes during the run.

    place: assigns a replica its port and devices, or raises AsyncFlowError; port: port of the driver's HTTP service;
    drain_s: seconds in which a leaving replica may hand on its work.
    """

    scaling: Scaling
    place: Callable[[LocalReplica], None]
    port: int
    drain_s: float


@dataclass(slots=True)
class _Running:
    process: Process
    attempt: int
    told_to_end: bool = False


class Supervisor:
    """One run of the processes of ``roles``.

    All processes start at the same time; each waits, with a deadline, for the processes that it needs. While ``run``
    executes, the supervisor handles SIGINT, SIGTERM and SIGHUP of this process. observe: called with every event, on
    the event loop; it must not block.
    """

    def __init__(
        self,
        *,
        roles: Sequence[Role],
        launch: Callable[[LocalReplica, int], Launch],
        folder: RunFolder,
        driver: str = "",
        http: str = "",
        control: str = "",
        limits: Limits | None = None,
        elastic: ElasticRole | None = None,
        imports: Sequence[str] = (),
    ) -> None:
        """Prepare the run without starting a process.

        launch: returns the command line of a replica's attempt; driver, http, control: addresses for the record;
        elastic: the role that is scaled, if any; imports: modules that the fork server imports first, empty for no fork
        server. Raises ManifestError if the record of an earlier run cannot be read.
        """
        self._launch = launch
        self._elastic = elastic
        self._requested: Scale | None = None
        self._scale: Scale | None = None
        self._folder = folder
        self.observe: Callable[[Event], None] = lambda _: None
        self._limits = limits or Limits()
        names, previous = [role.name for role in roles], load_record(folder.path)
        attempts = first_attempts(folder.path, names, record=previous)
        self._table = ProcessTable(roles, now=time.monotonic(), attempts=attempts)
        self._record = Record(
            mark=uuid.uuid4().hex,
            lock=os.fstat(folder.lock).st_ino,
            supervisor=os.getpid(),
            started=_now(),
            driver=driver,
            http=http,
            control=control,
        )
        self._first: dict[LocalReplica, int] = {}
        self._started: dict[LocalReplica, str] = {}
        self._http: dict[LocalReplica, str] = {}
        self._logs: dict[LocalReplica, RoleLog] = {}
        self._running: dict[LocalReplica, _Running] = {}
        self._unstartable: dict[LocalReplica, OSError] = {}
        self._imports = imports
        self._forks: ForkServer | None = None
        self._due: list[tuple[Start, Launch]] = []
        self._add_new_replicas()
        self._changed = asyncio.Event()
        self._unsaved_since: float | None = None
        self._unwritable: DiskError | None = None
        self._stop_signal = 0
        self._hurry = False

    @property
    def placed(self) -> list[Placed]:
        """The current state of every replica, in plan order; may be read from any thread."""
        return self._record.processes

    def stop(self, number: int) -> None:
        """End the job in order because of signal ``number``; a second call kills all processes immediately.

        A SIGHUP does not count as the second call: a terminal that closes sends it twice, by its shell and by the
        kernel.
        """
        self._hurry |= self._stop_signal != 0 and number != signal.SIGHUP
        self._stop_signal = self._stop_signal or number
        self._table.stop(signal.Signals(number).name)
        self._changed.set()

    async def run(self) -> RunOutcome:
        """Run the processes to their end; all have ended when this returns."""
        with self._signals():
            adopt_orphans(enabled=True)
            self._watchdog = Watchdog(mark=self._record.mark, log=self._folder.path / "run" / "reaper.log")
            try:
                with self._deadline():
                    self._start_fork_server()
                    async with self._following_policy():
                        result = await self._follow()
                return await self._conclude(result)
            finally:
                if self._forks is not None:
                    await self._forks.close()
                await self._kill_remaining()
                await self._watchdog.close()
                adopt_orphans(enabled=False)

    def _add_new_replicas(self) -> None:
        """Add the new replicas of the process table to the record."""
        for replica, (_, attempt) in self._table.replicas.items():
            if replica not in self._first:
                self._first[replica] = attempt
                self._started[replica] = self._http[replica] = ""
                self._logs[replica] = RoleLog(self._folder.log(str(replica)))

    def _rescale(self, elastic: ElasticRole) -> None:
        """Set the number of replicas to the wanted number, or to the number for which there are devices and ports."""
        scale, before = elastic.scaling.wanted(), self._scale
        if scale == self._requested:
            return
        self._requested, name = scale, scale.role
        for index in range(scale.wanted):
            try:
                elastic.place(LocalReplica(name, index))
            except AsyncFlowError as error:
                _log.warning("%s: %d wanted, but there is room for %d: %s", name, scale.wanted, index, error)
                scale = msgspec.structs.replace(scale, wanted=index, problem=str(error))
                break
        self._scale = scale
        leaving = self._table.scale(name, scale.wanted, time.monotonic())
        self._add_new_replicas()
        self._end_some(leaving, within_s=elastic.drain_s + DRAIN_S)
        if before is not None:
            why = scale.problem or scale.why
            _log.info("%s: %d wanted, not %d: %s", name, scale.wanted, before.wanted, why)
            self.observe(Scaled(role=name, before=before.wanted, after=scale.wanted, why=why))
        self._save()

    @contextlib.asynccontextmanager
    async def _following_policy(self) -> AsyncIterator[None]:
        if self._elastic is None:
            yield
            return
        following = asyncio.create_task(self._follow_policy(self._elastic))
        try:
            yield
        finally:
            following.cancel()
            await asyncio.wait([following])

    async def _follow_policy(self, elastic: ElasticRole) -> None:
        """Follow the built-in policy; if that fails, the run continues with its current number of replicas."""
        try:
            await elastic.scaling.follow(elastic.port, self._changed.set)
        except Exception:  # noqa: BLE001  a failed policy must not end the run
            _log.exception("%s: the built-in policy is no longer followed", elastic.scaling.role.name)

    async def _follow(self) -> JobResult:
        """Start replicas when they are due, until there is a result."""
        while self._table.result is None:
            if self._elastic is not None:
                self._rescale(self._elastic)
            self._end_some(self._table.recall(time.monotonic()), within_s=self._limits.end_s)
            due_at = self._table.wake_at()
            is_due = due_at is not None and due_at <= time.monotonic()
            if (is_due or self._unsaved_since is not None) and self._save():
                due = self._table.due(time.monotonic())
                self._due += [(start, launch) for start in due if (launch := self._prepared(start)) is not None]
            if self._due:
                self._start_ready()
                self._save()
            await self._wait_for_change(self._next_check())
        return self._table.result

    def _next_check(self) -> float | None:
        """Return the next time at which the loop must run without a change, None if it need not."""
        times = [] if (due_at := self._table.wake_at()) is None else [due_at]
        if self._unsaved_since is not None:
            times = [time.monotonic() + _RETRY_S]
        if self._elastic is not None:
            times.append(time.monotonic() + LOOK_S)
        return min(times, default=None)

    async def _conclude(self, result: JobResult) -> RunOutcome:
        if result.ok:
            deadline = time.monotonic() + GRACE_S
            while self._running and not self._stop_signal and time.monotonic() < deadline:
                await self._wait_for_change(deadline)
            await self._end_all()
            return RunOutcome(exit_code=0)
        self.observe(Stopping(reason=f"{result.culprit} failed" if result.culprit else result.reason))
        failure = None if self._stop_signal and not result.culprit else self._unwritable or self._failure(result)
        await self._end_all()
        code = 1 if failure else 128 + self._stop_signal
        return RunOutcome(exit_code=code, failure=failure, refused=bool(result.culprit) and result.status.final)

    async def _end_all(self) -> None:
        started = time.monotonic()
        for stage in end_stages(self._running, within_s=self._limits.end_s):
            self._terminate(stage.replicas)
            await self._wait_until_ended(stage.replicas, started + stage.by_s)
            self._kill(stage.replicas)

    async def _kill_remaining(self) -> None:
        self._kill(self._running)
        sessions = [running.process.pid for running in self._running.values()]
        left = await asyncio.to_thread(reaper.sweep, mark=self._record.mark, sessions=sessions)
        if left:
            _log.error("these processes of the run are still alive after SIGKILL: %s", left)
        deadline = time.monotonic() + _LAST_S
        while self._running and time.monotonic() < deadline:
            await self._wait_for_change(deadline)
        self._save()

    async def _wait_until_ended(self, replicas: Iterable[LocalReplica], deadline: float) -> None:
        replicas = list(replicas)
        while any(replica in self._running for replica in replicas) and not self._hurry and time.monotonic() < deadline:
            await self._wait_for_change(deadline)

    async def _wait_for_change(self, until: float | None) -> None:
        timeout = None if until is None else max(0.0, until - time.monotonic())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout)
        self._changed.clear()

    def _start_fork_server(self) -> None:
        if not self._imports:
            return
        env = {**os.environ, **self._own_variables(), "PYTHONSAFEPATH": "1"}
        log = self._folder.path / "run" / "forkserver.log"
        try:
            self._forks = ForkServer(self._imports, env=env, log=log, changed=self._changed.set)
        except OSError as error:
            _log.warning("roles are started without a fork server: %s", error)
            return
        self._watchdog.add(self._forks.pid)

    def _own_variables(self) -> dict[str, str]:
        return {PARENT: str(os.getpid()), reaper.MARK: self._record.mark, "PYTHONUNBUFFERED": "1"}

    def _start_ready(self) -> None:
        """Start the due replicas, fewest imports first, except those whose modules the fork server still imports."""
        due, self._due = sorted(self._due, key=lambda pair: len(pair[1].imports or ())), []
        for start, launch in due:
            if launch.imports is None or self._forks is None or self._forks.ready(launch.imports):
                self._start(start, launch)
            else:
                self._due.append((start, launch))

    def _start(self, start: Start, launch: Launch) -> None:
        """Start a replica, unless the start is no longer valid because another one of its gang could not be started."""
        replica, attempt = start
        if not self._table.still_due(start):
            return
        self._http[replica] = launch.http
        log = self._logs[replica]
        log.begin(attempt=attempt, argv=launch.argv)
        env = {**os.environ, **launch.env, **self._own_variables()}
        forks = self._forks if launch.imports is not None else None
        ended = partial(self._ended, replica)
        try:
            process = forks.start(launch.argv, env=env, log=log.path, on_exit=ended) if forks is not None else None
            process = process or Process.spawn(launch.argv, env=env, log=log.path, on_exit=ended)
        except OSError as error:
            self._cannot_start(start, error)
            return
        self._watchdog.add(process.pid)
        self._unstartable.pop(replica, None)
        self._running[replica] = _Running(process, attempt)
        self._started[replica] = _now()
        self.observe(ProcessStarted(replica=replica, attempt=attempt, pid=process.pid))

    def _prepared(self, start: Start) -> Launch | None:
        """Return the launch of a replica; None if its certificate, or one of its gang's, cannot be written."""
        try:
            return self._launch(*start) if self._table.still_due(start) else None
        except OSError as error:
            self._cannot_start(start, error)
            return None

    def _cannot_start(self, start: Start, error: OSError) -> None:
        self._unstartable[start.replica] = error
        self._logs[start.replica].note(f"cannot be started: {error}")
        self._handle_end(start.replica, ExitStatus(status=CANNOT_START), start.attempt, wanted=False)

    def _ended(self, replica: LocalReplica, status: ExitStatus) -> None:
        running = self._running.pop(replica)
        self._watchdog.remove(running.process.pid)
        self._handle_end(replica, status, running.attempt, wanted=running.told_to_end)

    def _handle_end(self, replica: LocalReplica, status: ExitStatus, attempt: int, *, wanted: bool) -> None:
        others, restart = self._table.ended(replica, status, time.monotonic())
        self._end_some(others, within_s=_GANG_END_S)
        self._changed.set()
        self._logs[replica].note(f"attempt {attempt} ended: {status}")
        self.observe(ProcessEnded(replica=replica, attempt=attempt, status=status, wanted=wanted))
        if restart:
            self.observe(Restarting(restart=restart))
        self._save()

    def _end_some(self, replicas: Sequence[LocalReplica], *, within_s: float) -> None:
        """End the rest of a gang, or leaving replicas; one that has not been started yet is down immediately."""
        self._terminate(replicas)
        for replica in replicas:
            if running := self._running.get(replica):
                asyncio.get_running_loop().call_later(within_s, running.process.kill)
            else:
                self._table.ended(replica, ExitStatus(status=CANNOT_START), time.monotonic())

    def _terminate(self, replicas: Iterable[LocalReplica]) -> None:
        for replica in replicas:
            if running := self._running.get(replica):
                running.told_to_end = True
                running.process.terminate()

    def _kill(self, replicas: Iterable[LocalReplica]) -> None:
        for replica in list(replicas):
            if running := self._running.get(replica):
                running.told_to_end = True
                running.process.kill()

    def _failure(self, result: JobResult) -> AsyncFlowError:
        if result.culprit is None:
            hint = "Set limits.activeDeadlineSeconds higher, and continue with --resume"
            return DeadlineExceeded(result.reason, where=str(self._folder.path), hint=hint)
        log = self._logs[result.culprit]
        if (error := self._unstartable.get(result.culprit)) is not None:
            what = f"{result.culprit} cannot be started ({error.strerror or error}), and {result.reason}"
            return RoleFailed(what, where=str(log.path), hint="Remove the cause, and continue with --resume")
        last = "".join(f"\n    {line}" for line in log.tail())
        hint = f"Its last log lines:{last}" if last else "It has written nothing to its log"
        where = "" if result.status.final else str(log.path)  # the log of a refused start is removed
        return RoleFailed(f"{result.culprit} ended with {result.status} and {result.reason}", where=where, hint=hint)

    def _save(self) -> bool:
        """Write the record: before a process starts, so that no attempt is ever used twice, and after each change.

        Return False if the disk refuses the write: it is retried soon, or ends the job if retries are pointless.
        """
        processes = [
            Placed(
                role=replica.role,
                index=replica.index,
                attempt=attempt,
                state=state,
                pid=self._running[replica].process.pid if replica in self._running else 0,
                started=self._started[replica],
                restarts=attempt - self._first[replica],
                log=str(self._logs[replica].path),
                http=self._http[replica],
            )
            for replica, (state, attempt) in self._table.replicas.items()
        ]
        scales = [] if self._scale is None else [self._scale]
        self._record = msgspec.structs.replace(self._record, processes=processes, scales=scales)
        try:
            self._record.save(self._folder.processes)
        except OSError as error:
            self._handle_failed_save(error)
            return False
        self._unsaved_since = None
        return True

    def _handle_failed_save(self, error: OSError) -> None:
        now = time.monotonic()
        if self._unsaved_since is None:
            _log.warning("%s cannot be written, and is tried again: %s", self._folder.processes, error)
            self._unsaved_since = now
            self._changed.set()
        if error.errno == errno.EROFS or now - self._unsaved_since > DISK_S:
            what = f"the run's folder can no longer be written: {error.strerror}"
            hint = "Make it writable, or free some space, and continue with --resume"
            self._unwritable = DiskError(what, where=str(self._folder.path), hint=hint)
            self._table.stop(what)

    @contextlib.contextmanager
    def _deadline(self) -> Iterator[None]:
        """Fail the job if it has not finished within its time limit."""
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
        self._table.stop(reason)
        self._changed.set()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """End the job in order on SIGINT, SIGTERM and SIGHUP; an ignored SIGHUP (nohup) stays ignored."""
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
