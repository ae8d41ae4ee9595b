"""Execution of a role from its command line to its exit status, and the context that it runs in.

A role is an async function that is given a ``ProcessContext``: its place in a job, or in a queue that stands alone. It
ends when the driver says stop or drain, on SIGTERM or SIGINT, or when it was replaced by a newer incarnation.

What each is ready for, so that roles can be started one after another (``plan.roles.Role.after``): the driver to
register others, the controller to serve, a storage unit to hold samples, the trainer's ranks to train (the gang has
met, its first weights are published), a rollout to generate (its first weights are loaded). Nobody's readiness waits
for a role that starts after it.

Invariants: the address that a process tells others is ``host``, never "all interfaces"; ``/readyz`` says no until the
process is registered; contexts of a job, of a queue that stands alone and of a model that is published differ in what
the manifest says, and in nothing else; a role's exit status says how it ended (0: done, or told to by the driver; 1: an
error that a restart may mend; 2: one that it cannot; 3: what it worked on was lost with another process; 128 + n: ended
by signal n), and an error is logged with its words; the event loop of a role never computes, so that heartbeats go on;
a role may open as many files and sockets as the hard limit of its process allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import resource
import signal
import socket
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from asyncflow import clock
from asyncflow.api.base import Spec
from asyncflow.api.durability import LedgerSpec, LimitsSpec
from asyncflow.api.job import RLJob
from asyncflow.api.load import Manifest, load
from asyncflow.api.names import (
    CLIENT,
    HOST_ENV,
    OPERATOR,
    STORE_PASSWORD_FILE,
    STORE_PASSWORD_FILE_ENV,
    STORE_SECRET,
    TOKEN_FILE_ENV,
)
from asyncflow.api.placement import PROFILES, AcceleratorSpec
from asyncflow.api.queue import QueueSpec, TransferQueue
from asyncflow.api.weights import WeightSourceSpec, WeightsSpec, WeightSync
from asyncflow.errors import AsyncFlowError, CheckpointError, Diverged, LedgerCorrupt, ManifestError, RowsLost
from asyncflow.plan.roles import DISRUPTED, REFUSED
from asyncflow.process import age_s
from asyncflow.rpc.access import Access, job_table, worker_name
from asyncflow.rpc.addresses import is_loopback
from asyncflow.rpc.http import Guard, HttpServer, Ready, ready, role_routes
from asyncflow.rpc.membership import AGE, FIGURES, Directives, Member, Membership, Status
from asyncflow.rpc.tls import Credentials
from asyncflow.telemetry.logs import setup_logging
from asyncflow.telemetry.metrics import RoleMetrics
from asyncflow.telemetry.spans import NO_SPANS, Spans
from asyncflow.weights.transport import Transport, open_transport

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_BEAT_S = 0.5
_SELDOM = (20_000, 20, 100)
"""Thresholds of the garbage collector's generations (``gc.set_threshold``)."""
BEYOND_REPAIR = (ManifestError, CheckpointError, LedgerCorrupt, Diverged)
"""Errors that the same process would meet again, unless a disk that fails now has caused them."""
_PASSING = frozenset({errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.ETIMEDOUT})


class _EndedBeforeJoining(Exception):
    """This process was told to end, and has nothing to hand on yet."""


@dataclass(frozen=True, kw_only=True)
class RoleOptions:
    """The command line of a role.

    job: the manifest, a job's or a queue's; driver: the address that all dial, the own one of whoever leads; http_port:
    0 is any, as are control_port, of the driver's control service, and serve_port, of a follower's inference service;
    sync: the WeightSync by which a follower follows a job, None for none;
    http_socket: descriptor of a bound socket to serve HTTP at instead; local_rank: which rank of its replica this
    process is, None for a replica itself, which is its only rank or starts several.
    """

    role: str
    job: Path
    driver: str
    index: int
    attempt: int
    workdir: Path
    http_port: int = 0
    control_port: int = 0
    http_socket: int | None = None
    serve_port: int = 0
    sync: Path | None = None
    local_rank: int | None = None


