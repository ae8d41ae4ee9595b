"""A counting trainer and the tasks that feed it: the witness that each sample counts once."""

import asyncio
from collections import Counter

from asyncflow.errors import StaleHandle
from asyncflow.rpc.retry import retry

P = "train"


class CountingTrainer:
    """Weights that count samples, with checkpoints; restarts itself from the newest when rows were lost."""

    def __init__(self, processes, *, steps, rng):
        self.processes, self.steps, self.rng = processes, steps, rng
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
                columns = await self.processes.client.fetch(got.rows, ["advantage"], timeout=30)
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
        method = getattr(self.processes.client, name)
        words |= {"partition": P, "attempt": self.attempt, "timeout": 5}
        return await retry(lambda: method(**words), what=name, timeout=60)


async def compute_advantages(processes):
    while True:
        if rows := await processes.claim("advantage", rows=8, timeout=60):
            await processes.complete(rows, "advantage")


async def recreate(processes, serials, per_step):
    known = -1
    for serial in range(serials):
        await processes.create(serial, per_step=per_step)
    while True:
        wanted = await processes.client.wanted(partition=P, known=known, timeout=60)
        known = wanted.revision
        for serial in sorted({meta.serial for meta in wanted.keys}):
            await processes.create(serial, per_step=per_step)
