"""A whole queue on sockets in this process, in short words."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest

from asyncflow.net.frames import Jagged
from asyncflow.queue.client.client import QueueClient
from asyncflow.queue.controller.controller import Controller
from asyncflow.queue.protocol.messages import RowMeta
from asyncflow.queue.unit.unit import StorageUnit

P = "train"


class Cluster:
    """A controller and units in this process, on real sockets, with clients."""

    def __init__(self, folder, *, tasks, limit, keys, units, **controller):
        self.folder, self.tasks, self.limit, self.keys = folder, tasks, limit, keys
        self.options = controller
        self.controller = None
        self.units = dict.fromkeys(range(units))
        self.clients = []

    async def start(self):
        await self.start_controller()
        for index in self.units:
            await self.start_unit(index)
        self.client = self.connect("test")
        await self.client.declare(self.tasks, timeout=10)

    async def start_controller(self):
        self.controller = Controller(ledger_dir=self.folder, keys=self.keys, **self.options)
        await self.controller.start()

    async def stop_controller(self):
        await self.controller.close()
        self.controller = None

    async def start_unit(self, index):
        self.units[index] = StorageUnit(
            index=index,
            limit_bytes=self.limit,
            controller=lambda: self.address(self.controller),
            keys=self.keys,
            peer=lambda other: self.address(self.units.get(other)),
        )
        await self.units[index].start()
        await self.units[index].joined(10)

    async def drain(self, index, *, within_s=10):
        """Have a unit leave, and take it away."""
        async with asyncio.timeout(within_s):
            assert await self.units[index].leave()
        unit, self.units[index] = self.units[index], None
        await unit.close()

    def address(self, server):
        return server.server.address or None if server else None

    def connect(self, worker, *, attempt=0):
        client = QueueClient(
            controller=lambda: self.address(self.controller),
            unit=lambda index: self.address(self.units.get(index)),
            units=lambda: [index for index, unit in self.units.items() if unit],
            worker=worker,
            attempt=attempt,
            keys=self.keys,
        )
        self.clients.append(client)
        return client

    async def create(self, *serials, client=None, size=2, step=1, length=4, **meta):
        metas = [
            RowMeta(
                partition=meta.get("partition", P), serial=s, sample=j, step=step, purpose=meta.get("purpose", "train")
            )
            for s in serials
            for j in range(size)
        ]
        prompts = Jagged.from_rows([np.full(length, m.serial * 10 + m.sample) for m in metas], "int64")
        return await (client or self.client).create(
            metas, {"prompt": prompts}, group_size=size, outputs=meta.get("outputs"), timeout=meta.get("timeout", 10)
        )

    async def claim(self, task, *, client=None, rows=1000, timeout=10, **options):
        client = client or self.client
        return await client.claim(partition=P, task=task, max_rows=rows, timeout=timeout, **options)

    async def complete(self, rows, column, *, client=None, timeout=10, length=1, **options):
        values = Jagged.from_rows([[row.meta.serial, row.meta.sample] * length for row in rows], "int32")
        return await (client or self.client).complete(rows, {column: values}, timeout=timeout, **options)

    async def through(self, *, upto="advantage"):
        for task, column in (("rollout", "response"), ("score", "reward"), ("advantage", "advantage")):
            while rows := await self.claim(task, timeout=0.2):
                assert all(await self.complete(rows, column))
            if task == upto:
                return

    async def slot(self, step, slot, *, rank=0, attempt=0, tokens=1000, timeout=10):
        return await self.client.slot(
            partition=P, attempt=attempt, step=step, slot=slot, rank=rank, tokens=tokens, timeout=timeout
        )

    async def close(self):
        for client in self.clients:
            await client.close()
        for unit in self.units.values():
            if unit:
                await unit.close()
        if self.controller:
            await self.controller.close()


@pytest.fixture
def cluster(tmp_path, tasks):
    @asynccontextmanager
    async def run(*, limit=1 << 20, keys=None, units=2, **controller):
        cluster = Cluster(tmp_path / "ledger", tasks=tasks, limit=limit, keys=keys, units=units, **controller)
        try:
            await cluster.start()
            yield cluster
        finally:
            await cluster.close()

    return run