@dataclass(kw_only=True)
class ProcessContext:
    """One process and its place among the others.

    host: the address that it serves on and that others dial; stopping: set when the process is to end; draining: set
    when it shall first give back what it has; signal: which signal ends it, 0 for none; spans: records what it does.

    By the manifest: access decides who may call what of the servers of this process; owner: name of the job or queue,
    which nothing else in the cluster has (on one machine, its own name); queue, ledger: specifications of the queue and
    of its ledger, where there is one; weights: how versions travel, where there are some; start_s: seconds that this
    process may take to become ready.
    """

    options: RoleOptions
    credentials: Credentials | None = None
    host: str = LOOPBACK
    worker: str = ""
    started: float = field(default_factory=clock.now)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    signal: int = 0
    spans: Spans = NO_SPANS
    access: Access = field(init=False)
    owner: str = field(init=False)
    queue: QueueSpec = field(init=False)
    ledger: LedgerSpec = field(init=False)
    weights: WeightsSpec = field(init=False)
    start_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.worker = self.worker or worker_name(self.options.role, self.options.index, uuid.uuid4().hex)

    @property
    def bind(self) -> str:
        """Address at which an RPC server of this process listens: any port of the host."""
        return f"tcp://{self.host}:*"

    @property
    def launches(self) -> bool:
        """Return whether this process only starts others, which do the work."""
        return False

    @contextlib.asynccontextmanager
    async def recording(self, *, age_s: float = 0.0) -> AsyncIterator[None]:
        """Record what this process does in its folder, as one that began ``age_s`` seconds ago."""
        options = self.options
        if self.launches:
            yield
            return
        self.spans = Spans.of(
            options.workdir,
            role=options.role,
            index=options.index,
            attempt=options.attempt,
            began=clock.now() - age_s,
        )
        ended = threading.Event()
        threading.Thread(target=self._beat, args=(ended,), name="pulse of the spans", daemon=True).start()
        try:
            yield
        finally:
            ended.set()
            self.spans.close()

    def _beat(self, ended: threading.Event) -> None:
        """Show that this process is there, also while its event loop is held up by an import."""
        while not ended.wait(_BEAT_S):
            self.spans.pulse()

    @property
    def insecure(self) -> bool:
        """Return whether other hosts are served without a certificate."""
        return self.credentials is None and not is_loopback(self.host)

    @property
    def store_password(self) -> str:
        """The password of the queue's store, "" for none: that of one that others run, else of the job's own.

        Raises ManifestError where that file cannot be read.
        """
        if self.queue.store is None:
            return self.credentials.secret(STORE_SECRET) if self.credentials is not None else ""
        return _password_of_file() if self.queue.store.password is not None else ""

    def http(self, metrics: RoleMetrics, *, ready: Ready = ready, routes: Iterable[web.RouteDef] = ()) -> HttpServer:
        """Return the HTTP server of this role, not yet started. routes: those that not every role has."""
        metrics.insecure.set(self.insecure)

        async def certificate() -> None:
            if self.credentials is not None:
                self.credentials.look()
                metrics.certificate_errors.set(self.credentials.reload_errors)

        metrics.refreshed.append(certificate)
        common = role_routes(metrics.registry, ready=ready, refreshed=metrics.refreshed)
        return HttpServer([*common, *routes])

    async def join(
        self,
        *,
        metrics: RoleMetrics,
        address: str = "",
        status: Callable[[], Status] = dict,
        ready: Ready = ready,
        routes: Iterable[web.RouteDef] = (),
        directory: str = "",
    ) -> Membership:
        """Serve metrics, register with the directory, and obey its directives from now on.

        ready: asked by ``/readyz``, which says no until this process is registered; routes: further ones of this
        role; directory: its address, by default the one that all dial. A process that is told to end before it is
        registered ends.
        """
        registered = False

        def readiness() -> tuple[bool, str]:
            return ready() if registered else (False, "the driver has not registered it yet")

        http = self.http(metrics, ready=readiness, routes=routes)
        given = self.options.http_socket
        bound = socket.socket(fileno=given) if given is not None else None
        url = await http.start(self.host, self.options.http_port, bound=bound)
        member = Member(
            role=self.options.role,
            index=self.options.index,
            incarnation=self.worker,
            attempt=self.options.attempt,
            address=address,
            http=url,
        )

        def aged_status() -> Status:
            return {AGE: clock.now() - self.started, FIGURES: metrics.figures(), **status()}

        membership = Membership(
            driver=directory or self.options.driver, member=member, credentials=self.credentials, status=aged_status
        )
        membership.on_directives.append(self._obey)
        if not await self.unless_stopped(membership.join(self.start_s)):
            raise _EndedBeforeJoining
        registered = True
        return membership

    def transport(self, accelerator: AcceleratorSpec) -> Transport:
        """Open the transport of weights of this worker, which has devices of ``accelerator``."""
        weights, profile = self.weights, PROFILES[accelerator.profile]
        device = profile.device if profile.device == "cpu" else f"{profile.device}:{self.options.local_rank or 0}"
        return open_transport(
            weights.transport,
            device=device,
            collective=profile.collective,
            name=f"{self.options.role}-{self.options.index}",
            bind=self.bind,
            credentials=self.credentials,
            chunk_bytes=weights.chunk_bytes.bytes,
            delta=weights.delta,
            bandwidth=None if weights.bandwidth is None else weights.bandwidth.bytes,
        )

    async def unless_stopped(self, work: Coroutine[Any, Any, object]) -> bool:
        """Do ``work``; return False where it was cancelled because this process is to end. Raises what it raises."""
        working, told = asyncio.create_task(work), asyncio.create_task(self.stopping.wait())
        await asyncio.wait((working, told), return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if working.done():
            working.result()
            return True
        working.cancel()
        await asyncio.wait((working,))
        return False

    async def call_when_told(self, leave: Callable[[], None]) -> None:
        """Call ``leave`` as soon as this process is to end, or first to give back what it has."""
        waits = [asyncio.create_task(event.wait()) for event in (self.stopping, self.draining)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        leave()

    def _obey(self, directives: Directives) -> None:
        if directives.drain:
            self.draining.set()
        if directives.stop:
            self.stopping.set()


@dataclass(kw_only=True)
class JobContext(ProcessContext):
    """Context of a process of a job, whose driver all dial; the ranks of a trainer's replica share a certificate."""

    job: RLJob

    def __post_init__(self) -> None:
        super().__post_init__()
        spec = self.job.spec
        self.access = Access(ranks=spec.trainer.local_ranks, table=job_table(spec.own_tasks))
        self.owner, self.start_s = self.job.partition, spec.limits.start_seconds
        self.queue, self.ledger, self.weights = spec.transfer_queue, spec.storage.ledger, spec.weight_sync

    @property
    def folder(self) -> Path:
        """The folder where the job's relative paths and modules begin."""
        return self.job.folder(self.options.job.parent)

    @property
    def launches(self) -> bool:
        """Return whether this process only starts the ranks of a trainer's replica."""
        several = self.options.role == "trainer" and self.job.spec.trainer.local_ranks > 1
        return several and self.options.local_rank is None

    def control(self, routes: Iterable[web.RouteDef], *, refused: Callable[[str, str], None]) -> HttpServer | None:
        """Return the service by which a supervisor or a person directs this process, not yet started.

        None without a certificate: then nobody could know who directs it. refused: see ``Guard``.
        """
        if self.credentials is None:
            return None
        token = os.environ.get(TOKEN_FILE_ENV)
        roles, file = (OPERATOR, "driver"), Path(token) if token else None
        return HttpServer(routes, guard=Guard(self.credentials, roles=roles, token_file=file, refused=refused))


@dataclass(kw_only=True)
class QueueContext(ProcessContext):
    """Context of a process of a queue that stands alone, whose controller all dial.

    This user's other processes on this host are its clients.
    """

    resource: TransferQueue

    def __post_init__(self) -> None:
        super().__post_init__()
        self.access = Access(unnamed=CLIENT)
        self.owner = self.resource.metadata.uid or self.resource.metadata.name
        self.queue, self.ledger = self.resource.spec, self.resource.spec.ledger
        self.start_s = LimitsSpec().start_seconds


@dataclass(kw_only=True)
class SyncContext(ProcessContext):
    """Context of a process of a WeightSync whose model is published, or of one that follows it.

    Raises ManifestError where it publishes none.
    """

    resource: WeightSync

    def __post_init__(self) -> None:
        super().__post_init__()
        self.access = Access()
        self.owner = self.resource.metadata.uid or self.resource.metadata.name
        self.weights, self.start_s = self.resource.spec, LimitsSpec().start_seconds
        if self.resource.spec.publishes is None:
            what, hint = "it publishes no model by itself", "Give spec.source.model"
            raise ManifestError(what, where=f"WeightSync {self.resource.metadata.name}", hint=hint)

    @property
    def source(self) -> WeightSourceSpec:
        """The model, and whether others will be published."""
        assert self.resource.spec.source is not None
        return self.resource.spec.source


def run_role(
    serve: Callable[[JobContext], Awaitable[int | None]] | None,
    options: RoleOptions,
    *,
    alone: Callable[[QueueContext], Awaitable[None]] | None = None,
    published: Callable[[SyncContext], Awaitable[None]] | None = None,
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> int:
    """Run a role to its end and return its exit status, which may be what ``serve`` returns.

    serve: in a job; alone: in a queue that stands alone; published: for a model that no job trains; None for what has
    no such role; new_loop: makes the event loop.
    """
    setup_logging(options.role, options.index)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    status = 0
    serving: dict[type[Spec], tuple[Any, Any]] = {
        RLJob: (JobContext, serve),
        TransferQueue: (QueueContext, alone),
        WeightSync: (SyncContext, published),
    }
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            manifest = load(options.job)
            status = runner.run(_run(*serving[type(manifest)], options, manifest))
    except* AsyncFlowError as group:
        errors = list(_leaves(group))
        for error in errors:
            log.error("%s", error)
        status = _status(errors)
    return status


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """Pause the garbage collector while much is read or made that is no garbage, and exempt that from then on."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def freeze_gc() -> None:
    """Exempt what is there now from garbage collection, and collect the rest seldom.

    For a role that holds very many small things which refer to one another in no circle: counting lets go of them, and
    to go through them again and again would find nothing.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_SELDOM)


def _status(errors: Sequence[AsyncFlowError]) -> int:
    """Return the exit status of a role that ended because of ``errors``."""
    if any(map(_is_final, errors)):
        return REFUSED
    return DISRUPTED if any(isinstance(error, RowsLost) for error in errors) else 1


async def _run(
    kind: Callable[..., Any],
    serve: Callable[[Any], Awaitable[int | None]] | None,
    options: RoleOptions,
    manifest: Manifest,
) -> int:
    """Run ``serve`` in a context of ``kind``. Raises ManifestError where there is no such role."""
    if serve is None:
        where, hint = str(options.job), "Give a manifest of another kind, such as an RLJob"
        raise ManifestError(f"kind = {manifest.kind!r}: it has no {options.role}", where=where, hint=hint)
    host, given = os.environ.get(HOST_ENV, LOOPBACK), "job" if isinstance(manifest, RLJob) else "resource"
    context = kind(options=options, credentials=Credentials.of_environment(), host=host, **{given: manifest})
    return await _serve(context, serve(context))


async def _serve(context: ProcessContext, serving: Awaitable[int | None]) -> int:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _end, context, number)
    log.info("attempt %d, worker %s, pid %d", context.options.attempt, context.worker, os.getpid())
    async with context.recording(age_s=age_s()):
        try:
            status = await serving
        except* _EndedBeforeJoining:
            status = 0
    log.info("ended after %.1f s", clock.now() - context.started)
    return status or (128 + context.signal if context.signal else 0)


def _end(context: ProcessContext, number: int) -> None:
    log.info("told to end by %s", signal.Signals(number).name)
    context.signal = number
    context.draining.set()
    context.stopping.set()


def _is_final(error: AsyncFlowError) -> bool:
    cause = error.__cause__
    return isinstance(error, BEYOND_REPAIR) and not (isinstance(cause, OSError) and cause.errno in _PASSING)


def _leaves(group: BaseExceptionGroup[AsyncFlowError]) -> Iterator[AsyncFlowError]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def _password_of_file() -> str:
    path = Path(os.environ.get(STORE_PASSWORD_FILE_ENV, STORE_PASSWORD_FILE))
    try:
        return path.read_text().rstrip("\n")
    except OSError as error:
        what, hint = f"the password of the store cannot be read: {error}", f"{STORE_PASSWORD_FILE_ENV} names its file"
        raise ManifestError(what, where="store.password", hint=hint) from error
