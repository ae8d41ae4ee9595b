"""Everything dies all the time, and each sample still counts once: the counting trainer is the witness."""

import asyncio
import random
from collections import Counter

import pytest

from asyncflow.errors import StaleHandle
from asyncflow.net.rpc import persist
from asyncflow.queue.ledger.audit import audit_ledger

pytestmark = pytest.mark.process

P = "train"
LEASE_S = 1.0


class CountingTrainer:
    """Weights that count samples, with checkpoints; restarts itself from the newest when rows were lost."""

    def __init__(self, crew, *, steps, rng):
        self.crew, self.steps, self.rng = crew, steps, rng
        self.attempt, self.done = -1, 0
        self.weights = {0: Counter()}
        self.checkpoint = 0

    async def run(self):
        while True:
            self.attempt += 1
            self.done = self.checkpoint
            await self.call("begin", step=self.done, world=1)
            try:
                while self.done < self.steps:
                    await self.step(self.done + 1)
            except StaleHandle:
                continue
            return

    async def step(self, step):
        sums = Counter()
        slot = 0
        while True:
            got = await self.call("slot", step=step, slot=slot, rank=0, tokens=12)
            if got is None:
                continue
            if got.rows:
                columns = await self.crew.client.fetch(got.rows, ["advantage"], timeout=30)
                sums.update(tuple(map(int, columns["advantage"].row(i))) for i in range(len(got.rows)))
            await asyncio.sleep(0.03)
            if self.rng.random() < 0.05:
                raise StaleHandle("the trainer dies")
            slot += 1
            if got.last:
                break
        self.weights[step] = self.weights[step - 1] + sums
        self.done = step
        await self.call("step_done", step=step, rank=0)
        if step % 2 == 0:
            self.checkpoint = step
            if self.rng.random() < 0.2:
                raise StaleHandle("the trainer dies between checkpoint and commit")
            await self.call("commit", step=step)

    async def call(self, name, **words):
        method = getattr(self.crew.client, name)
        words |= {"partition": P, "attempt": self.attempt, "timeout": 5}
        return await persist(lambda: method(**words), what=name, timeout=60)


async def compute_advantages(crew):
    while True:
        if rows := await crew.claim("advantage", rows=8, timeout=60):
            await crew.complete(rows, "advantage")


async def recreate(crew, serials, per_step):
    known = -1
    for serial in range(serials):
        await crew.create(serial, per_step=per_step)
    while True:
        wanted = await crew.client.wanted(partition=P, known=known, timeout=60)
        known = wanted.revision
        for serial in sorted({meta.serial for meta in wanted.keys}):
            await crew.create(serial, per_step=per_step)


async def cause_trouble(crew, rng):
    number = 0
    while True:
        await asyncio.sleep(rng.uniform(0.1, 0.4))
        victim = rng.choice(["controller", "unit-0", "unit-1", "worker", "worker", "stop worker"])
        number += 1
        if victim == "controller":
            await crew.replace("controller", "controller")
        elif victim.startswith("unit"):
            await crew.replace(victim, "unit", victim[-1], 1 << 20)
        elif victim == "worker":
            name = rng.choice(sorted(name for name in crew.children if name.startswith("worker")))
            await crew.kill(name)
            await crew.start(f"worker-{number}", "work", "rollout", "response", f"w{number}", 3)
        else:
            name = rng.choice(sorted(name for name in crew.children if name.startswith("worker")))
            crew.stop(name)
            await asyncio.sleep(rng.uniform(0.1, 1.5 * LEASE_S))
            crew.go_on(name)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("seed", [1, 2])
async def test_whatever_dies_each_sample_counts_once(crew, seed):
    rng = random.Random(seed)
    steps, per_step = 6, 4
    await crew.start_queue(lease_s=LEASE_S, units=2)
    for step in range(1, steps + 1):
        await crew.client.open_step(partition=P, step=step, groups=per_step, group_size=2, timeout=30)
    for number in range(2):
        await crew.start(f"worker-a{number}", "work", "rollout", "response", f"wa{number}", 3)
    trainer = CountingTrainer(crew, steps=steps, rng=random.Random(seed + 100))
    helpers = [
        asyncio.create_task(job)
        for job in (compute_advantages(crew), recreate(crew, steps * per_step, per_step), cause_trouble(crew, rng))
    ]
    running = asyncio.create_task(trainer.run())
    await asyncio.wait([running, *helpers], return_when=asyncio.FIRST_COMPLETED)
    for task in helpers:
        task.cancel()
    await asyncio.wait(helpers)
    if "controller" not in crew.children:
        await crew.start("controller", "controller")
    assert [task.exception() for task in helpers if not task.cancelled()] == []
    await running
    assert trainer.weights[steps] == Counter((s, j) for s in range(steps * per_step) for j in range(2))
    await crew.client.close_partition(partition=P, step=steps, timeout=30)
    report = audit_ledger(crew.folder / "ledger")
    assert report.ok, report
    assert (report.trained, report.unfinished, report.closed) == (steps * per_step * 2, 0, True)
