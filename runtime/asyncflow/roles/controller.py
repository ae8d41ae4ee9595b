"""The queue's controllers, each with its ledger: the first is the home of all rows, further ones have tasks.

In a job the home declares the job's tasks, and all join the driver's directory. In a queue that stands alone the tasks
are declared by clients, and the directory is served by the home, at the one address that all dial; the controllers are
members of it like any other.

Invariant: what a member of such a queue held when it went is given to others at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from asyncflow.api.queue import QueueStatus
from asyncflow.driver.tasks import tasks_of
from asyncflow.errors import RoleFailed
from asyncflow.net.directory import Directory, Member
from asyncflow.net.membership import Membership
from asyncflow.net.rpc import RpcServer
from asyncflow.queue.controller.controller import Controller
from asyncflow.queue.ledger.audits import shard_ledger
from asyncflow.queue.protocol.messages import TaskSpec
from asyncflow.queue.table.outlook import waits
from asyncflow.roles.base import calm_collector, resting_collector, run_role
from asyncflow.roles.post import JobPost, Post, QueuePost, RoleOptions
from asyncflow.telemetry.metrics import ControllerMetrics

PULSE_S = 1.0


def main(options: RoleOptions) -> int:
    """Run a controller."""
    return run_role(serve, options, alone=serve_alone)


async def serve(post: JobPost) -> None:
    """Serve a job until told to stop. Raises RoleFailed when the ledger cannot be written any more."""
    await _serve_member(post, () if post.options.index else tasks_of(post.job.spec))


async def _serve_member(post: Post, tasks: Sequence[TaskSpec] = ()) -> None:
    """Serve as a member of a directory elsewhere."""
    others = _Others()
    controller, metrics = _controller(post, others), ControllerMetrics()
    with resting_collector():
        address = await controller.start()
    controller.table.declare(tasks)
    controller.settle()
    metrics.watch_rpc(controller.server.counters)
    membership = others.membership = await post.join(metrics=metrics, address=address, ready=controller.part.ready)
    await _until_told(post, controller, metrics)
    await _close(membership, controller)


async def serve_alone(post: QueuePost) -> None:
    """Serve whoever joins, until told to stop. Raises RoleFailed when the ledger cannot be written any more."""
    if post.options.index:
        await _serve_member(post)
        return
    others = _Others()
    front = RpcServer(name="directory", bind=post.options.driver, keys=post.keys, advertise=post.host)
    controller, directory, metrics = _controller(post, others), Directory(), ControllerMetrics()
    directory.attach(front)

    def gone(member: Member, _reason: str) -> None:
        controller.part.expire(member.incarnation)

    directory.on_leave.append(gone)
    with resting_collector():
        address = await controller.start()
    metrics.watch_rpc(controller.server.counters)
    membership = others.membership = await post.join(
        metrics=metrics, address=address, directory=await front.start(), routes=[_status_route(controller, directory)]
    )
    await _until_told(post, controller, metrics)
    await directory.close()
    await _close(membership, controller)
    await front.close()


@dataclass
class _Others:
    """Addresses of the other controllers. membership: None until this one is a member."""

    membership: Membership | None = None

    def address(self, index: int) -> str | None:
        """Return the address of a controller."""
        return self.membership.address("controller", index) if self.membership is not None else None


def _controller(post: Post, others: _Others) -> Controller:
    index = post.options.index
    return Controller(
        ledger_dir=shard_ledger(post.options.workdir / "ledger", index),
        sync=post.ledger.sync,
        host=post.host,
        advertise=post.host,
        keys=post.keys,
        index=index,
        controllers=post.queue.controllers,
        address=others.address,
        units=post.queue.storage_units,
    )


async def _until_told(post: Post, controller: Controller, metrics: ControllerMetrics) -> None:
    calm_collector()
    stopping = asyncio.create_task(post.stopping.wait())
    while not stopping.done() and not controller.failed.done():
        _show(controller, metrics)
        await asyncio.wait((stopping, controller.failed), timeout=PULSE_S, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()


async def _close(membership: Membership, controller: Controller) -> None:
    await membership.close()
    await controller.close()
    if controller.failed.done():
        raise RoleFailed(str(controller.failed.exception()), where="controller", hint="Free some space, then resume")


def _status_route(controller: Controller, directory: Directory) -> web.RouteDef:
    async def get_status(_request: web.Request) -> web.Response:
        status = _status(controller, units=len(directory.members("storage")))
        return web.json_response(text=status.model_dump_json(by_alias=True, exclude_unset=True))

    return web.get("/v1/status", get_status)


def _status(controller: Controller, *, units: int) -> QueueStatus:
    """Return the part of the queue's status that the controller knows. units: how many are registered."""
    stats, partitions = controller.stats(), controller.table.books.partitions.values()
    return QueueStatus(
        ready_units=min(stats.units, units),
        rows=stats.live,
        bytes=stats.bytes,
        limit=stats.limit,
        partitions=sum(partition.closed is None for partition in partitions),
    )


def _show(controller: Controller, metrics: ControllerMetrics) -> None:
    stats = controller.stats()
    for state, counts in (("ready", stats.ready), ("leased", stats.leased)):
        for task, count in counts.items():
            metrics.rows.labels(task, state).set(count)
    metrics.lease_expiries.set(stats.lease_expiries)
    metrics.redeliveries.set(stats.redeliveries)
    metrics.fenced_writes.set(stats.fenced)
    metrics.ledger_bytes.set(stats.ledger_bytes)
    metrics.ledger_lag.set(controller.ledger_lag)
    for task in stats.ready:
        metrics.parked.labels(task).set(stats.parked.get(task, 0))
    metrics.unit_rows.clear()
    for unit in controller.sessions.views(controller.now()).units:
        metrics.unit_rows.labels(str(unit.unit), unit.state).set(unit.rows)
    metrics.unready.clear()
    for partition, task, row in waits(controller.table, controller.now()):
        metrics.unready.labels(f"{partition}/{task}", row.lacks[0]).set(row.seconds)
    for index, seconds in controller.part.silences().items():
        metrics.silence.labels(str(index)).set(seconds)
    if controller.table.books.index:
        return
    for state, count in (("staged", stats.staged), ("committed", stats.committed), ("live", stats.live)):
        metrics.rows.labels("", state).set(count)
