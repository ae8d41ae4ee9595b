"""What all roles have in common: logging, metrics, membership, and when to stop.

A role is an async function that is given a ``Post``. It ends when the driver says stop or drain, on SIGTERM or SIGINT,
or when it was replaced by a newer incarnation.

Invariants: a role's exit status says how it ended (0: done, or told to by the driver; 1: an error that a restart may
mend; 2: one that it cannot; 128 + n: ended by signal n), and an error is logged with its words; the event loop of a
role never computes, so that heartbeats go on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from asyncflow.api.job import RLJob
from asyncflow.api.load import load_job
from asyncflow.api.names import FOLDER, KEY_FILE, KEY_FILE_ENV
from asyncflow.errors import AsyncFlowError, CheckpointError, LedgerCorrupt, ManifestError
from asyncflow.net.http import Ready, RoleHttp
from asyncflow.net.keys import Keys
from asyncflow.net.membership import Membership
from asyncflow.net.roster import Directives, Member, Status
from asyncflow.telemetry.logs import setup_logging
from asyncflow.telemetry.metrics import RoleMetrics

log = logging.getLogger(__name__)

REFUSED = 2
BEYOND_REPAIR = (ManifestError, CheckpointError, LedgerCorrupt)
"""Errors that the same process would meet again."""
HOST = "ASYNCFLOW_HOST"
"""Environment variable with the address that a role serves on; loopback where it is not set."""


@dataclass(frozen=True, kw_only=True)
class RoleOptions:
    """The command line of a role. job: the manifest; driver: the address that all dial; http_port: 0 is any."""

    role: str
    job: Path
    driver: str
    index: int
    attempt: int
    workdir: Path
    http_port: int = 0


@dataclass(kw_only=True)
class Post:
    """One process at its place.

    stopping: set when the process is to end; draining: set when it shall first hand back what it has; signal: which
    signal ends it, 0 for none.
    """

    options: RoleOptions
    job: RLJob
    keys: Keys | None
    host: str
    worker: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: float = field(default_factory=time.time)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    signal: int = 0

    @property
    def bind(self) -> str:
        """Where an RPC server of this process listens: any port of the host."""
        return f"tcp://{self.host}:*"

    @property
    def start_s(self) -> float:
        """Seconds that this process may take to become ready."""
        return self.job.spec.limits.start_seconds

    def http(self, metrics: RoleMetrics, *, ready: Ready | None = None) -> RoleHttp:
        """Give the HTTP server of this role, not yet started."""
        token = os.environ.get("ASYNCFLOW_TOKEN_FILE")
        token_file = Path(token) if token else None
        if ready is None:
            return RoleHttp(registry=metrics.registry, token_file=token_file)
        return RoleHttp(registry=metrics.registry, ready=ready, token_file=token_file)

    async def join(
        self,
        *,
        metrics: RoleMetrics,
        address: str = "",
        status: Callable[[], Status] = dict,
        info: dict[str, str | int | float | bool] | None = None,
    ) -> Membership:
        """Serve metrics, register with the driver, and obey its directives from now on."""
        url = await self.http(metrics).start(self.host, self.options.http_port)
        member = Member(
            role=self.options.role,
            index=self.options.index,
            incarnation=self.worker,
            attempt=self.options.attempt,
            address=address,
            http=url,
            info={"started": self.started, **(info or {})},
        )
        membership = Membership(driver=self.options.driver, member=member, keys=self.keys, status=status)
        membership.on_directives.append(self._obey)
        await membership.join(self.start_s)
        return membership

    def _obey(self, directives: Directives) -> None:
        if directives.drain:
            self.draining.set()
        if directives.stop:
            self.stopping.set()


def job_folder(job: RLJob, options: RoleOptions) -> Path:
    """Give the folder where the job's relative paths and modules are: that of its manifest, unless the job says."""
    return Path((job.metadata.annotations or {}).get(FOLDER, options.job.parent))


def keys_of_job() -> Keys | None:
    """Give the job's key, where the substrate has put one."""
    named = os.environ.get(KEY_FILE_ENV)
    path = Path(named or KEY_FILE)
    return Keys.load(path) if named or path.exists() else None


def run_role(serve: Callable[[Post], Awaitable[None]], options: RoleOptions) -> int:
    """Run a role to its end and give its exit status."""
    setup_logging(options.role, options.index)
    status = 0
    try:
        status = asyncio.run(_serve(serve, options, load_job(options.job)))
    except* AsyncFlowError as group:
        errors = list(_leaves(group))
        for error in errors:
            log.error("%s", error)
        status = REFUSED if any(isinstance(error, BEYOND_REPAIR) for error in errors) else 1
    return status


async def _serve(serve: Callable[[Post], Awaitable[None]], options: RoleOptions, job: RLJob) -> int:
    post = Post(options=options, job=job, keys=keys_of_job(), host=os.environ.get(HOST, "127.0.0.1"))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _end, post, number)
    log.info("attempt %d, worker %s, pid %d", options.attempt, post.worker, os.getpid())
    await serve(post)
    log.info("ended after %.1f s", time.time() - post.started)
    return 128 + post.signal if post.signal else 0


def _end(post: Post, number: int) -> None:
    log.info("told to end by %s", signal.Signals(number).name)
    post.signal = number
    post.draining.set()
    post.stopping.set()


def _leaves(group: BaseExceptionGroup[AsyncFlowError]) -> Iterator[AsyncFlowError]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
