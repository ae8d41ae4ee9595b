"""Everything dies all the time, and each sample still counts once: the counting trainer is the witness."""

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
LEASE_S = 1.0


async def cause_trouble(processes, rng):
    number = 0
    while True:
        await asyncio.sleep(rng.uniform(0.1, 0.4))
        victim = rng.choice(["controller", "unit-0", "unit-1", "worker", "worker", "stop worker"])
        number += 1
        if victim == "controller":
            await processes.replace("controller", "controller")
        elif victim.startswith("unit"):
            await processes.replace(victim, "unit", victim[-1], 1 << 20)
        elif victim == "worker":
            name = rng.choice(sorted(name for name in processes.children if name.startswith("worker")))
            await processes.kill(name)
            await processes.start(f"worker-{number}", "work", "rollout", "response", f"w{number}", 3)
        else:
            name = rng.choice(sorted(name for name in processes.children if name.startswith("worker")))
            processes.stop(name)
            await asyncio.sleep(rng.uniform(0.1, 1.5 * LEASE_S))
            processes.go_on(name)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("seed", [1, 2])
async def test_whatever_dies_each_sample_counts_once(processes, seed):
    rng = random.Random(seed)
    steps, per_step = 6, 4
    await processes.start_queue(lease_s=LEASE_S, units=2)
    for step in range(1, steps + 1):
        await processes.client.open_step(partition=P, step=step, groups=per_step, group_size=2, timeout=30)
    for number in range(2):
        await processes.start(f"worker-a{number}", "work", "rollout", "response", f"wa{number}", 3)
    trainer = CountingTrainer(processes, steps=steps, rng=random.Random(seed + 100))
    helpers = [
        asyncio.create_task(job)
        for job in (
            compute_advantages(processes),
            recreate(processes, steps * per_step, per_step),
            cause_trouble(processes, rng),
        )
    ]
    running = asyncio.create_task(trainer.run())
    await asyncio.wait([running, *helpers], return_when=asyncio.FIRST_COMPLETED)
    for task in helpers:
        task.cancel()
    await asyncio.wait(helpers)
    if "controller" not in processes.children:
        await processes.start("controller", "controller")
    assert [task.exception() for task in helpers if not task.cancelled()] == []
    await running
    assert trainer.weights[steps] == Counter((s, j) for s in range(steps * per_step) for j in range(2))
    await processes.client.close_partition(partition=P, step=steps, timeout=30)
    report = audit_ledger(processes.folder / "ledger")
    assert report.ok, report
    assert (report.trained, report.unfinished, report.closed) == (steps * per_step * 2, 0, True)
