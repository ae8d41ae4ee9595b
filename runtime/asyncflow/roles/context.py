"""Execution of a role from its command line to its exit status, and the context in which it runs.

A role is an async function that takes a ``ProcessContext``: its identity and settings in a job, in a standalone queue,
or for a published model. It ends when the driver tells it to stop or drain, on SIGTERM or SIGINT, or when a newer
incarnation has replaced it.

Roles can be started one after another (``plan.roles.Role.after``). A process is ready when it can do its work: the
driver can register members, a controller can serve, a storage unit can hold samples, the trainer's ranks have formed
their group and published the first weights, and a rollout has loaded its first weights. The readiness of a role never
depends on a role that starts after it.

Invariants:

* The address that a process reports to other processes is ``host``, never "all interfaces".
* ``/readyz`` answers 503 until the process is registered.
* The contexts of a job, of a standalone queue and of a published model differ only in values from the manifest.
* The exit status of a role says how it ended. 0: it finished, or the driver stopped it; 1: an error that a restart may
  resolve; 2: an error that a restart cannot resolve; 3: its work was lost because another process ended; 128 + n: ended
  by signal n. The message of an error is logged.
* The event loop of a role never computes, so heartbeats continue.
* A role may open as many files and sockets as the hard limit of its process allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
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
from asyncflow.process import age_s, allow_open_files
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
_RARE_GC = (20_000, 20, 100)
"""Thresholds of the garbage collector's generations (``gc.set_threshold``) that make collections rare."""
_FINAL = (ManifestError, CheckpointError, LedgerCorrupt, Diverged)
"""Errors that a restart cannot resolve, unless they are caused by a temporary failure of the disk."""
_TEMPORARY = frozenset({errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.ETIMEDOUT})


class _EndedBeforeJoining(Exception):
    """This process is to end before it is registered, so it has no work to hand on."""


