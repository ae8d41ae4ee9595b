"""One holder of the bytes of a storage unit: a segment of Mooncake Store in this process, or a Redis server.

Invariants: it offers what the plan says, from when it is ready; what it holds goes with it; a segment follows the
master wherever it is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from asyncflow.errors import PeerLost
from asyncflow.net.membership import Membership
from asyncflow.plan.holding import held_bytes
from asyncflow.roles.base import run_role
from asyncflow.roles.master import watch
from asyncflow.roles.post import Post, RoleOptions
from asyncflow.stores.mooncake import Mooncake
from asyncflow.stores.programs import start_redis
from asyncflow.telemetry.metrics import RoleMetrics

log = logging.getLogger(__name__)

LOOK_S = 1.0


def main(options: RoleOptions) -> int:
    """Run a holder."""
    return run_role(serve, options, alone=serve)


async def serve(post: Post) -> None:
    """Hold bytes until told to stop."""
    await _HOLD[post.queue.backend](post)


async def hold_segment(post: Post) -> None:
    """Offer a segment to the master that is known, and again to every new one."""
    membership: Membership | None = None

    def master() -> str | None:
        address = membership.address("master") if membership is not None else None
        return address.removeprefix("tcp://") if address is not None else None

    segment = Mooncake(host=post.host, master=master, segment_bytes=held_bytes(post.queue))

    def ready() -> tuple[bool, str]:
        return (True, "ready") if segment.master is not None else (False, "its segment is not with the master yet")

    membership = await post.join(metrics=RoleMetrics(), ready=ready)
    while not post.stopping.is_set():
        try:
            await asyncio.to_thread(segment.connect)
        except PeerLost as lost:
            log.info("the segment is not with the master: %s", lost)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(post.stopping.wait(), LOOK_S)
    await membership.close()
    await asyncio.to_thread(segment.close)


async def hold_redis(post: Post) -> None:
    """Run a Redis server."""
    await watch(post, await start_redis(post.host, memory=held_bytes(post.queue), password=post.store_password))


_HOLD: dict[str, Callable[[Post], Awaitable[None]]] = {"mooncake": hold_segment, "redis": hold_redis}
