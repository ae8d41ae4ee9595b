"""Place of one process: its command line, its manifest, its address, and how it joins the others.

Invariants: what a process gives to others as its address is ``host``, never "all interfaces"; ``/readyz`` says no until
the process is registered; a place in a job and one in a queue that stands alone differ in what the manifest says, and
in nothing else.
"""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from asyncflow import clock
from asyncflow.api.durability import LedgerSpec, LimitsSpec
from asyncflow.api.job import RLJob
from asyncflow.api.names import (
    FOLDER,
    KEY_FILE,
    KEY_FILE_ENV,
    STORE_PASSWORD_FILE,
    STORE_PASSWORD_FILE_ENV,
    TOKEN_FILE_ENV,
)
from asyncflow.api.queue import QueueSpec, TransferQueue
from asyncflow.errors import ManifestError
from asyncflow.net.http import HttpServer, Ready, ready, role_routes
from asyncflow.net.keys import Keys
from asyncflow.net.membership import Membership
from asyncflow.net.roster import AGE, Directives, Member, Status
from asyncflow.telemetry.metrics import RoleMetrics

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class RoleOptions:
    """The command line of a role.

    job: the manifest, a job's or a queue's; driver: the address that all dial, the own one of whoever leads; http_port:
    0 is any; http_socket: descriptor of a bound socket to serve it at instead; local_rank: which rank of its replica
    this process is, None for a replica itself, which is its only rank or starts several.
    """

    role: str
    job: Path
    driver: str
    index: int
    attempt: int
    workdir: Path
    http_port: int = 0
    http_socket: int | None = None
    local_rank: int | None = None


@dataclass(kw_only=True)
class Post(ABC):
    """One process at its place.

    host: the address that it serves on and that others dial; stopping: set when the process is to end; draining: set
    when it shall first hand back what it has; signal: which signal ends it, 0 for none.
    """

    options: RoleOptions
    keys: Keys | None = None
    host: str = LOOPBACK
    worker: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: float = field(default_factory=clock.now)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    signal: int = 0

    @property
    def bind(self) -> str:
        """Address at which an RPC server of this process listens: any port of the host."""
        return f"tcp://{self.host}:*"

    @property
    @abstractmethod
    def owner(self) -> str:
        """Whose process this is, by a name that nothing else in the cluster has; on one machine by its name."""

    @property
    @abstractmethod
    def queue(self) -> QueueSpec:
        """Specification of the queue."""

    @property
    @abstractmethod
    def ledger(self) -> LedgerSpec:
        """Specification of the queue's ledger."""

    @property
    def store_password(self) -> str:
        """The password of the queue's store, "" for none: what a file says of one that others run, else of the key.

        Raises ManifestError where that file cannot be read.
        """
        if self.queue.store is None:
            return self.keys.derived("redis").hex() if self.keys is not None else ""
        return _password_of_file() if self.queue.store.password is not None else ""

    @property
    @abstractmethod
    def start_s(self) -> float:
        """Seconds that this process may take to become ready."""

    def http(self, metrics: RoleMetrics, *, ready: Ready = ready, routes: Iterable[web.RouteDef] = ()) -> HttpServer:
        """Return the HTTP server of this role, not yet started. routes: those that not every role has."""
        token = os.environ.get(TOKEN_FILE_ENV)
        common = role_routes(metrics.registry, ready=ready, refreshed=metrics.refreshed)
        return HttpServer([*common, *routes], token_file=Path(token) if token else None)

    async def join(
        self,
        *,
        metrics: RoleMetrics,
        address: str = "",
        status: Callable[[], Status] = dict,
        info: dict[str, str | int | float | bool] | None = None,
        ready: Ready = ready,
        routes: Iterable[web.RouteDef] = (),
        directory: str = "",
    ) -> Membership:
        """Serve metrics, register with the directory, and obey its directives from now on.

        ready: asked by ``/readyz``, which says no until this process is registered; routes: further ones of this
        role; directory: its address, by default the one that all dial.
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
            info=info or {},
        )

        def told() -> Status:
            return {AGE: clock.now() - self.started, **status()}

        membership = Membership(driver=directory or self.options.driver, member=member, keys=self.keys, status=told)
        membership.on_directives.append(self._obey)
        await membership.join(self.start_s)
        registered = True
        return membership

    def _obey(self, directives: Directives) -> None:
        if directives.drain:
            self.draining.set()
        if directives.stop:
            self.stopping.set()


@dataclass(kw_only=True)
class JobPost(Post):
    """A place in a job, whose driver all dial."""

    job: RLJob

    @property
    def owner(self) -> str:
        """The job."""
        return self.job.partition

    @property
    def queue(self) -> QueueSpec:
        """The job's own."""
        return self.job.spec.transfer_queue

    @property
    def ledger(self) -> LedgerSpec:
        """The job's own."""
        return self.job.spec.storage.ledger

    @property
    def start_s(self) -> float:
        """As the job says."""
        return self.job.spec.limits.start_seconds


@dataclass(kw_only=True)
class QueuePost(Post):
    """A place in a queue that stands alone, whose controller all dial."""

    resource: TransferQueue

    @property
    def owner(self) -> str:
        """The queue."""
        return self.resource.metadata.uid or self.resource.metadata.name

    @property
    def queue(self) -> QueueSpec:
        """The queue itself."""
        return self.resource.spec

    @property
    def ledger(self) -> LedgerSpec:
        """Its ledger."""
        return self.resource.spec.ledger

    @property
    def start_s(self) -> float:
        """Seconds that this process may take to become ready: the default of a job."""
        return LimitsSpec().start_seconds


def job_folder(job: RLJob, options: RoleOptions) -> Path:
    """Return the folder where the job's relative paths and modules are: that of its manifest, unless the job says."""
    return Path((job.metadata.annotations or {}).get(FOLDER, options.job.parent))


def keys_of_job() -> Keys | None:
    """Return the job's key, where the substrate has put one."""
    named = os.environ.get(KEY_FILE_ENV)
    path = Path(named or KEY_FILE)
    return Keys.load(path) if named or path.exists() else None


def _password_of_file() -> str:
    path = Path(os.environ.get(STORE_PASSWORD_FILE_ENV, STORE_PASSWORD_FILE))
    try:
        return path.read_text().rstrip("\n")
    except OSError as error:
        what, hint = f"the password of the store cannot be read: {error}", f"{STORE_PASSWORD_FILE_ENV} names its file"
        raise ManifestError(what, where="store.password", hint=hint) from error
