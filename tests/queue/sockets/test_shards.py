"""A queue with three controllers, on sockets in this process: its tasks are decided about by different ones."""

import asyncio

import pytest

from asyncflow.errors import DeadlineExceeded, Elsewhere, Refused, StaleHandle
from asyncflow.net.frames import Jagged
from asyncflow.queue.client.client import QueueClient
from asyncflow.queue.controller.controller import Controller
from asyncflow.queue.ledger.audit import audit_ledger
from asyncflow.queue.protocol.messages import TaskSpec
from asyncflow.queue.unit.unit import StorageUnit

P = "open"
TASKS = [
    TaskSpec(partition=P, name="grade", needs=["text"], writes=["score"]),
    TaskSpec(partition=P, name="check", needs=["text", "score"], writes=["mark"]),
    TaskSpec(partition=P, name="read", needs=["text", "mark"]),
]
PLACES = {"grade": 1, "check": 2, "read": 0}


class Sharded:
    """Three controllers and units."""

    def __init__(self, folder, *, count=3, units=2, **options):
        self.folder, self.count, self.options = folder, count, options
        self.controllers = dict.fromkeys(range(count))
        self.units = dict.fromkeys(range(units))
        self.client = self.connect("test")

    def address(self, server):
        return server.server.address or None if server else None

    def of(self, index):
        return self.address(self.controllers[index])

    def connect(self, worker):
        return QueueClient(
            controller=lambda: self.of(0),
            shard=self.of,
            unit=lambda index: self.address(self.units[index]),
            units=lambda: [index for index, unit in self.units.items() if unit],
            worker=worker,
        )

    async def start(self):
        for index in self.controllers:
            await self.start_controller(index)
        for index in self.units:
            await self.start_unit(index)
        await self.client.declare(TASKS, timeout=10)
        return self

    async def start_controller(self, index):
        folder = self.folder / "ledger" / str(index) if index else self.folder / "ledger"
        self.controllers[index] = Controller(
            ledger_dir=folder, index=index, controllers=self.count, address=self.of, **self.options
        )
        await self.controllers[index].start()

    async def stop_controller(self, index):
        stopping, self.controllers[index] = self.controllers[index], None
        await stopping.close()

    async def start_unit(self, index):
        self.units[index] = StorageUnit(index=index, limit_bytes=1 << 20, controller=lambda: self.of(0), shard=self.of)
        await self.units[index].start()
        await self.units[index].joined(10)

    async def put(self, count, **options):
        texts = Jagged.from_rows([[number] for number in range(count)], "int64")
        return (await self.client.put(P, {"text": texts}, timeout=10, **options)).rows

    async def claim(self, task, *, rows=100, timeout=10):
        return await self.client.claim(partition=P, task=task, max_rows=rows, timeout=timeout)

    async def claim_all(self, task, count):
        leased = []
        while len(leased) < count:
            assert (more := await self.claim(task)), f"{task} has {len(leased)} of {count}"
            leased += more
        assert len(leased) == count
        return leased

    async def complete(self, leased, column=None):
        columns = {column: Jagged.from_rows([[row.row] for row in leased], "int64")} if column else {}
        return await self.client.complete(leased, columns, timeout=10)

    async def through(self, count):
        for task, column in (("grade", "score"), ("check", "mark"), ("read", None)):
            assert all(await self.complete(await self.claim_all(task, count), column))

    async def close(self):
        await self.client.close()
        for unit in self.units.values():
            await unit.close()
        for index, controller in self.controllers.items():
            if controller:
                await self.stop_controller(index)


@pytest.fixture
async def queue(tmp_path):
    queue = Sharded(tmp_path)
    try:
        yield await queue.start()
    finally:
        await queue.close()


def places(queue):
    partition = queue.controllers[0].table.books.partitions[P]
    return {name: 0 for name in partition.queues} | {n: d.controller for n, d in partition.elsewhere.items()}


async def test_tasks_are_spread_and_rows_go_through_all(queue):
    assert places(queue) == PLACES
    rows = await queue.put(20)
    await queue.through(20)
    fetched = await queue.client.fetch(rows, ["text", "score", "mark"], timeout=10)
    assert [int(cell[0]) for cell in fetched["mark"].rows()] == rows
    for task in PLACES:
        progress = await queue.client.consumed(P, task, timeout=10)
        assert (progress.rows, progress.done) == (20, 20)
