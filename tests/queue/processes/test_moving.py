"""Units leave and come under load, in real processes, and are killed over it: each sample still counts once."""

import asyncio
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from asyncflow.queue.ledger.audit import audit_ledger

sys.path.insert(0, str(Path(__file__).parent))
from counting_trainer import CountingTrainer, compute_advantages, recreate

pytestmark = pytest.mark.process

P = "train"
STEPS, PER_STEP = 6, 4
LIMIT = 1 << 20


async def train(processes, trouble, *, seed):
    """Make a trainer count samples while ``trouble`` goes on; check what it counted, and give the audit."""
    for step in range(1, STEPS + 1):
        await processes.client.open_step(partition=P, step=step, groups=PER_STEP, group_size=2, timeout=30)
    for number in range(2):
        await processes.start(f"worker-{number}", "work", "rollout", "response", f"w{number}", 3)
    trainer = CountingTrainer(processes, steps=STEPS, rng=random.Random(seed))
    jobs = (compute_advantages(processes), recreate(processes, STEPS * PER_STEP, PER_STEP), trouble)
    helpers = [asyncio.create_task(job) for job in jobs]
    await asyncio.gather(trainer.run(), helpers[2])
    for task in helpers:
        task.cancel()
    await asyncio.wait(helpers)
    assert [task.exception() for task in helpers if not task.cancelled()] == [None]
    assert trainer.weights[STEPS] == Counter((s, j) for s in range(STEPS * PER_STEP) for j in range(2))
    await processes.client.close_partition(partition=P, step=STEPS, timeout=30)
    report = audit_ledger(processes.folder / "ledger")
    assert report.ok, report
    assert (report.trained, report.unfinished, report.closed) == (STEPS * PER_STEP * 2, 0, True)
    return report


async def drained(processes, unit):
    await processes.client.drain_unit(unit, timeout=30)
    await processes.left(f"unit-{unit}")


async def serving(processes, units):
    """Wait until these units are there, and no others, and serve."""
    async with asyncio.timeout(30):
        while {unit.unit: unit.state for unit in await processes.client.list_units(timeout=30)} != dict.fromkeys(
            units, "serving"
        ):
            await asyncio.sleep(0.05)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("backend", ["memory", "redis", pytest.param("mooncake", marks=pytest.mark.slow)])
async def test_units_leave_and_come_under_load_and_no_row_is_lost(processes, stores, backend):
    async def come_and_go():
        await drained(processes, 1)
        await processes.start_unit(3)
        await drained(processes, 0)
        await processes.start_unit(1)
        await drained(processes, 2)

    role = {"memory": "", "redis": "holder", "mooncake": "master"}[backend]
    processes.store = [backend, stores(backend).address(role, 0) or ""]
    await processes.start_queue(lease_s=30, units=3)
    report = await train(processes, come_and_go(), seed=1)
    assert report.redeliveries == 0
    await serving(processes, [1, 3])


@pytest.mark.timeout(100)
@pytest.mark.parametrize("seed", [1])
async def test_whoever_dies_while_rows_move_each_sample_counts_once(processes, seed):
    rng = random.Random(seed)

    async def move_and_kill():
        for _ in range(3):
            unit = rng.choice([0, 1, 2])
            await serving(processes, range(3))
            await processes.client.drain_unit(unit, timeout=30)
            await asyncio.sleep(rng.uniform(0.0, 0.02))
            victim = rng.choice([f"unit-{unit}", f"unit-{(unit + 1) % 3}", "controller"])
            words = ["unit", victim[-1], LIMIT] if victim != "controller" else ["controller"]
            await processes.kill(victim)
            await processes.start(victim, *words)
            if victim != f"unit-{unit}":
                await processes.left(f"unit-{unit}")
                await processes.start_unit(unit)

    await processes.start_queue(lease_s=2, units=3)
    await train(processes, move_and_kill(), seed=seed + 100)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("victim", ["source", "target", "controller"])
async def test_a_move_that_is_cut_leaves_each_row_in_one_place_and_no_bytes_elsewhere(processes, victim):
    await processes.start_queue(lease_s=60, units=2)
    await serving(processes, range(2))
    await processes.create(*range(6))
    rows = await processes.claim("rollout")
    processes.stop("unit-1")
    await processes.client.drain_unit(0, timeout=30)
    await asyncio.sleep(0.3)
    name = {"source": "unit-0", "target": "unit-1", "controller": "controller"}[victim]
    await processes.kill(name)
    await processes.start(name, *(["controller"] if victim == "controller" else ["unit", name[-1], LIMIT]))
    if victim != "target":
        processes.go_on("unit-1")
    if victim == "source":
        await serving(processes, range(2))
    else:
        await processes.left("unit-0")
    lost = {row.meta.key for row in rows if row.unit == {"source": 0, "target": 1}.get(victim)}
    assert await processes.complete(rows, "response") == [row.meta.key not in lost for row in rows]
    wanted = await processes.client.wanted(partition=P, known=-1, timeout=30)
    assert {meta.key for meta in wanted.keys} == lost
    if lost:
        assert await processes.create(*{serial for serial, _ in lost}) == [True] * len(lost)
        assert await processes.complete(await processes.claim("rollout"), "response") == [True] * len(lost)
    done = await processes.claim("advantage")
    assert len(done) == 12
    assert all(await processes.client.drop(done, reason="test", timeout=30))
    async with asyncio.timeout(30):
        while any(unit.bytes or unit.rows for unit in await processes.client.list_units(timeout=30)):
            await asyncio.sleep(0.05)
    assert audit_ledger(processes.folder / "ledger").ok
