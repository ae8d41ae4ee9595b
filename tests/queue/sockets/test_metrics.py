"""Tests of what units and controllers report: what is held and moves, who waits, and what there is to do."""

import asyncio

import numpy as np

from asyncflow.queue.protocol.messages import TaskSpec
from asyncflow.roles import controller
from asyncflow.roles.storage import _show
from asyncflow.rpc.columns import Jagged
from asyncflow.telemetry.metrics import ControllerMetrics, StorageMetrics

GROUP = 96
"""Bytes of two prompts of six numbers each."""


def shown(unit, *, leaving=False):
    """Return what a unit shows now, by name."""
    metrics = StorageMetrics()
    _show(unit, metrics, leaving=leaving)
    names = {"held_bytes", "rows", "put_bytes_total", "fetched_bytes_total", "waiting_puts", "budget_waits_total"}
    names |= {"budget_waited_seconds_total", "leaving_rows", "moved_rows_total"}
    return {name: metrics.registry.get_sample_value(f"asyncflow_storage_{name}") for name in names}


async def test_a_unit_shows_what_it_holds_and_moves_and_who_waits_for_room(cluster):
    async with cluster(limit=2 * GROUP, units=1) as queue:
        unit = queue.units[0]
        assert set(shown(unit).values()) == {0}
        assert await queue.create(0, 1, length=6) == [True] * 4
        seen = shown(unit)
        assert (seen["held_bytes"], seen["rows"], seen["put_bytes_total"]) == (2 * GROUP, 4, 2 * GROUP)
        rows = await queue.claim("rollout", rows=2)
        await queue.client.fetch(rows, ["prompt"], timeout=10)
        assert GROUP <= shown(unit)["fetched_bytes_total"] < 2 * GROUP
        waiting = asyncio.create_task(queue.create(2, length=6))
        async with asyncio.timeout(10):
            while not shown(unit)["waiting_puts"]:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        await queue.client.drop(rows, reason="test", timeout=10)
        assert await waiting == [True] * 2
        seen = shown(unit)
        assert (seen["held_bytes"], seen["rows"], seen["put_bytes_total"]) == (2 * GROUP, 4, 3 * GROUP)
        assert (seen["waiting_puts"], seen["budget_waits_total"]) == (0, 1)
        assert 0.05 <= seen["budget_waited_seconds_total"] < 10


async def test_a_unit_that_leaves_shows_what_is_to_be_moved_and_what_was(cluster):
    async with cluster(units=2) as queue:
        unit = queue.units[0]
        assert await queue.create(0, 2, 4) == [True] * 6
        held = shown(unit)["rows"]
        assert held > 0
        assert (shown(unit)["leaving_rows"], shown(unit, leaving=True)["leaving_rows"]) == (0, held)
        async with asyncio.timeout(10):
            assert await unit.leave()
        seen = shown(unit, leaving=True)
        assert (seen["rows"], seen["leaving_rows"], seen["moved_rows_total"]) == (0, 0, held)


async def test_a_partition_that_is_closed_or_cleared_and_has_nothing_to_do_has_no_series(cluster):
    def tasks():
        controller._show(queue.controller, metrics)
        samples = next(each for each in metrics.registry.collect() if each.name == "asyncflow_controller_rows").samples
        return {each.labels["task"]: each.value for each in samples if each.labels["state"] == "ready"}

    metrics = ControllerMetrics()
    async with cluster(units=1) as queue:
        assert await queue.create(0) == [True] * 2
        assert tasks()["train/rollout"] == 2
        await queue.client.close_partition(partition="train", step=1, timeout=10)
        assert tasks()["train/rollout"] == 2, "it is closed, and not done"
        await queue.client.drop(await queue.claim("rollout", rows=2), reason="test", timeout=10)
        assert "train/rollout" not in tasks()
        task, text = "step 1/grade", {"text": Jagged.from_rows([[1]], np.int32)}
        await queue.client.declare([TaskSpec(partition="step 1", name="grade", needs=["text"])], timeout=10)
        assert tasks()[task] == 0
        for _ in range(2):
            await queue.client.put("step 1", text, timeout=10)
            assert tasks()[task] == 1
            await queue.client.clear_partition(partition="step 1", timeout=10)
            assert task not in tasks(), "a user may clear a partition for each step, and never close one"
