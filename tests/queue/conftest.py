"""A pure table with a counterfeit unit, and a whole queue on sockets, in short words."""

from contextlib import asynccontextmanager

import numpy as np
import pytest

from asyncflow.flow.selection import Appetite
from asyncflow.identity import NEWEST, RowPlace
from asyncflow.net.frames import Jagged
from asyncflow.queue.claims import Claim
from asyncflow.queue.client import QueueClient
from asyncflow.queue.controller import Controller
from asyncflow.queue.messages import RowMeta, TaskSpec
from asyncflow.queue.table import Cells, Held, Table
from asyncflow.queue.unit import StorageUnit

P = "train"
TASKS = [
    TaskSpec(partition=P, name="rollout", needs=["prompt"], writes=["response"], groups=True, lease_s=10),
    TaskSpec(partition=P, name="score", needs=["response"], writes=["reward"], order="key", lease_s=10),
    TaskSpec(partition=P, name="advantage", needs=["reward"], writes=["advantage"], groups=True, lease_s=10),
    TaskSpec(partition=P, name="train", needs=["advantage"], kind="gang"),
]


class Queue:
    """A table with one unit and short words for what tests do."""

    def __init__(self, tasks=TASKS):
        self.log = []
        self.held = {}
        self.table = Table()
        self.table.start(0.0)
        self.table.declare(tasks)
        self.epoch = self.table.join_unit(0, "unit-a")
        self.counter = 0
        self.tickets = 0

    def create(self, *serials, size=2, step=1, oldest=0, newest=NEWEST, purpose="train", partition=P):
        metas = [
            RowMeta(
                partition=partition,
                serial=serial,
                sample=sample,
                step=step,
                min_version=oldest,
                max_version=newest,
                purpose=purpose,
            )
            for serial in serials
            for sample in range(size)
        ]
        return self.put(metas, size)

    def put(self, metas, size):
        rows = [RowPlace(self.epoch, 0, self.counter + i).row for i in range(len(metas))]
        self.counter += len(rows)
        admitted = self.table.create(metas, rows, size, self.cells(len(rows), "prompt"))
        self.keep([row for row, ok in zip(rows, admitted, strict=True) if ok], ["prompt"])
        return admitted

    def cells(self, count, *columns, dtype="int32"):
        return Cells(dtypes=dict.fromkeys(columns, dtype), sizes={name: [8] * count for name in columns})

    def park(self, task, *, now=0.0, worker="w", ticket=None, version=None, accept=(), rows=100, groups=None):
        claim = Claim(P, task, worker, ticket or f"t{self.tickets}", Appetite(version, accept), rows, groups)
        self.tickets += 1
        self.table.claims.park(claim)
        return claim

    def claim(self, task, *, now=0.0, **options):
        claim = self.park(task, **options)
        grants = {grant.claim: grant.rows for grant in self.table.claims.serve(now)}
        self.table.claims.withdraw(claim)
        return grants.get(claim, [])

    def complete(self, rows, column, tags=None):
        cells = self.cells(len(rows), column)
        numbers = [row.row for row in rows]
        admitted = self.table.complete(rows[0].lease, numbers, cells, tags or [])
        self.keep([number for number, ok in zip(numbers, admitted, strict=True) if ok], [column])
        return admitted

    def through(self, *serials, upto="advantage"):
        """Take everything that is ready through the lease tasks, up to and including ``upto``."""
        for task, column in (("rollout", "response"), ("score", "reward"), ("advantage", "advantage")):
            rows = self.claim(task, rows=10_000)
            if rows:
                assert all(self.complete(rows, column))
            if task == upto:
                return

    @property
    def counts(self):
        return {state: n for state, n in self.table.books.partitions[P].counts.items() if n}

    def events(self):
        """Give everything that was recorded so far; free what is to be freed."""
        books = self.table.books
        self.log += books.outbox
        books.outbox.clear()
        for row in books.frees:
            self.held.pop(row, None)
        books.frees.clear()
        return self.log

    def restart(self, now=0.0):
        """Replace the controller by one that has read the log and been told by the unit what it holds."""
        log = list(self.events())
        self.table = Table()
        for event in log:
            self.table.books.apply(event)
        self.table.start(now)
        for row in self.table.hold(self.held.values()):
            del self.held[row]
        self.table.miss(self.epoch)

    def replace_unit(self, incarnation):
        """Replace the unit by an empty one."""
        self.held.clear()
        self.counter = 0
        self.epoch = self.table.join_unit(0, incarnation)

    def keep(self, numbers, columns, *, partial=False):
        """Have the unit hold columns that were admitted."""
        for number in numbers:
            old = self.held.get(number)
            full = dict(old.columns) if old else {}
            part = dict(old.partial) if old else {}
            (part if partial else full).update(dict.fromkeys(columns, 8))
            row = self.table.books.rows[number]
            self.held[number] = Held(row=number, columns=full, partial=part, tokens=row.tokens, tags=row.tags)


@pytest.fixture(scope="session")
def make_queue():
    return Queue


@pytest.fixture
def queue():
    return Queue()


class Cluster:
    """A controller and units in this process, on real sockets, with clients."""

    def __init__(self, folder, *, limit, keys, units, **controller):
        self.folder, self.limit, self.keys = folder, limit, keys
        self.options = controller
        self.controller = None
        self.units = dict.fromkeys(range(units))
        self.clients = []

    async def start(self):
        await self.start_controller()
        for index in self.units:
            await self.start_unit(index)
        self.client = self.connect("test")
        await self.client.declare(TASKS, timeout=10)

    async def start_controller(self):
        self.controller = Controller(ledger_dir=self.folder, keys=self.keys, **self.options)
        await self.controller.start()

    async def stop_controller(self):
        await self.controller.close()
        self.controller = None

    async def start_unit(self, index):
        self.units[index] = StorageUnit(
            index=index, limit_bytes=self.limit, controller=lambda: self.address(self.controller), keys=self.keys
        )
        await self.units[index].start()
        await self.units[index].joined(10)

    def address(self, server):
        return server.server.address or None if server else None

    def connect(self, worker):
        client = QueueClient(
            controller=lambda: self.address(self.controller),
            unit=lambda index: self.address(self.units[index]),
            units=lambda: [index for index, unit in self.units.items() if unit],
            worker=worker,
            keys=self.keys,
        )
        self.clients.append(client)
        return client

    async def create(self, *serials, size=2, step=1, length=4, **meta):
        metas = [
            RowMeta(
                partition=meta.get("partition", P), serial=s, sample=j, step=step, purpose=meta.get("purpose", "train")
            )
            for s in serials
            for j in range(size)
        ]
        prompts = Jagged.from_rows([np.full(length, m.serial * 10 + m.sample) for m in metas], "int64")
        return await self.client.create(metas, {"prompt": prompts}, group_size=size, timeout=meta.get("timeout", 10))

    async def claim(self, task, *, client=None, rows=1000, timeout=10, **options):
        client = client or self.client
        return await client.claim(partition=P, task=task, max_rows=rows, timeout=timeout, **options)

    async def complete(self, rows, column, *, client=None, timeout=10, **options):
        values = Jagged.from_rows([[row.meta.serial, row.meta.sample] for row in rows], "int32")
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
def cluster(tmp_path):
    @asynccontextmanager
    async def run(*, limit=1 << 20, keys=None, units=2, **controller):
        cluster = Cluster(tmp_path / "ledger", limit=limit, keys=keys, units=units, **controller)
        try:
            await cluster.start()
            yield cluster
        finally:
            await cluster.close()

    return run
