"""The queue's controllers, each with its own ledger: the first owns all rows, the others own tasks.

In a job the first controller declares the job's tasks, and all controllers join the driver's directory. In a standalone
queue clients declare the tasks, and the first controller serves the directory, at the address to which all processes
connect; the controllers are ordinary members of it.

Invariant: when a member leaves a standalone queue, its leases expire immediately, so other consumers get the rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop
from aiohttp import web

from asyncflow.api.queue import QueueStatus
from asyncflow.driver.tasks import tasks_of
from asyncflow.errors import RoleFailed
from asyncflow.queue.controller.controller import Controller
from asyncflow.queue.ledger.audit import replica_ledger
from asyncflow.queue.protocol.messages import TaskSpec
from asyncflow.queue.table.partition import PartitionState
from asyncflow.queue.table.report import waits
from asyncflow.roles.context import (
    JobContext,
    ProcessContext,
    QueueContext,
    RoleOptions,
    freeze_gc,
    paused_gc,
    run_role,
)
from asyncflow.rpc.directory import Directory
from asyncflow.rpc.membership import Member, Membership
from asyncflow.rpc.server import RpcServer
from asyncflow.telemetry.metrics import ControllerMetrics

PULSE_S = 1.0


def main(options: RoleOptions) -> int:
    """Run a controller."""
    return run_role(serve, options, alone=serve_alone, new_loop=uvloop.new_event_loop)


async def serve(context: JobContext) -> None:
    """Serve a job until this process is to stop. Raises RoleFailed if the ledger can no longer be written."""
    await _serve_member(context, () if context.options.index else tasks_of(context.job.spec))


async def _serve_member(context: ProcessContext, tasks: Sequence[TaskSpec] = ()) -> None:
    """Serve as a member of a directory in another process."""
    peers = _Peers()
    controller, metrics = _controller(context, peers), ControllerMetrics()
    with paused_gc():
        address = await controller.start()
    controller.table.declare(tasks)
    controller.settle()
    metrics.watch_rpc(controller.server.counters)
    membership = peers.membership = await context.join(
        metrics=metrics, address=address, ready=controller.handlers.ready
    )
    await _wait_for_end(context, controller, metrics)
    await _close(membership, controller)


async def serve_alone(context: QueueContext) -> None:
    """Serve all members of a standalone queue until this process is to stop.

    Raises RoleFailed if the ledger can no longer be written.
    """
    if context.options.index:
        await _serve_member(context)
        return
    peers = _Peers()
    front = RpcServer(
        name="directory",
        bind=context.options.driver,
        credentials=context.credentials,
        access=context.access,
        advertise=context.host,
    )
    controller, directory, metrics = _controller(context, peers), Directory(), ControllerMetrics()
    directory.attach(front)

    def expire_leases(member: Member, _reason: str) -> None:
        controller.handlers.expire(member.incarnation)

    directory.on_leave.append(expire_leases)
    with paused_gc():
        address = await controller.start()
    metrics.watch_rpc(controller.server.counters)
    membership = peers.membership = await context.join(
        metrics=metrics,
        address=address,
        directory=await front.start(),
        routes=[_status_route(context, controller, directory)],
    )
    await _wait_for_end(context, controller, metrics)
    await directory.close()
    await _close(membership, controller)
    await front.close()


@dataclass
class _Peers:
    """Addresses of the other controllers. membership: None until this controller has joined the directory."""

    membership: Membership | None = None

    def address(self, index: int) -> str | None:
        """Return the address of a controller, None if unknown."""
        return self.membership.address("controller", index) if self.membership is not None else None


def _controller(context: ProcessContext, peers: _Peers) -> Controller:
    index = context.options.index
    return Controller(
        ledger_dir=replica_ledger(context.options.workdir / "ledger", index),
        sync=context.ledger.sync,
        host=context.host,
        advertise=context.host,
        credentials=context.credentials,
        access=context.access,
        index=index,
        controllers=context.queue.controllers,
        address=peers.address,
        units=context.queue.storage_units,
    )


async def _wait_for_end(context: ProcessContext, controller: Controller, metrics: ControllerMetrics) -> None:
    freeze_gc()
    context.spans.serve(waits="calls")
    stopping = asyncio.create_task(context.stopping.wait())
    while not stopping.done() and not controller.failed.done():
        _show(controller, metrics)
        await asyncio.wait((stopping, controller.failed), timeout=PULSE_S, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()


async def _close(membership: Membership, controller: Controller) -> None:
    await membership.close()
    await controller.close()
    if controller.failed.done():
        raise RoleFailed(str(controller.failed.exception()), where="controller", hint="Free some space, then resume")


def _status_route(context: ProcessContext, controller: Controller, directory: Directory) -> web.RouteDef:
    async def get_status(_request: web.Request) -> web.Response:
        status = _status(controller, units=len(directory.members("storage")), insecure=context.insecure)
        return web.json_response(text=status.model_dump_json(by_alias=True, exclude_unset=True))

    return web.get("/v1/status", get_status)


def _status(controller: Controller, *, units: int, insecure: bool) -> QueueStatus:
    """Return the controller's part of the queue's status. units: number of registered storage units."""
    stats, partitions = controller.stats(), controller.table.state.partitions.values()
    return QueueStatus(
        ready_units=min(stats.units, units),
        rows=stats.live,
        bytes=stats.bytes,
        limit=stats.limit,
        partitions=sum(partition.closed is None for partition in partitions),
        insecure=insecure,
    )


def _has_ended(partition: PartitionState) -> bool:
    """Return whether a partition is complete, or was cleared and has had no row since."""
    cleared = partition.forgotten == partition.cleared > 0 == partition.counts.total()
    return partition.complete or cleared


def _show(controller: Controller, metrics: ControllerMetrics) -> None:
    """Set the gauges, except for tasks of partitions that have ended, since a queue may get new ones without limit."""
    stats = controller.stats()
    metrics.rows.clear()
    metrics.parked.clear()
    for task, ready in stats.ready.items():
        leased, parked = stats.leased.get(task), stats.parked.get(task, 0)
        if _has_ended(controller.table.state.partitions[task.rpartition("/")[0]]) and not (ready or leased or parked):
            continue
        metrics.rows.labels(task, "ready").set(ready)
        metrics.parked.labels(task).set(parked)
        if leased is not None:
            metrics.rows.labels(task, "leased").set(leased)
    metrics.lease_expiries.set(stats.lease_expiries)
    metrics.lease_timeouts.set(controller.table.claims.timeouts)
    metrics.redeliveries.set(stats.redeliveries)
    metrics.fenced_writes.set(stats.fenced)
    metrics.ledger_bytes.set(stats.ledger_bytes)
    metrics.ledger_lag.set(controller.ledger.lag())
    metrics.ledger_syncs.set(controller.ledger.syncs)
    metrics.ledger_sync_seconds.set(controller.ledger.sync_s)
    metrics.unit_rows.clear()
    for unit in controller.sessions.views(controller.now()):
        metrics.unit_rows.labels(str(unit.unit), unit.state).set(unit.rows)
    metrics.unready.clear()
    for partition, task, row in waits(controller.table, controller.now()):
        metrics.unready.labels(f"{partition}/{task}", row.lacks[0]).set(row.seconds)
    for index, seconds in controller.handlers.silences().items():
        metrics.silence.labels(str(index)).set(seconds)
    if controller.table.state.index:
        return
    for state, count in (("staged", stats.staged), ("committed", stats.committed), ("live", stats.live)):
        metrics.rows.labels("", state).set(count)
