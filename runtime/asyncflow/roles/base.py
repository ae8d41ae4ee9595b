"""Execution of a role from its command line to its exit status.

A role is an async function that is given a ``Post``: a place in a job, or in a queue that stands alone. It ends when
the driver says stop or drain, on SIGTERM or SIGINT, or when it was replaced by a newer incarnation.

What each is ready for, so that roles can be started one after another (``plan.roles.Role.after``): the driver to
register others, the controller to serve, a storage unit to hold samples, the trainer's ranks to train (the gang has
met, its first weights are published), a rollout to generate (its first weights are loaded). Nobody's readiness waits
for a role that starts after it.

Invariants: a role's exit status says how it ended (0: done, or told to by the driver; 1: an error that a restart may
mend; 2: one that it cannot; 3: what it worked on was lost with another process; 128 + n: ended by signal n), and an
error is logged with its words; the event loop of a role never computes, so that heartbeats go on; a role may open as
many files and sockets as the hard limit of its process allows.
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
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from asyncflow import clock
from asyncflow.api.job import RLJob
from asyncflow.api.load import Manifest, load
from asyncflow.api.names import HOST_ENV
from asyncflow.api.queue import TransferQueue
from asyncflow.errors import AsyncFlowError, CheckpointError, Diverged, LedgerCorrupt, ManifestError, RowsLost
from asyncflow.net.loop import Loop
from asyncflow.plan.roles import DISRUPTED, REFUSED
from asyncflow.roles.post import LOOPBACK, JobPost, Post, QueuePost, RoleOptions, keys_of_job
from asyncflow.telemetry.logs import setup_logging

log = logging.getLogger(__name__)

_SELDOM = (20_000, 20, 100)
"""Thresholds of the garbage collector's generations (``gc.set_threshold``)."""
BEYOND_REPAIR = (ManifestError, CheckpointError, LedgerCorrupt, Diverged)
"""Errors that the same process would meet again, unless a disk that fails now has caused them."""
_PASSING = frozenset({errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.ETIMEDOUT})


def run_role(
    serve: Callable[[JobPost], Awaitable[int | None]],
    options: RoleOptions,
    *,
    alone: Callable[[QueuePost], Awaitable[None]] | None = None,
) -> int:
    """Run a role to its end and return its exit status, which may be what ``serve`` returns.

    alone: how to be it in a queue that stands alone, if it can.
    """
    setup_logging(options.role, options.index)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    status = 0
    try:
        with asyncio.Runner(loop_factory=Loop) as runner:
            status = runner.run(_run(serve, alone, options, load(options.job)))
    except* AsyncFlowError as group:
        errors = list(_leaves(group))
        for error in errors:
            log.error("%s", error)
        status = _status(errors)
    return status


def _status(errors: Sequence[AsyncFlowError]) -> int:
    """Return the exit status of a role that ended because of ``errors``."""
    if any(map(_is_final, errors)):
        return REFUSED
    return DISRUPTED if any(isinstance(error, RowsLost) for error in errors) else 1


@contextlib.contextmanager
def resting_collector() -> Iterator[None]:
    """Have the garbage collector rest while what is none is read or made, and pass over that from then on."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def calm_collector() -> None:
    """Have the garbage collector pass over what is there now, and look at the rest seldom.

    For a role that holds very many small things which refer to one another in no circle: counting lets go of them, and
    to go through them again and again would find nothing.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_SELDOM)


async def _run(
    serve: Callable[[JobPost], Awaitable[int | None]],
    alone: Callable[[QueuePost], Awaitable[None]] | None,
    options: RoleOptions,
    manifest: Manifest,
) -> int:
    keys, host = keys_of_job(), os.environ.get(HOST_ENV, LOOPBACK)
    if keys is None and not host.startswith("127."):
        log.warning("there is no key: whoever reaches %s may do all that a member may", host)
    here: dict[str, Any] = {"options": options, "keys": keys, "host": host}
    if isinstance(manifest, RLJob):
        post = JobPost(job=manifest, **here)
        return await _serve(post, serve(post))
    if isinstance(manifest, TransferQueue) and alone is not None:
        queue_post = QueuePost(resource=manifest, **here)
        return await _serve(queue_post, alone(queue_post))
    where, hint = str(options.job), "Give the manifest of an RLJob"
    raise ManifestError(f"kind = {manifest.kind!r}: it has no {options.role}", where=where, hint=hint)


async def _serve(post: Post, serving: Awaitable[int | None]) -> int:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _end, post, number)
    log.info("attempt %d, worker %s, pid %d", post.options.attempt, post.worker, os.getpid())
    status = await serving
    log.info("ended after %.1f s", clock.now() - post.started)
    return status or (128 + post.signal if post.signal else 0)


def _end(post: Post, number: int) -> None:
    log.info("told to end by %s", signal.Signals(number).name)
    post.signal = number
    post.draining.set()
    post.stopping.set()


def _is_final(error: AsyncFlowError) -> bool:
    cause = error.__cause__
    return isinstance(error, BEYOND_REPAIR) and not (isinstance(cause, OSError) and cause.errno in _PASSING)


def _leaves(group: BaseExceptionGroup[AsyncFlowError]) -> Iterator[AsyncFlowError]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
