"""One storage unit of the queue. It is ready when its back end is, and the controller has taken it in.

A unit that is told to drain, or by the controller to leave, ends when its rows lie on other units. One that is told to
end by SIGTERM does the same where whoever makes the process gives it time for that (``LEAVE_ENV``).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os

import msgspec

from asyncflow.api.names import LEAVE_ENV
from asyncflow.errors import DeadlineExceeded
from asyncflow.net.membership import Membership
from asyncflow.net.roster import Member
from asyncflow.queue.backends.base import Site
from asyncflow.queue.client.placement import LEAVING
from asyncflow.queue.unit.unit import StorageUnit, open_backend
from asyncflow.roles.base import calm_collector, run_role
from asyncflow.roles.post import Post, RoleOptions
from asyncflow.telemetry.metrics import StorageMetrics

PULSE_S = 1.0
LINGER_S = 1.5
"""Seconds for which a unit that has left tells who comes too late that the rows lie elsewhere."""

_ANNOUNCE_S = 5.0
_LAST_S = 0.1


def main(options: RoleOptions) -> int:
    """Run a storage unit."""
    return run_role(serve, options, alone=serve)


async def serve(post: Post) -> None:
    """Hold cells until told to stop. Raises Fenced when another incarnation has taken this place."""
    queue, metrics = post.queue, StorageMetrics()
    leave_s = float(os.environ.get(LEAVE_ENV, "0"))
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
        peer=lambda index: membership.address("storage", index) if membership is not None else None,
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
    calm_collector()
    leaving: Leaving | None = None
    now, ends = asyncio.get_running_loop().time, math.inf
    waits = [asyncio.create_task(event.wait()) for event in (post.stopping, post.draining, unit.leaving)]
    while not (unit.failed.done() or _failed(opening) or now() >= ends):
        _show(unit, metrics, leaving=leaving is not None)
        wanted = unit.leaving.is_set() or (post.draining.is_set() and not (post.stopping.is_set() and not leave_s))
        if wanted and leaving is None:
            leaving = Leaving(unit, membership, patient=not post.stopping.is_set())
        if post.stopping.is_set():
            ends = min(ends, now() + (leave_s if leaving is not None else 0.0))
        if leaving is not None and leaving.over:
            break
        await asyncio.wait(
            [
                *(task for task in waits if not task.done()),
                unit.failed,
                *(leaving.tasks if leaving is not None else ()),
            ],
            timeout=min(PULSE_S, max(0.0, ends - now())),
            return_when=asyncio.FIRST_COMPLETED,
        )
    for task in (*waits, opening):
        task.cancel()
    left = leaving is not None and await leaving.end()
    await membership.close()
    if left:
        await asyncio.sleep(LINGER_S)
    await unit.close()
    if _failed(opening):
        opening.result()
    if unit.failed.done() and not unit.failed.cancelled():
        unit.failed.result()


class Leaving:
    """A unit that takes nothing new, says so in the directory, and takes all its rows to others."""

    def __init__(self, unit: StorageUnit, membership: Membership, *, patient: bool) -> None:
        member = membership.member
        leaves = msgspec.structs.replace(member, info={**member.info, LEAVING: True})
        self._departure = asyncio.create_task(unit.leave(patient=patient))
        self._telling = asyncio.create_task(_announce(membership, leaves))

    @property
    def over(self) -> bool:
        """It has left, or cannot."""
        return self._departure.done()

    @property
    def tasks(self) -> list[asyncio.Task[bool]]:
        """Tasks that end when the unit has left or cannot leave."""
        return [self._departure]

    async def end(self) -> bool:
        """Go no further; tell whether nothing is left in the unit."""
        await asyncio.wait([self._departure], timeout=_LAST_S)
        for task in (self._departure, self._telling):
            task.cancel()
        await asyncio.wait([self._departure, self._telling])
        return not self._departure.cancelled() and self._departure.result()


async def _announce(membership: Membership, member: Member) -> None:
    with contextlib.suppress(DeadlineExceeded):
        await membership.announce(member, timeout=_ANNOUNCE_S)


def _show(unit: StorageUnit, metrics: StorageMetrics, *, leaving: bool) -> None:
    metrics.held.set(unit.holdings.budget.used)
    metrics.rows.set(len(unit.holdings))
    metrics.to_move.set(len(unit.holdings) if leaving else 0)
    metrics.moved.set(unit.departure.moved_rows)
    metrics.put.set(unit.put_bytes)
    metrics.fetched.set(unit.fetched_bytes)
    metrics.waiting.set(len(unit.holdings.budget))
    metrics.budget_waits.set(unit.holdings.budget.waits)
    metrics.budget_waited.set(unit.holdings.budget.waited_s)


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None