@dataclass(frozen=True, kw_only=True)
class RoleOptions:
    """The command line of a role.

    job: file of the manifest; driver: address to which all processes connect (the first role listens there);
    http_port: port of the HTTP service, 0 for any; control_port: port of the driver's control service, 0 for any;
    http_socket: descriptor of a bound socket for the HTTP service, instead of ``http_port``; serve_port: port of a
    follower's inference service, 0 for any; sync: file of the WeightSync of a job's follower, None for none;
    local_rank: index of this rank in its replica; None for the process of a replica, which is its only rank or starts
    several.
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
    """One process and its settings.

    host: address at which it serves and to which other processes connect; worker: unique name of this incarnation;
    stopping: set when the process is to end; draining: set when it is to hand on its work first; signal: number of the
    signal that ends it, 0 for none; spans: recorder of its activities.

    Values from the manifest: access: the callers that each method of this process's servers allows; owner: name of the
    job or queue, unique in the cluster (on one machine, its metadata.name); queue, ledger: specifications of the queue
    and of its ledger, if there is one; weights: transfer of versions, if there are any; start_s: seconds in which this
    process must become ready.
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
        """Address for an RPC server of this process to listen at: any port of the host."""
        return f"tcp://{self.host}:*"

    @property
    def launches(self) -> bool:
        """Return whether this process only starts other processes, which do the work."""
        return False

    @contextlib.asynccontextmanager
    async def recording(self, *, age_s: float = 0.0) -> AsyncIterator[None]:
        """Record the spans of this process, which started ``age_s`` seconds ago, in the run's folder."""
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
        """Record that this process is alive, also while an import blocks its event loop."""
        while not ended.wait(_BEAT_S):
            self.spans.pulse()

    @property
    def insecure(self) -> bool:
        """Return whether other hosts are served without a certificate."""
        return self.credentials is None and not is_loopback(self.host)

    @property
    def store_password(self) -> str:
        """The password of the queue's store, "" for none.

        The password of an external store is read from a file, that of the job's own store from the credentials. Raises
        ManifestError if the file cannot be read.
        """
        if self.queue.store is None:
            return self.credentials.secret(STORE_SECRET) if self.credentials is not None else ""
        return _password_of_file() if self.queue.store.password is not None else ""

    def http(self, metrics: RoleMetrics, *, ready: Ready = ready, routes: Iterable[web.RouteDef] = ()) -> HttpServer:
        """Return the HTTP server of this role, not yet started. routes: routes in addition to the common ones."""
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
        """Serve metrics, register with the directory, and follow its directives from now on.

        address: address of this process's RPC server, if any; status: returns the status for heartbeats; ready: called
        by ``/readyz`` once this process is registered; routes: further HTTP routes of this role; directory: address of
        the directory, by default the address to which all processes connect. If this process is to end before it is
        registered, the role ends with exit status 0, or that of the signal.
        """
        registered = False

        def readiness() -> tuple[bool, str]:
            return ready() if registered else (False, "the driver has not registered it yet")

        http = self.http(metrics, ready=readiness, routes=routes)
        descriptor = self.options.http_socket
        bound = socket.socket(fileno=descriptor) if descriptor is not None else None
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
        membership.on_directives.append(self._apply)
        if not await self.run_until_stopped(membership.join(self.start_s)):
            raise _EndedBeforeJoining
        registered = True
        return membership

    def transport(self, accelerator: AcceleratorSpec) -> Transport:
        """Open the weight transport of this worker. accelerator: devices of this worker."""
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

    async def run_until_stopped(self, work: Coroutine[Any, Any, object]) -> bool:
        """Run ``work``; return False if it was cancelled because this process is to end. Its exceptions propagate."""
        working, stopped = asyncio.create_task(work), asyncio.create_task(self.stopping.wait())
        await asyncio.wait((working, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if working.done():
            working.result()
            return True
        working.cancel()
        await asyncio.wait((working,))
        return False

    async def call_when_leaving(self, leave: Callable[[], None]) -> None:
        """Call ``leave`` as soon as this process is to drain or to end."""
        waits = [asyncio.create_task(event.wait()) for event in (self.stopping, self.draining)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        leave()

    def _apply(self, directives: Directives) -> None:
        if directives.drain:
            self.draining.set()
        if directives.stop:
            self.stopping.set()


@dataclass(kw_only=True)
class JobContext(ProcessContext):
    """Context of a process of a job; the ranks of a trainer's replica share a certificate."""

    job: RLJob

    def __post_init__(self) -> None:
        super().__post_init__()
        spec = self.job.spec
        self.access = Access(ranks=spec.trainer.local_ranks, table=job_table(spec.own_tasks))
        self.owner, self.start_s = self.job.partition, spec.limits.start_seconds
        self.queue, self.ledger, self.weights = spec.transfer_queue, spec.storage.ledger, spec.weight_sync

    @property
    def folder(self) -> Path:
        """The base folder of the job's relative paths and modules."""
        return self.job.folder(self.options.job.parent)

    @property
    def launches(self) -> bool:
        """Return whether this process only starts the ranks of a trainer's replica."""
        several = self.options.role == "trainer" and self.job.spec.trainer.local_ranks > 1
        return several and self.options.local_rank is None

    def control(self, routes: Iterable[web.RouteDef], *, refused: Callable[[str, str], None]) -> HttpServer | None:
        """Return the control service of this process, for operators and users, not yet started.

        Returns None if this process has no certificate, since callers could then not be authenticated. refused: see
        ``Guard``.
        """
        if self.credentials is None:
            return None
        token = os.environ.get(TOKEN_FILE_ENV)
        roles, file = (OPERATOR, "driver"), Path(token) if token else None
        return HttpServer(routes, guard=Guard(self.credentials, roles=roles, token_file=file, refused=refused))


@dataclass(kw_only=True)
class QueueContext(ProcessContext):
    """Context of a process of a standalone queue; all processes connect to its first controller.

    Other processes of the same user on this host are clients of the queue.
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
    """Context of a process that publishes the model of a WeightSync, or that follows it.

    Raises ManifestError if the WeightSync has no model of its own to publish.
    """

    resource: WeightSync

    def __post_init__(self) -> None:
        super().__post_init__()
        self.access = Access()
        self.owner = self.resource.metadata.uid or self.resource.metadata.name
        self.weights, self.start_s = self.resource.spec, LimitsSpec().start_seconds
        if self.resource.spec.publishes is None:
            what, hint = "it has no model of its own to publish", "Set spec.source.model"
            raise ManifestError(what, where=f"WeightSync {self.resource.metadata.name}", hint=hint)

    @property
    def source(self) -> WeightSourceSpec:
        """The source of the model."""
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
    """Run a role to its end, and return its exit status, or the status that the role's function returned.

    serve: function of the role in a job; alone: function in a standalone queue; published: function for a model that no
    job trains; each is None if that kind of manifest has no such role; new_loop: creates the event loop.
    """
    setup_logging(options.role, options.index)
    status = 0
    serving: dict[type[Spec], tuple[Any, Any]] = {
        RLJob: (JobContext, serve),
        TransferQueue: (QueueContext, alone),
        WeightSync: (SyncContext, published),
    }
    try:
        allow_open_files()
        with asyncio.Runner(loop_factory=new_loop) as runner:
            manifest = load(options.job)
            status = runner.run(_run(*serving[type(manifest)], options, manifest))
    except* AsyncFlowError as group:
        errors = list(_flatten(group))
        for error in errors:
            log.error("%s", error)
        status = _status(errors)
    except* SystemExit:
        log.exception("code that was called here has ended the process")
        status = 1
    return status


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """Pause garbage collection while many long-lived objects are created, and exempt them from later collections."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def freeze_gc() -> None:
    """Exempt all existing objects from garbage collection, and collect later ones rarely.

    This is for roles with very many small objects without reference cycles: reference counting frees these objects, and
    scanning them would find nothing.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_RARE_GC)


def _status(errors: Sequence[AsyncFlowError]) -> int:
    """Return the exit status of a role that ended with ``errors``."""
    if any(map(_is_final, errors)):
        return REFUSED
    return DISRUPTED if any(isinstance(error, RowsLost) for error in errors) else 1


async def _run(
    kind: Callable[..., Any],
    serve: Callable[[Any], Awaitable[int | None]] | None,
    options: RoleOptions,
    manifest: Manifest,
) -> int:
    """Run ``serve`` in a context of ``kind``. Raises ManifestError if the kind of manifest has no such role."""
    if serve is None:
        where, hint = str(options.job), "Pass a manifest of another kind, such as an RLJob"
        raise ManifestError(f"kind = {manifest.kind!r}: it has no {options.role}", where=where, hint=hint)
    host, name = os.environ.get(HOST_ENV, LOOPBACK), "job" if isinstance(manifest, RLJob) else "resource"
    context = kind(options=options, credentials=Credentials.of_environment(), host=host, **{name: manifest})
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
    log.info("ending because of %s", signal.Signals(number).name)
    context.signal = number
    context.draining.set()
    context.stopping.set()


def _is_final(error: AsyncFlowError) -> bool:
    cause = error.__cause__
    return isinstance(error, _FINAL) and not (isinstance(cause, OSError) and cause.errno in _TEMPORARY)


def _flatten(group: BaseExceptionGroup[AsyncFlowError]) -> Iterator[AsyncFlowError]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _flatten(error)
        else:
            yield error


def _password_of_file() -> str:
    path = Path(os.environ.get(STORE_PASSWORD_FILE_ENV, STORE_PASSWORD_FILE))
    try:
        return path.read_text().rstrip("\n")
    except OSError as error:
        what, hint = f"the password of the store cannot be read: {error}", f"{STORE_PASSWORD_FILE_ENV} names its file"
        raise ManifestError(what, where="store.password", hint=hint) from error
