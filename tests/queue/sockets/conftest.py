"""A whole queue on sockets in this process, in short words."""

import asyncio
import threading
from contextlib import asynccontextmanager

import numpy as np
import pytest

from asyncflow.queue.client import QueueClient
from asyncflow.queue.controller.controller import Controller
from asyncflow.queue.ledger import log
from asyncflow.queue.protocol.messages import Samples
from asyncflow.queue.storage.unit import StorageUnit
from asyncflow.rpc.columns import Jagged

P = "train"


class Cluster:
    """A controller and units in this process, on real sockets, with clients."""

    def __init__(self, folder, *, tasks, limit, issuer, units, **controller):
        self.folder, self.tasks, self.limit, self.issuer = folder, tasks, limit, issuer
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
        self.controller = Controller(ledger_dir=self.folder, credentials=self.credentials("controller"), **self.options)
        await self.controller.start()

    async def stop_controller(self):
        await self.controller.close()
        self.controller = None

    async def start_unit(self, index):
        self.units[index] = StorageUnit(
            index=index,
            limit_bytes=self.limit,
            controller=lambda: self.address(self.controller),
            credentials=self.credentials("storage", index),
            find=lambda _, other: self.address(self.units.get(other)),
        )
        await self.units[index].start()
        await self.units[index].joined(10)

    async def drain(self, index, *, within_s=10):
        """Drain a unit, and take it away."""
        async with asyncio.timeout(within_s):
            assert await self.units[index].leave()
        unit, self.units[index] = self.units[index], None
        await unit.close()

    def credentials(self, role, index=0):
        """Those of a process; None where no certificates are issued."""
        return self.issuer.credentials(role, index) if self.issuer else None

    def address(self, server):
        return server.server.address or None if server else None

    def connect(self, worker, *, attempt=0):
        client = QueueClient(
            find=lambda role, index: self.address(self.controller if role == "controller" else self.units.get(index)),
            units=lambda: [index for index, unit in self.units.items() if unit],
            worker=worker,
            attempt=attempt,
            credentials=self.credentials("client"),
        )
        self.clients.append(client)
        return client

    async def create(self, *serials, client=None, size=2, step=1, length=4, partition=P, purpose="train", **options):
        """Put groups; return whether each row is new."""
        values = [np.full(length, serial * 10 + sample) for serial in serials for sample in range(size)]
        put = await (client or self.client).put(
            partition,
            {"prompt": Jagged.from_rows(values, "int64")},
            group_size=size,
            samples=Samples(serials=list(serials), step=step, purpose=purpose),
            **{"timeout": 10, **options},
        )
        return put.new

    async def claim(self, task, *, client=None, rows=1000, timeout=10, **options):
        client = client or self.client
        return (await client.claim(partition=P, task=task, max_rows=rows, timeout=timeout, **options)).rows

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
    async def run(*, limit=1 << 20, issuer=None, units=2, **controller):
        cluster = Cluster(tmp_path / "ledger", tasks=tasks, limit=limit, issuer=issuer, units=units, **controller)
        try:
            await cluster.start()
            yield cluster
        finally:
            await cluster.close()

    return run


class Disk:
    """Holds up the disk between ``stop`` and ``go_on``, which may fail."""

    def __init__(self, monkeypatch):
        self._free, self._sync, self._error = threading.Event(), log._sync, None
        self._free.set()
        monkeypatch.setattr(log, "_sync", self._wait)

    def _wait(self, fd):
        self._free.wait(30)
        self._sync(fd)
        if self._error is not None:
            raise self._error

    def stop(self):
        self._free.clear()

    def go_on(self, *, error=None):
        self._error = error
        self._free.set()


@pytest.fixture
def disk(monkeypatch):
    disk = Disk(monkeypatch)
    yield disk
    disk.go_on()
