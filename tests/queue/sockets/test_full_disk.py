"""A full disk: what was answered is there when there is room again, and a start that finds none changes nothing."""

import asyncio
import contextlib
import errno
import resource

import pytest

from asyncflow.errors import Refused
from asyncflow.queue.partition import Partition
from asyncflow.queue.protocol.messages import TaskSpec
from asyncflow.rpc.columns import Jagged

P = "open"
TASK = TaskSpec(partition=P, name="count", needs=["x"])


@contextlib.contextmanager
def room(size):
    """Keep every file of this process from growing beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def put(cluster, number):
    came = await cluster.client.put(P, {"x": Jagged.from_rows([[number]], "int64")}, timeout=10)
    return came.rows[0]


async def put_for_ever(cluster, rows):
    while True:
        rows.append(await put(cluster, len(rows)))


async def numbers(cluster, rows):
    """Return what rows hold, each claimed once."""
    leased = (await cluster.client.claim(partition=P, task=TASK.name, max_rows=len(rows) + 10, timeout=10)).rows
    assert {row.row for row in leased} >= set(rows)
    columns = await cluster.client.fetch(rows, ["x"], timeout=10)
    return [int(row[0]) for row in columns["x"].rows()]


@pytest.mark.parametrize("sync", ["process", "interval", "always"])
async def test_puts_that_fill_the_disk_lose_none_that_was_acknowledged(cluster, sync):
    async with cluster(units=1, sync=sync) as made:
        await made.client.declare([TASK], timeout=10)
        rows = []
        with room(6000):
            putting = asyncio.create_task(put_for_ever(made, rows))
            await asyncio.wait([made.controller.failed], timeout=30)
            with pytest.raises(Refused, match="the ledger cannot be written") as refused:
                await made.client.declare([TASK], timeout=10)
        assert "nothing that was answered is lost" in str(refused.value)
        assert isinstance(made.controller.failed.exception(), OSError)
        answered = len(rows)
        assert answered > 50
        await made.stop_controller()
        await made.start_controller()
        async with asyncio.timeout(30):
            while len(rows) < answered + 5:
                await asyncio.sleep(0.01)
        putting.cancel()
        await asyncio.wait([putting])
        assert await numbers(made, rows) == list(range(len(rows)))


async def test_a_start_on_a_full_disk_is_refused_and_leaves_the_ledger_as_it_is(cluster):
    async with cluster(units=1) as made:
        await made.client.declare([TASK], timeout=10)
        rows = [await put(made, number) for number in range(20)]
        await made.stop_controller()
        ledger = {file.name: file.read_bytes() for file in made.folder.iterdir()}
        for _ in range(2):
            with room(100), pytest.raises(Refused, match="the ledger cannot be written"):
                await made.start_controller()
            assert isinstance(made.controller.failed.exception(), OSError)
            made.controller = None
            assert {file.name: file.read_bytes() for file in made.folder.iterdir()} == ledger
        await made.start_controller()
        assert await numbers(made, rows) == list(range(20))


async def test_who_waits_for_a_row_is_refused_when_the_ledger_cannot_take_it(cluster):
    async with cluster(units=1) as made:
        await made.client.declare([TASK], timeout=10)
        await put(made, 0)
        size = max(file.stat().st_size for file in made.folder.iterdir())
        await made.client.claim(partition=P, task=TASK.name, max_rows=1, timeout=10)
        waiting = asyncio.create_task(made.client.claim(partition=P, task=TASK.name, max_rows=1, timeout=60))
        while not made.controller.stats().parked:
            await asyncio.sleep(0.01)
        calls = made.controller.server.counters.calls
        asked = calls["queue.claim"]
        with room(size):
            putting = asyncio.create_task(put(made, 1))
            async with asyncio.timeout(30):
                with pytest.raises(Refused, match="the ledger cannot be written"):
                    await waiting
        assert calls["queue.claim"] == asked
        putting.cancel()
        await asyncio.wait([putting])
        assert isinstance(made.controller.failed.exception(), OSError)


async def test_a_compaction_whose_folder_cannot_be_synced_loses_and_doubles_nothing(cluster, monkeypatch):
    async with cluster(units=1, compact_bytes=4000) as made:
        await made.client.declare([TASK], timeout=10)
        rows = [await put(made, number) for number in range(50)]
        leased = (await made.client.claim(partition=P, task=TASK.name, max_rows=20, timeout=10)).rows
        assert all(await made.client.complete(leased, {}, timeout=10))

        def fail(_directory):
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr("asyncflow.durable.sync", fail)
            putting = asyncio.create_task(put_for_ever(made, rows))
            await asyncio.wait([made.controller.failed], timeout=30)
            answered = len(rows)
            assert isinstance(made.controller.failed.exception(), OSError)
            await made.stop_controller()
        await made.start_controller()
        async with asyncio.timeout(30):
            while len(rows) < answered + 5:
                await asyncio.sleep(0.01)
        putting.cancel()
        await asyncio.wait([putting])
        assert await numbers(made, rows[20:]) == list(range(20, len(rows)))
        assert (await Partition(made.client, P).consumed(TASK.name, timeout=10)).done == 20
