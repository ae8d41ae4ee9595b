"""One storage unit of the queue."""

from __future__ import annotations

import asyncio

from asyncflow.net.membership import Membership
from asyncflow.queue.unit import StorageUnit, open_backend
from asyncflow.roles.base import run_role
from asyncflow.roles.post import Post, RoleOptions
from asyncflow.telemetry.metrics import StorageMetrics

PULSE_S = 1.0


def main(options: RoleOptions) -> int:
    """Run a storage unit."""
    return run_role(serve, options, alone=serve)


async def serve(post: Post) -> None:
    """Hold cells until told to stop. Raises Fenced when another incarnation has taken this place."""
    queue, metrics = post.queue, StorageMetrics()
    membership: Membership | None = None
    unit = StorageUnit(
        index=post.options.index,
        limit_bytes=queue.bytes_per_unit.bytes,
        controller=lambda: membership.address("controller") if membership is not None else None,
        incarnation=post.worker,
        host=post.host,
        keys=post.keys,
        backend=open_backend(queue.backend),
    )
    address = await unit.start()
    metrics.watch_rpc(unit.server.counters)
    metrics.limit.set(queue.bytes_per_unit.bytes)

    def ready() -> tuple[bool, str]:
        return unit.ready, "ready" if unit.ready else "the controller has not taken it in yet"

    membership = await post.join(metrics=metrics, address=address, ready=ready)
    stopping = asyncio.create_task(post.stopping.wait())
    while not stopping.done() and not unit.failed.done():
        metrics.held.set(unit.holdings.budget.used)
        metrics.put.set(unit.put_bytes)
        metrics.fetched.set(unit.fetched_bytes)
        await asyncio.wait((stopping, unit.failed), timeout=PULSE_S, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    await membership.close()
    await unit.close()
    if unit.failed.done() and not unit.failed.cancelled():
        unit.failed.result()
