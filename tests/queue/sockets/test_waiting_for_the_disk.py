"""With ``sync: always``: what is done, and what is not said yet, while the disk is waited for."""

import asyncio

import pytest

from asyncflow.errors import Refused
from asyncflow.queue.partition import Partition
from asyncflow.queue.protocol.messages import TaskSpec
from asyncflow.roles.controller import _show
from asyncflow.rpc.columns import Jagged
from asyncflow.telemetry.metrics import ControllerMetrics

P = "open"


async def until(true):
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.01)


VALUES = {"x": Jagged.from_rows([[1] * 1000], "int64")}


def waiting(controller):
    """Return whether anybody waits for rows."""
    return P in controller.parking.waiters


async def clear_all(cluster):
    """Clear what there is while the disk hangs; return the call when the unit has asked for orders once more."""
    controller = cluster.controller
    asked, rows = controller.server.counters.calls["units.watch"], list(controller.table.state.rows)
    clearing = asyncio.create_task(Partition(cluster.connect("other"), P).clear(rows, timeout=20))
    await until(lambda: not controller.table.state.rows)
    await until(lambda: controller.server.counters.calls["units.watch"] > asked)
    return clearing


async def test_a_row_that_is_freed_before_its_result_is_on_disk_leaves_nothing_behind(cluster, disk):
    async with cluster(units=1, sync="always") as made:
        unit = made.units[0]
        disk.stop()
        putting = asyncio.create_task(made.client.put(P, VALUES, timeout=20))
        await until(lambda: made.controller.table.state.rows)
        clearing = await clear_all(made)
        assert unit.holdings.budget.used == 8000
        disk.go_on()
        (number,) = (await putting).rows
        assert await clearing == 1
        await until(lambda: not unit.holdings.budget.used)
        assert number not in unit.holdings.rows


async def test_nothing_is_freed_of_which_the_ledger_does_not_know_why(cluster, disk):
    async with cluster(units=1, sync="always") as made:
        (number,) = (await made.client.put(P, VALUES, timeout=20)).rows
        disk.stop()
        clearing = await clear_all(made)
        disk.go_on(error=OSError(28, "no space left on device"))
        await until(made.controller.failed.done)
        assert number in made.units[0].holdings.rows
        clearing.cancel()
        await asyncio.wait([clearing])
        assert isinstance(made.controller.failed.exception(), OSError)


async def test_no_completion_is_confirmed_that_is_not_safe(cluster, disk):
    async with cluster(units=1, sync="always") as made:
        controller = made.controller
        await made.client.declare([TaskSpec(partition=P, name="count", needs=["x"])], timeout=10)
        await made.client.put(P, VALUES, timeout=20)
        (row,) = (await made.client.claim(partition=P, task="count", max_rows=1, timeout=10)).rows
        disk.stop()
        completing = asyncio.create_task(made.client.complete([row], {}, timeout=20))
        await until(lambda: not controller.table.state.leases)
        await asyncio.sleep(0.2)
        assert not completing.done()
        disk.go_on()
        assert await completing == [True]


async def test_nothing_is_confirmed_that_the_disk_did_not_take(cluster, disk):
    count, other = (TaskSpec(partition=P, name=name, needs=["x"]) for name in ("count", "other"))
    async with cluster(units=1, sync="always") as made:
        await made.client.declare([count], timeout=10)
        claiming = asyncio.create_task(made.client.claim(partition=P, task="count", max_rows=1, timeout=20))
        await until(lambda: waiting(made.controller))
        disk.stop()
        putting = asyncio.create_task(made.client.put(P, VALUES, timeout=20))
        await until(lambda: made.controller.table.state.leases)
        declaring = asyncio.create_task(made.client.declare([other], timeout=10))
        await until(lambda: "other" in made.controller.table.state.partitions[P].queues)
        disk.go_on(error=OSError(28, "no space left on device"))
        for asked in (claiming, declaring):
            with pytest.raises(Refused, match="the ledger cannot be written"):
                await asked
        assert not putting.done()
        putting.cancel()
        await asyncio.wait([putting])


@pytest.mark.parametrize("controllers", [1, 2])
async def test_no_reset_is_confirmed_that_is_not_safe(cluster, disk, controllers):
    async with cluster(units=1, sync="always", controllers=controllers) as made:
        task = TaskSpec(partition=P, name="count", needs=["x"], clears=True)
        await made.client.declare([task], timeout=10)
        await made.client.put(P, VALUES, timeout=20)
        assert (await made.client.claim(partition=P, task="count", max_rows=1, timeout=10)).rows
        disk.stop()
        resetting = asyncio.create_task(Partition(made.client, P).reset(task="count", timeout=20))
        await until(lambda: made.controller.server.counters.calls["open.reset"])
        await asyncio.sleep(0.05)
        assert not resetting.done()
        disk.go_on()
        assert await resetting == 1


async def test_a_claim_whose_time_is_over_is_answered_when_all_before_it_is_safe(cluster, disk):
    async with cluster(units=1, sync="always") as made:
        controller = made.controller
        await made.client.declare([TaskSpec(partition=P, name="count", needs=["y"])], timeout=10)
        disk.stop()
        putting = asyncio.create_task(made.client.put(P, VALUES, timeout=20))
        await until(lambda: controller.table.state.rows)
        claiming = asyncio.create_task(made.client.claim(partition=P, task="count", max_rows=1, timeout=0.5))
        await until(lambda: waiting(controller))
        await until(lambda: not waiting(controller))
        await asyncio.sleep(0.2)
        assert not claiming.done()
        disk.go_on()
        assert not (await claiming).rows
        await putting


async def test_the_metrics_say_for_how_long_the_disk_is_waited_for(cluster, disk):
    metrics = ControllerMetrics()
    async with cluster(units=1, sync="always") as made:

        def lag():
            _show(made.controller, metrics)
            return metrics.registry.get_sample_value("asyncflow_controller_ledger_lag_seconds")

        await until(lambda: lag() == 0)
        disk.stop()
        putting = asyncio.create_task(made.client.put(P, VALUES, timeout=20))
        await until(lambda: lag() > 0.2)
        assert not putting.done()
        disk.go_on()
        await putting
        await until(lambda: lag() == 0)


@pytest.mark.parametrize("method", ["audit", "sync"])
async def test_whoever_no_longer_waits_for_the_disk_takes_it_from_nobody_else(cluster, disk, method):
    async with cluster(units=1, sync="always") as made:
        disk.stop()
        putting = asyncio.create_task(made.client.put(P, VALUES, timeout=20))
        await until(lambda: made.controller.table.state.rows)
        hasty, patient = (asyncio.create_task(getattr(made.connect(n), method)(timeout=20)) for n in "hp")
        await until(lambda: made.controller.server.counters.calls[f"queue.{method}"] == 2)
        hasty.cancel()
        await until(lambda: made.controller.server.counters.cancelled)
        await asyncio.sleep(0.05)
        assert not patient.done()
        disk.go_on()
        report = await patient
        assert method == "sync" or report.put == 1
        assert len((await putting).rows) == 1
        assert made.controller.server.counters.calls["units.hello"] == 1, "the put was answered in another session"
