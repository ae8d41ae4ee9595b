"""Rows over links that are cut all the time, or through which nothing comes for longer than a lease: each once."""

import asyncio
import contextlib
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncflow.net.frames import Jagged
from asyncflow.net.hosts import host_and_port
from asyncflow.queue.client.blocking import BlockingQueue
from asyncflow.queue.protocol.messages import TaskSpec

sys.path.insert(0, str(Path(__file__).parent))
from blocking_world import Cluster

P = "open"
ROWS = 200


class Proxy:
    """Before a server of ``cluster``: cuts each stream after some bytes, and lets nothing through while it is held."""

    def __init__(self, cluster, address, *, cut_after):
        self.cluster, self.to, self.cut_after = cluster, host_and_port(address), cut_after
        self.dice, self.cuts = random.Random(address), 0
        self.passes = asyncio.Event()
        self.passes.set()
        self.server = cluster.run(asyncio.start_server(self.serve, "127.0.0.1", 0))
        name = address.rpartition("/")[2]
        self.address = f"tcp://127.0.0.1:{self.server.sockets[0].getsockname()[1]}/{name}"

    def hold(self):
        self.cluster.loop.call_soon_threadsafe(self.passes.clear)

    def go_on(self):
        self.cluster.loop.call_soon_threadsafe(self.passes.set)

    async def serve(self, reader, writer):
        there, up = await asyncio.open_connection(*self.to)
        budget = self.dice.randint(1, 2 * self.cut_after) if self.cut_after else 1 << 60
        pumps = (self.pump(reader, up, budget), self.pump(there, writer, budget))
        ways = [asyncio.create_task(pump) for pump in pumps]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        for end in (writer, up):
            end.transport.abort()

    async def pump(self, reader, writer, budget):
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 14):
                await self.passes.wait()
                writer.write(data[:budget])
                await writer.drain()
                budget -= len(data)
                if budget <= 0:
                    self.cuts += 1
                    return


@contextlib.contextmanager
def proxied(folder, *, cut_after=0):
    cluster = Cluster(folder / "ledger")
    try:
        cluster.start_unit(0)
        proxies = [
            Proxy(cluster, of.server.address, cut_after=cut_after) for of in (cluster.controller, cluster.units[0])
        ]
        controller, unit = (proxy.address for proxy in proxies)
        queue = BlockingQueue(controller=controller, unit=lambda _: unit, units=lambda: [0], worker="w")
        queue.declare([TaskSpec(partition=P, name="t", needs=["x"], lease_s=1.0)], timeout=30)
        yield queue, proxies
        queue.close()
    finally:
        cluster.close()


def put_all(queue):
    for value in range(ROWS):
        queue.put(P, {"x": Jagged.from_rows([[value] * 3], "int64")}, timeout=60)


def take_all(queue, done):
    had = []
    while not done.is_set():
        claimed = queue.claim_lot(partition=P, task="t", max_rows=7, timeout=0.5)
        if claimed.lot is None:
            continue
        columns = queue.fetch(claimed.lot, ["x"], timeout=60)["x"]
        values = [int(columns.row(i)[0]) for i in range(len(columns))]
        had += [value for value, ok in zip(values, queue.complete(claimed.lot, {}, timeout=60), strict=True) if ok]
        if queue.consumed(P, "t", timeout=60).done == ROWS:
            done.set()
    return had


def flow(queue, meanwhile=lambda: None):
    done = threading.Event()
    with ThreadPoolExecutor(3) as threads:
        taking = [threads.submit(take_all, queue, done) for _ in range(2)]
        putting = threads.submit(put_all, queue)
        meanwhile()
        putting.result(100)
        return sorted(value for taken in taking for value in taken.result(100))


def test_streams_that_are_cut_lose_and_double_no_row(tmp_path):
    with proxied(tmp_path, cut_after=1500) as (queue, proxies):
        assert flow(queue) == list(range(ROWS))
        assert sum(proxy.cuts for proxy in proxies) > 5


@pytest.mark.parametrize("cut_off", [[0], [1]])
def test_a_partition_longer_than_a_lease_loses_and_doubles_no_row(tmp_path, cut_off):
    with proxied(tmp_path) as (queue, proxies):

        def meanwhile():
            for number in cut_off:
                proxies[number].hold()
            threading.Event().wait(1.5)
            for number in cut_off:
                proxies[number].go_on()

        assert flow(queue, meanwhile) == list(range(ROWS))
