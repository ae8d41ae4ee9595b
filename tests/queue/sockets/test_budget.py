"""Bytes are budgeted: puts wait in line, clearing frees at once."""

import asyncio

import numpy as np
import pytest

from asyncflow.errors import DeadlineExceeded, Refused
from asyncflow.queue.backends.memory import MemoryBackend
from asyncflow.queue.budget import Budget

P = "train"


async def test_a_put_waits_for_room_and_then_says_why_it_could_not(cluster):
    async with cluster(limit=100, units=1) as queue:
        assert await queue.create(0, length=6) == [True, True]
        with pytest.raises(Refused, match="never fit"):
            await queue.create(1, length=7)
        with pytest.raises(DeadlineExceeded, match="no room for 96 bytes"):
            await queue.create(1, length=6, timeout=0.3)
        waiting = asyncio.create_task(queue.create(1, length=6))
        behind = asyncio.create_task(queue.create(2, length=6))
        rows = await queue.claim("rollout")
        await queue.client.drop(rows, reason="test", timeout=10)
        assert await waiting == [True, True]
        assert not behind.done()
        rows = await queue.claim("rollout")
        assert {row.meta.serial for row in rows} == {1}
        await queue.client.drop(rows, reason="test", timeout=10)
        assert await behind == [True, True]
        assert queue.units[0].holdings.budget.used == 96
        assert (await queue.client.stats(timeout=10)).dropped == 4


async def test_budget_is_first_come_first_served_and_forgets_those_who_left():
    budget = Budget(10, where="test")
    await budget.reserve(8, timeout=1)
    big = asyncio.create_task(budget.reserve(9, timeout=10))
    small = asyncio.create_task(budget.reserve(2, timeout=10))
    await asyncio.sleep(0)
    assert (budget.used, len(budget)) == (8, 2)
    big.cancel()
    await asyncio.wait([big])
    await small
    assert (budget.used, len(budget)) == (10, 0)
    granted_and_cancelled = asyncio.create_task(budget.reserve(5, timeout=10))
    await asyncio.sleep(0)
    budget.release(10)
    granted_and_cancelled.cancel()
    await asyncio.wait([granted_and_cancelled])
    assert budget.used == 0


async def test_a_cell_does_not_pin_the_batch_in_which_it_came():
    backend = MemoryBackend()
    batch = np.arange(1_000_000)
    await backend.put([(1, batch[5:7])])
    (cell,) = await backend.get([1])
    assert cell.base is None
    assert not cell.flags.writeable
    await backend.free([1, 2])
    with pytest.raises(KeyError):
        await backend.get([1])
