"""One storage unit of the queue. It is ready when its back end is, and the controller has taken it in."""

from __future__ import annotations

import asyncio

from asyncflow.net.membership import Membership
from asyncflow.queue.backends.base import Site
from asyncflow.queue.unit.unit import StorageUnit, open_backend
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

    def find(role: str, index: int) -> str | None:
        if queue.store is not None:
            return f"tcp://{queue.store.address}"
        return membership.address(role, index) if membership is not None else None

    site = Site(
        owner=post.owner,
        unit=post.options.index,
        incarnation=post.worker,
        host=post.host,
        find=find,
        password=post.store_password,
        lasting=queue.store is not None,
    )
    backend = open_backend(queue.backend, site)
    unit = StorageUnit(
        index=post.options.index,
        limit_bytes=queue.bytes_per_unit.bytes,
        controller=lambda: membership.address("controller") if membership is not None else None,
        shard=lambda index: membership.address("controller", index) if membership is not None else None,
        incarnation=post.worker,
        host=post.host,
        keys=post.keys,
        backend=backend,
    )
    address = await unit.start()
    metrics.watch_rpc(unit.server.counters)
    metrics.limit.set(queue.bytes_per_unit.bytes)

    opening = asyncio.create_task(backend.open())

    def ready() -> tuple[bool, str]:
        if not opening.done():
            return False, f"the back end {queue.backend} does not answer yet"
        return unit.ready, "ready" if unit.ready else "the controller has not taken it in yet"

    membership = await post.join(metrics=metrics, address=address, ready=ready)
    stopping = asyncio.create_task(post.stopping.wait())
    while not stopping.done() and not unit.failed.done() and not _failed(opening):
        metrics.held.set(unit.holdings.budget.used)
        metrics.put.set(unit.put_bytes)
        metrics.fetched.set(unit.fetched_bytes)
        metrics.waiting.set(len(unit.holdings.budget))
        metrics.budget_waits.set(unit.holdings.budget.waits)
        metrics.budget_waited.set(unit.holdings.budget.waited_s)
        await asyncio.wait((stopping, unit.failed), timeout=PULSE_S, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    opening.cancel()
    await membership.close()
    await unit.close()
    if _failed(opening):
        opening.result()
    if unit.failed.done() and not unit.failed.cancelled():
        unit.failed.result()


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None
