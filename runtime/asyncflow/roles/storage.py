"""One storage unit of the queue. It is ready when its backend is ready and the controller has registered it.

A unit that the driver drains, or that the controller tells to leave, ends when its rows have moved to other units. On
SIGTERM it does the same if the substrate grants time for it (``LEAVE_ENV``).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os

import uvloop

from asyncflow.api.names import LEAVE_ENV
from asyncflow.errors import DeadlineExceeded
from asyncflow.queue.putting import LEAVING
from asyncflow.queue.storage.backend import Site
from asyncflow.queue.storage.unit import StorageUnit, open_backend
from asyncflow.roles.context import ProcessContext, RoleOptions, freeze_gc, run_role
from asyncflow.rpc.membership import Membership
from asyncflow.telemetry.metrics import StorageMetrics

PULSE_S = 1.0
LINGER_S = 1.5
"""Seconds for which a unit that has left still answers late callers that its rows have moved."""

_ANNOUNCE_S = 5.0
_LAST_S = 0.1


def main(options: RoleOptions) -> int:
    """Run a storage unit."""
    return run_role(serve, options, alone=serve, new_loop=uvloop.new_event_loop)


async def serve(context: ProcessContext) -> None:
    """Hold cells until this process is to stop. Raises Fenced if another incarnation has replaced this one."""
    queue, metrics = context.queue, StorageMetrics()
    membership: Membership | None = None

    def find(role: str, index: int) -> str | None:
        if queue.store is not None:
            return f"tcp://{queue.store.address}"
        return address_of(role, index)

    def address_of(role: str, index: int = 0) -> str | None:
        return membership.address(role, index) if membership is not None else None

    site = Site(
        owner=context.owner,
        unit=context.options.index,
        incarnation=context.worker,
        host=context.host,
        find=find,
        password=context.store_password,
        lasting=queue.store is not None,
    )
    backend = open_backend(queue.backend, site)
    unit = StorageUnit(
        index=context.options.index,
        limit_bytes=queue.bytes_per_unit.bytes,
        controller=lambda: address_of("controller"),
        find=address_of,
        incarnation=context.worker,
        host=context.host,
        credentials=context.credentials,
        access=context.access,
        backend=backend,
    )
    address = await unit.start()
    metrics.watch_rpc(unit.server.counters)
    metrics.limit.set(queue.bytes_per_unit.bytes)

    opening = asyncio.create_task(backend.open())

    def ready() -> tuple[bool, str]:
        if not opening.done():
            return False, f"the backend {queue.backend} does not answer yet"
        return unit.ready, "ready" if unit.ready else "the controller has not registered it yet"

    membership = await context.join(metrics=metrics, address=address, ready=ready)
    freeze_gc()
    context.spans.serve(waits="calls")
    drain = await _hold(context, unit, metrics, membership=membership, opening=opening)
    opening.cancel()
    left = drain is not None and await drain.end()
    await membership.close()
    if left:
        await asyncio.sleep(LINGER_S)
    await unit.close()
    if _failed(opening):
        opening.result()
    if unit.failed.done() and not unit.failed.cancelled():
        unit.failed.result()


async def _hold(
    context: ProcessContext,
    unit: StorageUnit,
    metrics: StorageMetrics,
    *,
    membership: Membership,
    opening: asyncio.Task[None],
) -> DrainTask | None:
    """Hold cells until this process is to end; return the drain, if one has started.

    opening: the task that opens the backend; if it fails, this function returns, too.
    """
    leave_s = float(os.environ.get(LEAVE_ENV, "0"))
    drain: DrainTask | None = None
    now, ends = asyncio.get_running_loop().time, math.inf
    waits = [asyncio.create_task(event.wait()) for event in (context.stopping, context.draining, unit.leaving)]
    while not (unit.failed.done() or _failed(opening) or now() >= ends):
        _show(unit, metrics, leaving=drain is not None)
        wanted = unit.leaving.is_set() or (
            context.draining.is_set() and not (context.stopping.is_set() and not leave_s)
        )
        if wanted and drain is None:
            drain = DrainTask(unit, membership, patient=not context.stopping.is_set())
        if context.stopping.is_set():
            ends = min(ends, now() + (leave_s if drain is not None else 0.0))
        if drain is not None and drain.task.done():
            break
        await asyncio.wait(
            [
                *(task for task in waits if not task.done()),
                unit.failed,
                *((drain.task,) if drain is not None else ()),
            ],
            timeout=min(PULSE_S, max(0.0, ends - now())),
            return_when=asyncio.FIRST_COMPLETED,
        )
    for task in waits:
        task.cancel()
    return drain


class DrainTask:
    """The drain of a unit, which accepts no new rows, announces that in the directory, and moves its rows to others.

    patient: see ``StorageUnit.leave``; task: done when the unit has left or cannot leave.
    """

    def __init__(self, unit: StorageUnit, membership: Membership, *, patient: bool) -> None:
        self.task = asyncio.create_task(unit.leave(patient=patient))
        self._announcing = asyncio.create_task(_announce(membership))

    async def end(self) -> bool:
        """End the drain, and return whether the unit has left without any rows."""
        await asyncio.wait([self.task], timeout=_LAST_S)
        for task in (self.task, self._announcing):
            task.cancel()
        await asyncio.wait([self.task, self._announcing])
        return not self.task.cancelled() and self.task.result()


async def _announce(membership: Membership) -> None:
    with contextlib.suppress(DeadlineExceeded):
        await membership.announce(info={**membership.member.info, LEAVING: True}, timeout=_ANNOUNCE_S)


def _show(unit: StorageUnit, metrics: StorageMetrics, *, leaving: bool) -> None:
    metrics.held.set(unit.holdings.budget.used)
    metrics.rows.set(len(unit.holdings))
    metrics.to_move.set(len(unit.holdings) if leaving else 0)
    metrics.moved.set(unit.moved_rows)
    metrics.put.set(unit.put_bytes)
    metrics.fetched.set(unit.fetched_bytes)
    metrics.waiting.set(len(unit.holdings.budget))
    metrics.budget_waits.set(unit.holdings.budget.waits)
    metrics.budget_waited.set(unit.holdings.budget.waited_s)


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None
