"""A queue on sockets behind every backend, and open partitions of it, in short words."""

import asyncio
import itertools
import struct
import subprocess
import sys
import uuid
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from store_world import WORLDS

from asyncflow.queue.blocking import BlockingPartition, BlockingQueue
from asyncflow.queue.client import QueueClient
from asyncflow.queue.controller.controller import Controller
from asyncflow.queue.partition import Partition
from asyncflow.queue.storage.backend import Site
from asyncflow.queue.storage.unit import StorageUnit
from asyncflow.rpc import framing
from asyncflow.rpc.addresses import host_and_port
from asyncflow.rpc.columns import LARGE
from asyncflow.rpc.directory import Directory
from asyncflow.rpc.membership import Member, Membership

_numbers = itertools.count()
LIMIT = 8 << 20


class Queue:
    """A controller and units in this process, with as many clients as a test wants."""

    def __init__(self, folder, *, world, units, limit, **options):
        self.folder, self.world, self.limit, self.options = folder, world, limit, options
        self.units = dict.fromkeys(range(units))
        self.controller = None
        self.clients = []

    async def start(self):
        await self.start_controller()
        for index in self.units:
            await self.start_unit(index)
        self.client = self.connect("test")

    async def start_controller(self):
        self.controller = Controller(ledger_dir=self.folder, **self.options)
        await self.controller.start()

    async def restart_controller(self):
        await self.controller.close()
        self.controller = None
        await self.start_controller()
        await self.until(lambda: self.controller.stats().units == sum(unit is not None for unit in self.units.values()))

    async def start_unit(self, index):
        incarnation = uuid.uuid4().hex
        site = Site(unit=next(_numbers), incarnation=incarnation, host="127.0.0.1", find=self.world.address)
        backend = self.world.shared(site)
        await backend.open()
        self.units[index] = StorageUnit(
            index=index,
            limit_bytes=self.limit,
            controller=lambda: self.address(self.controller),
            incarnation=incarnation,
            backend=backend,
            find=lambda _, other: self.address(self.units.get(other)),
        )
        await self.units[index].start()
        await self.units[index].joined(10)

    async def stop_unit(self, index):
        unit, self.units[index] = self.units[index], None
        await unit.close()

    def address(self, server):
        return server.server.address or None if server else None

    def peers(self, worker):
        return {
            "find": lambda role, index: self.address(self.controller if role == "controller" else self.units[index]),
            "units": lambda: [index for index, unit in self.units.items() if unit],
            "worker": worker,
        }

    def connect(self, worker):
        client = QueueClient(**self.peers(worker))
        self.clients.append(client)
        return client

    def partition(self, name="scores", *, worker=None, tensors=False):
        client = self.client if worker is None else self.connect(worker)
        return Partition(client, name, tensors=tensors)

    def blocking(self, name="scores", *, worker="blocking"):
        return BlockingPartition(BlockingQueue(lambda: QueueClient(**self.peers(worker))), name)

    @property
    def held(self):
        """Bytes in all units."""
        return sum(unit.holdings.budget.used for unit in self.units.values() if unit)

    async def until(self, condition, seconds=10):
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.01)

    async def close(self):
        for client in self.clients:
            await client.close()
        for unit in self.units.values():
            if unit:
                await unit.close()
        if self.controller:
            await self.controller.close()


@pytest.fixture(params=WORLDS)
def world(request, stores):
    """The store of each kind of backend: one for all tests."""
    return stores(request.param)


@pytest.fixture
def queue(tmp_path, world):
    @asynccontextmanager
    async def run(*, units=2, limit=LIMIT, **options):
        made = Queue(tmp_path / "ledger", world=world, units=units, limit=limit, **options)
        try:
            await made.start()
            yield made
        finally:
            await made.close()

    return run


@pytest.fixture
async def two_units(queue):
    async with queue() as made:
        yield made


@pytest.fixture
def scores(two_units):
    """An open partition with one task, ``grade``, that needs the column ``text``."""
    return two_units.partition("scores")


@pytest.fixture
async def address(two_units):
    """The one address of the queue: directory, controller and units are members."""
    directory = Directory()
    directory.attach(two_units.controller.server)
    at = two_units.controller.server.address
    servers = [("controller", 0, at), *(("storage", n, unit.server.address) for n, unit in two_units.units.items())]
    members = [
        Membership(driver=at, member=Member(role=role, index=index, incarnation=f"{role}{index}", address=where))
        for role, index, where in servers
    ]
    for member in members:
        await member.join(10)
    yield at
    for member in members:
        await member.close()
    await directory.close()


class Served:
    """A queue in a process of its own. unit: its address."""

    def __init__(self, process, controller, unit):
        self.process = psutil.Process(process.pid)
        self.unit = unit
        self.peers = {"find": lambda role, _: controller if role == "controller" else unit, "units": lambda: [0]}
        self.client = QueueClient(**self.peers, worker="me")
        self.partition = Partition(self.client, "scores")

    @asynccontextmanager
    async def growing_by_less_than(self, nbytes):
        """Look at its memory all the time: it never grows by more."""
        before = highest = self.process.memory_info().rss

        async def look():
            nonlocal highest
            while True:
                highest = max(highest, self.process.memory_info().rss)
                await asyncio.sleep(0.002)

        looking = asyncio.create_task(look())
        try:
            yield
        finally:
            looking.cancel()
        assert max(highest, self.process.memory_info().rss) - before < nbytes


@pytest.fixture
async def served(tmp_path, world):
    """A queue for 160 MiB, whose unit takes and gives messages of at most 4 MiB."""
    server = world.address("master", 0) or world.address("holder", 0) or ""
    words = [str(tmp_path), str(160 << 20), "", world.name, server, str(4 << 20)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(__file__).with_name("serve.py")), *words, stdout=subprocess.PIPE
    )
    made = Served(process, *(await process.stdout.readline()).decode().split())
    try:
        yield made
        assert process.returncode is None
    finally:
        await made.client.close()
        process.kill()
        await process.wait()
        process._transport.close()


class RawPeer:
    """A peer that says anything to a server of calls: see ``asyncflow.rpc.framing``."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    async def send(self, parts):
        small = [bytes(part) for part in parts if len(part) < LARGE]
        block = struct.pack(f"<I{len(parts)}Q", len(parts), *map(len, parts)) + b"".join(small)
        large = [bytes(part) for part in parts if len(part) >= LARGE]
        self.writer.writelines([struct.pack("<Q", len(block)) + block, *large])
        await self.writer.drain()

    async def receive(self):
        (size,) = struct.unpack("<Q", await self.reader.readexactly(8))
        block = await self.reader.readexactly(size)
        (count,) = struct.unpack_from("<I", block)
        sizes, at, parts = struct.unpack_from(f"<{count}Q", block, 4), 4 + 8 * count, []
        for size in sizes:
            if size >= LARGE:
                parts.append(await self.reader.readexactly(size))
            else:
                parts.append(block[at : at + size])
                at += size
        return parts

    async def close(self):
        self.writer.close()


@asynccontextmanager
async def _raw_peer_at(address):
    """Connect to a server and shake hands."""
    reader, writer = await asyncio.open_connection(*host_and_port(address))
    writer.write(framing.hello(None))
    await reader.readexactly(len(framing.welcome(framing.ANY_SERVER)))
    made = RawPeer(reader, writer)
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture
def raw_peer_at():
    return _raw_peer_at
