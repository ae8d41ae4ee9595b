"""Who asks for too much at once is refused before anything is gathered, and service goes on."""

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from asyncflow.errors import ProtocolError, Refused
from asyncflow.net.rpc import RpcClient
from asyncflow.queue.client.client import QueueClient
from asyncflow.queue.client.open_partition import OpenPartition
from asyncflow.queue.protocol import unit_calls

MIB = 1 << 20
LIMIT = 160 * MIB
MOST = 4 * MIB
ROOM = 48 * MIB


class Served:
    """A queue in a process of its own, whose messages have at most ``MOST`` bytes."""

    def __init__(self, process, controller, unit):
        self.process = psutil.Process(process.pid)
        self.unit = unit
        self.client = QueueClient(controller=controller, unit=lambda _: unit, units=lambda: [0], worker="me")
        self.partition = OpenPartition(self.client, "scores")

    async def put(self, rows):
        """Put rows of 1 MiB, which differ; give their ids."""
        return [row for n in range(rows) for row in await self.partition.put({"blob": [bytes([n]) * MIB]})]

    @contextlib.asynccontextmanager
    async def growing_by_less_than(self, nbytes):
        """Look at the memory all the time: it never grows by more."""
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
    server = world.address("master", 0) or world.address("holder", 0) or ""
    words = [str(tmp_path), str(LIMIT), "", world.name, server, str(MOST)]
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


@pytest.mark.parametrize("method", ["unit.fetch", "unit.lend"])
async def test_one_row_that_is_named_thousands_of_times_takes_no_memory(served, method):
    (row,) = await served.put(1)
    stranger = RpcClient(name="stranger", resolve=served.unit)
    greedy = unit_calls.FetchRows([row] * 1500, ["blob"])
    async with served.growing_by_less_than(ROOM):
        for _ in range(3):
            with pytest.raises(ProtocolError, match="1500 rows, of which 1 differ"):
                await stranger.call(method, greedy, unit_calls.Fetched, timeout=20)
    await stranger.close()
    assert (await served.partition.get([row], ["blob"]))["blob"] == [bytes(MIB)]


async def test_one_column_that_is_named_thousands_of_times_is_given_once(served):
    row, *_ = await served.put(5)
    stranger = RpcClient(name="stranger", resolve=served.unit)
    greedy = unit_calls.FetchRows([row], ["blob"] * 1500)
    async with served.growing_by_less_than(ROOM):
        given, frames = await stranger.call_frames("unit.fetch", greedy, unit_calls.Fetched, timeout=20)
    await stranger.close()
    assert [column.name for column in given.header.columns] == ["blob"]
    assert sum(map(len, frames)) < 2 * MIB


async def test_more_than_goes_in_one_answer_is_refused_before_it_is_gathered(served):
    rows = await served.put(128)
    await served.partition.get(rows[:2], ["blob"])
    async with served.growing_by_less_than(ROOM):
        for _ in range(3):
            with pytest.raises(Refused, match=rf"{128 * MIB} bytes .* 128 rows.* Fetch fewer rows at a time: at most"):
                await served.partition.get(rows, ["blob"])
    for first in (0, 77, 125):
        found = (await served.partition.get(rows[first : first + 3], ["blob"]))["blob"]
        assert found == [bytes([n]) * MIB for n in range(first, first + 3)]
    await served.partition.clear(rows)
    assert len(await served.partition.put({"n": np.arange(5)})) == 5
