"""The trainer's role in a thread of this process, and beside it, where the user generates, one rollout.

Invariants: the thread owns the event loop, the child process of a job that is run here, and everything that waits for
others; it ends when the job has ended, when the user leaves, or when another process has taken the trainer's place, and
then every call of the user's says which of these it was.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401  it registers what waits for threads at the interpreter's end
import contextlib
import os
import threading
import weakref
from collections.abc import Callable

from asyncflow.api.job import RLJob
from asyncflow.api.names import CLIENT
from asyncflow.driver.tasks import TRAIN
from asyncflow.errors import AsyncFlowError, DeadlineExceeded, Fenced, ManifestError, Refused
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
    """The place of a job's trainer, taken by this process.

    place: gives it, in that thread, where a job that is run here is started; run: that job; host: the address at which
    rollouts reach this process; timeout: seconds until the job is joined, and for its end. Once it is ``opened``: job,
    place, and the handover between the user's loop and the trainer. dismissed: set when the trainer has ended, which it
    is told after the last step, when no more rows will come; error: what ended the session.
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
        """Return the handover as soon as the checkpoint is read. Raises what ended the session instead."""
        joined = self._joined.wait(self._timeout)
        if not joined or (self.handover is not None and not self.handover.opened.wait(self._timeout)):
            self.leave()
            hint = "Is the job running, and is its driver reached from here?"
            raise DeadlineExceeded(f"the job was not joined within {self._timeout:g} s", where=WHERE, hint=hint)
        if self.error is not None or self.handover is None:
            raise self.reason()
        return self.handover

    def reason(self) -> BaseException:
        """Return why the session is over."""
        if self.error is not None:
            return self.error
        if self._leaving:
            return Refused("the session was closed", where="session", hint="Call init_engines again")
        hint = "Call init_engines again, once no other process is the job's trainer"
        return Fenced("the job was told to stop, or another process is its trainer now", where="session", hint=hint)

    def generate(self, make_engine: MakeEngine) -> None:
        """Be one more rollout of the job, with an engine of the user's."""
        assert self.job is not None
        context = self._as("rollout", self.job.spec.rollout.max_replicas)

        async def serve() -> None:
            async with context.recording():
                await rollout.serve(context, make_engine=make_engine)

        def begin() -> None:
            self._contexts.append(context)
            self._tasks.create_task(serve(), name="rollout")

        self._loop.call_soon_threadsafe(begin)

    def leave(self) -> None:
        """End everything here, once the trainer has written what is complete into a checkpoint."""
        self._leaving = True
        with contextlib.suppress(RuntimeError):  # the loop was closed: the session is over
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
        except BaseException as error:  # noqa: BLE001 — each call of the user's raises it from now on
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
        algorithm = self.job.spec.algorithm
        if algorithm.epochs * algorithm.mini_batches > 1:
            what, hint = "a loop of your own makes its updates itself", "Leave epochs and miniBatches at 1"
            raise ManifestError(what, where="spec.algorithm", hint=hint)
        if self.job.spec.trainer.lora is not None:
            what = "rollouts would wait for adapters, and a loop of your own publishes whole weights"
            raise ManifestError(what, where="spec.trainer.lora", hint="Leave it out")
        self._attempt = await asyncio.to_thread(_next_attempt, self.place)
        self._contexts.append(self._as("trainer", 0))
        if self._leaving:
            return
        async with self._tasks:
            watching = self._tasks.create_task(self._watch(), name="watch the run")
            async with self._contexts[0].recording():
                await trainer.serve(self._contexts[0], make_backend=self._make)
            watching.cancel()
            self._stop()

    async def _watch(self) -> None:
        """Raise AsyncFlowError when the job that is run here ends although its trainer was not told to."""
        while self._run_here is not None:
            self._run_here.check()
            await asyncio.sleep(_LOOK_S)

    def _as(self, role: str, index: int) -> JobContext:
        """Return the context of a process of the job that this one stands for."""
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

    def _make(self, settings: BackendSettings, *, group: ProcessGroup) -> Handover:
        assert self.job is not None
        spec = self.job.spec
        self.handover = Handover(settings, group=group)
        # Of the back end that is not used only this counts; that of torch would take seconds to import.
        self.handover.of_model = (
            spec.trainer.backend.name == "torch" or kind_of_backend(spec, device=settings.device).of_model
        )
        if self._leaving:
            self.handover.end(self.reason)
        self._joined.set()
        return self.handover


_sessions: weakref.WeakSet[TrainerSession] = weakref.WeakSet()


def _leave_all() -> None:
    """Leave before the interpreter, which ends, waits for threads that wait for the user's loop."""
    sessions = list(_sessions)
    for session in sessions:
        session.leave()
    for session in sessions:
        session.thread.join(_CALL_S)


threading._register_atexit(_leave_all)  # type: ignore[attr-defined]  # noqa: SLF001  called first: registered last
os.register_at_fork(after_in_child=_sessions.clear)


def _next_attempt(place: SessionPlace) -> int:
    """Return the attempt after the last one that has begun."""
    consumer = Consumer(QueueAddress(address=place.address, tls=place.certificate(CLIENT)))
    try:
        return 1 + int(consumer.queue.snapshot(partition=TRAIN, timeout=_CALL_S).attempt)
    finally:
        consumer.close()
