"""The queue's controller: one process with a controller per task, and the ledger."""

from __future__ import annotations

import asyncio

from asyncflow.driver.tasks import tasks_of
from asyncflow.errors import RoleFailed
from asyncflow.queue.controller import Controller
from asyncflow.roles.base import Post, RoleOptions, run_role
from asyncflow.telemetry.metrics import ControllerMetrics

PULSE_S = 1.0


def main(options: RoleOptions) -> int:
    """Run a controller."""
    return run_role(serve, options)


async def serve(post: Post) -> None:
    """Serve until told to stop. Raises RoleFailed when the ledger cannot be written any more."""
    metrics = ControllerMetrics()
    controller = Controller(
        ledger_dir=post.options.workdir / "ledger",
        sync=post.job.spec.storage.ledger.sync,
        host=post.host,
        keys=post.keys,
    )
    address = await controller.start()
    controller.table.declare(tasks_of(post.job.spec))
    controller.settle()
    metrics.watch_rpc(controller.server.counters)
    membership = await post.join(metrics=metrics, address=address)
    stopping = asyncio.create_task(post.stopping.wait())
    while not stopping.done() and not controller.failed.done():
        _show(controller, metrics)
        await asyncio.wait((stopping, controller.failed), timeout=PULSE_S, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    await membership.close()
    await controller.close()
    if controller.failed.done():
        raise RoleFailed(str(controller.failed.exception()), where="controller", hint="Free some space, then resume")


def _show(controller: Controller, metrics: ControllerMetrics) -> None:
    stats = controller.stats()
    for state, counts in (("ready", stats.ready), ("leased", stats.leased)):
        for task, count in counts.items():
            metrics.rows.labels(task, state).set(count)
    metrics.lease_expiries.set(stats.lease_expiries)
    metrics.redeliveries.set(stats.redeliveries)
    metrics.fenced_writes.set(stats.fenced)
    metrics.ledger_bytes.set(stats.ledger_bytes)
    for task, count in stats.parked.items():
        metrics.parked.labels(task).set(count)
    for state, count in (("staged", stats.staged), ("committed", stats.committed), ("live", stats.live)):
        metrics.rows.labels("", state).set(count)
