"""The trainer's role in a thread of this process, together with one rollout if the user's function generates.

Invariants: the thread owns the event loop, the child process of a job that is started here, and all waits for other
processes; it ends when the job has ended, when the user leaves, or when another process has become the trainer, and
then every call of the user raises an error with that reason.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401  registers its wait for threads at the end of the interpreter
import contextlib
import os
import threading
import weakref
from collections.abc import Callable

from asyncflow.api.job import RLJob
from asyncflow.api.names import CLIENT
from asyncflow.driver.tasks import TRAIN
from asyncflow.errors import AsyncFlowError, DeadlineExceeded, Fenced, Refused
from asyncflow.queue.torch.dataset import Consumer, QueueAddress
from asyncflow.roles import rollout, trainer
from asyncflow.roles.backend import kind_of_backend
from asyncflow.roles.context import JobContext, RoleOptions
from asyncflow.roles.rollout import MakeEngine
from asyncflow.rpc.tls import Credentials
from asyncflow.session.handover import Handover
from asyncflow.session.joining import WHERE, LocalRun, SessionPlace
from asyncflow.training.ranks import ProcessGroup
from asyncflow.training.settings import BackendSettings

_CALL_S = 60.0
_LOOK_S = 1.0


class TrainerSession:
    """This process as the trainer of a job.

    place: returns the place of the job; runs in the session's thread, and starts a job that is to run here; run: that
    job; host: address at which rollouts reach this process; timeout: seconds until the job is joined, and for its end.
    job, place, handover: set when the session is ``opened``; the handover connects the user's loop with the trainer.
    dismissed: set when the trainer has ended: the driver stops it after the last step, when no more rows will come;
    error: the error that ended the session.
    """

    def __init__(self, place: Callable[[], SessionPlace], *, run: LocalRun | None, host: str, timeout: float) -> None:
        self.handover: Handover | None = None
        self.place: SessionPlace | None = None
        self.job: RLJob | None = None
        self.error: BaseException | None = None
        self._locate = place
        self._run_here = run
        self._host = host
        self._timeout = timeout
        self._attempt = 0
        self._leaving = False
        self._joined = threading.Event()
        self.dismissed = threading.Event()
        self._contexts: list[JobContext] = []
        self._tasks = asyncio.TaskGroup()
        self._loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name="asyncflow session", daemon=True)
        self.thread.start()
        _sessions.add(self)

    def opened(self) -> Handover:
        """Return the handover as soon as the checkpoint is read. Raises the error of a session that has ended."""
        joined = self._joined.wait(self._timeout)
        if not joined or (self.handover is not None and not self.handover.opened.wait(self._timeout)):
            self.leave()
            hint = "Check that the job runs and that this machine can reach its driver"
            raise DeadlineExceeded(f"the job was not joined within {self._timeout:g} s", where=WHERE, hint=hint)
        if self.error is not None or self.handover is None:
            raise self.reason()
        return self.handover

    def reason(self) -> BaseException:
        """Return the error that says why the session has ended."""
        if self.error is not None:
            return self.error
        if self._leaving:
            return Refused("the session was closed", where="session", hint="Call init_engines again")
        hint = "Call init_engines again when no other process is the job's trainer"
        return Fenced("the job was stopped, or another process is its trainer now", where="session", hint=hint)

    def generate(self, make_engine: MakeEngine) -> None:
        """Join the job as a further rollout, with an engine of the user."""
        assert self.job is not None
        context = self._context("rollout", self.job.spec.rollout.max_replicas)

        async def serve() -> None:
            async with context.recording():
                await rollout.serve(context, make_engine=make_engine)

        def start() -> None:
            self._contexts.append(context)
            self._tasks.create_task(serve(), name="rollout")

        self._loop.call_soon_threadsafe(start)

    def leave(self) -> None:
        """End the session, after the trainer has written a checkpoint of the completed steps."""
        self._leaving = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: the session has ended
            self._loop.call_soon_threadsafe(self._stop)
        if self.handover is not None:
            self.handover.end(self.reason)

    def _stop(self) -> None:
        for context in self._contexts:
            context.stopping.set()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except BaseException as error:  # noqa: BLE001 — each call of the user raises it from now on
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            self.error = error
        self.dismissed.set()
        try:
            if self._run_here is not None:
                self._run_here.end(well=not self._leaving and self.error is None, timeout=self._timeout)
        except AsyncFlowError as error:
            self.error = self.error or error
        if self.handover is not None:
            self.handover.end(self.reason)
        self._joined.set()

    async def _serve(self) -> None:
        self.place = await asyncio.to_thread(self._locate) if self._run_here is None else self._locate()
        self.job = self.place.job
        self._attempt = await asyncio.to_thread(_next_attempt, self.place)
        self._contexts.append(self._context("trainer", 0))
        if self._leaving:
            return
        async with self._tasks:
            watching = self._tasks.create_task(self._watch(), name="watch the run")
            async with self._contexts[0].recording():
                await trainer.serve(self._contexts[0], make_backend=self._make_backend)
            watching.cancel()
            self._stop()

    async def _watch(self) -> None:
        """Raise AsyncFlowError if the job that was started here ends before its trainer is directed to stop."""
        while self._run_here is not None:
            self._run_here.check()
            await asyncio.sleep(_LOOK_S)

    def _context(self, role: str, index: int) -> JobContext:
        """Return the context of a process of the job whose role this process takes."""
        assert self.job is not None
        assert self.place is not None
        assert self.place.manifest is not None
        assert self.place.workdir is not None
        certificate = self.place.certificate(role, index)
        options = RoleOptions(
            role=role,
            job=self.place.manifest,
            driver=self.place.address,
            index=index,
            attempt=self._attempt,
            workdir=self.place.workdir,
        )
        credentials = None if certificate is None else Credentials(certificate)
        return JobContext(job=self.job, options=options, credentials=credentials, host=self._host)

    def _make_backend(self, settings: BackendSettings, *, group: ProcessGroup) -> Handover:
        assert self.job is not None
        spec = self.job.spec
        self.handover = Handover(settings, group=group)
        # The manifest's backend is not used, except for this flag; importing the one for torch would take seconds.
        self.handover.of_model = (
            spec.trainer.backend.name == "torch" or kind_of_backend(spec, device=settings.device).of_model
        )
        if self._leaving:
            self.handover.end(self.reason)
        self._joined.set()
        return self.handover


_sessions: weakref.WeakSet[TrainerSession] = weakref.WeakSet()


def _leave_all() -> None:
    """Leave all sessions before the ending interpreter waits for threads that wait for the user's loop."""
    sessions = list(_sessions)
    for session in sessions:
        session.leave()
    for session in sessions:
        session.thread.join(_CALL_S)


threading._register_atexit(_leave_all)  # type: ignore[attr-defined]  # noqa: SLF001  called first: registered last
os.register_at_fork(after_in_child=_sessions.clear)


def _next_attempt(place: SessionPlace) -> int:
    """Return the number of the next attempt, one after the last started one."""
    consumer = Consumer(QueueAddress(address=place.address, tls=place.certificate(CLIENT)))
    try:
        return 1 + int(consumer.queue.snapshot(partition=TRAIN, timeout=_CALL_S).attempt)
    finally:
        consumer.close()
