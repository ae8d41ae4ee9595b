"""The stores of storage units' bytes: a segment of Mooncake Store or a Redis server (holder), and Mooncake's master.

The master is a program of Mooncake that maps values to holders. The queue does not rely on it to know which rows exist:
the queue's controller is authoritative.

Invariants: once ready, a holder offers the number of bytes in the plan; its values are lost when it ends. A segment
reconnects to a restarted master at its new address. When a program ends, its role ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from asyncflow.errors import PeerLost
from asyncflow.plan.queue import held_bytes
from asyncflow.queue.storage.mooncake import MooncakeConnection
from asyncflow.queue.storage.servers import Server, start_mooncake_master, start_redis
from asyncflow.roles.context import ProcessContext, RoleOptions, run_role
from asyncflow.rpc.membership import Membership
from asyncflow.telemetry.metrics import RoleMetrics

log = logging.getLogger(__name__)

POLL_S = 1.0


def main(options: RoleOptions) -> int:
    """Run a holder or a master."""
    serve = serve_master if options.role == "master" else serve_holder
    return run_role(serve, options, alone=serve)


async def serve_master(context: ProcessContext) -> None:
    """Run Mooncake's master until this process is to stop. Raises RoleFailed if the master ends before."""
    await watch(context, await start_mooncake_master(context.host))


async def serve_holder(context: ProcessContext) -> None:
    """Hold bytes until this process is to stop."""
    await _HOLD[context.queue.backend](context)


async def hold_segment(context: ProcessContext) -> None:
    """Offer a segment to the current master, and to every new one."""
    membership: Membership | None = None

    def master() -> str | None:
        return membership.address("master") if membership is not None else None

    segment = MooncakeConnection(host=context.host, master=master, segment_bytes=held_bytes(context.queue))

    def ready() -> tuple[bool, str]:
        if segment.master is not None:
            return True, "ready"
        return False, "its segment is not registered with the master yet"

    membership = await context.join(metrics=RoleMetrics(), ready=ready)
    context.spans.serve(waits="calls")
    while not context.stopping.is_set():
        try:
            await asyncio.to_thread(segment.client)
        except PeerLost as lost:
            log.info("the segment is not registered with the master: %s", lost)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(context.stopping.wait(), POLL_S)
    await membership.close()
    await asyncio.to_thread(segment.close)


async def hold_redis(context: ProcessContext) -> None:
    """Run a Redis server."""
    await watch(
        context, await start_redis(context.host, memory=held_bytes(context.queue), password=context.store_password)
    )


_HOLD: dict[str, Callable[[ProcessContext], Awaitable[None]]] = {"mooncake": hold_segment, "redis": hold_redis}


async def watch(context: ProcessContext, server: Server) -> None:
    """Register ``server``, and watch it until this process is to stop. Raises RoleFailed if the server ends before."""
    try:
        membership = await context.join(metrics=RoleMetrics(), address=f"tcp://{server.host}:{server.port}")
        context.spans.serve(waits="calls")
        try:
            await context.run_until_stopped(server.ended())
        finally:
            await membership.close()
    finally:
        await server.stop()
