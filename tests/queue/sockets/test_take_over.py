"""Rows that a driver put which is no more, however long on their way, are not admitted once another has taken over."""

import asyncio

import pytest

from asyncflow.errors import Fenced

P = "train"


async def waits(unit, puts):
    async with asyncio.timeout(10):
        while len(unit.holdings.budget) < puts:
            await asyncio.sleep(0.01)


async def empty(queue):
    rows = await queue.claim("rollout")
    await queue.client.drop(rows, reason="filtered: test", timeout=10)


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_put_in_line_is_refused_when_its_creator_was_replaced(cluster, restarted):
    async with cluster(limit=100, units=1) as queue:
        old, new = queue.connect("driver", attempt=3), queue.connect("driver", attempt=4)
        await old.take_over(partition=P, timeout=10)
        assert await queue.create(0, client=old, length=6) == [True, True]
        waiting = asyncio.create_task(queue.create(1, client=old, step=1, length=6))
        await waits(queue.units[0], 1)
        await new.take_over(partition=P, timeout=10)
        before = await new.snapshot(partition=P, timeout=10)
        if restarted:
            await queue.stop_controller()
            await queue.start_controller()
        await empty(queue)
        with pytest.raises(Fenced, match="creator attempt 3 is over, 4 has started"):
            await waiting
        assert before.next_serial == (await new.snapshot(partition=P, timeout=10)).next_serial == 1
        async with asyncio.timeout(10):
            while queue.units[0].holdings.budget.used:
                await asyncio.sleep(0.01)
        assert queue.units[0].holdings.budget.promised == 0
        assert await queue.create(1, client=new, step=2, length=6) == [True, True]
        assert {row.meta.step for row in await queue.claim("rollout")} == {2}
        assert (await new.audit(timeout=10)).dispatched == 4


async def test_of_two_that_wait_in_line_with_one_prompt_the_successor_creates_it(cluster):
    async with cluster(limit=100, units=1) as queue:
        old, new = queue.connect("driver", attempt=0), queue.connect("driver", attempt=1)
        await queue.create(0, client=old, length=6)
        dead = asyncio.create_task(queue.create(1, client=old, step=1, length=6))
        await waits(queue.units[0], 1)
        await new.take_over(partition=P, timeout=10)
        successor = asyncio.create_task(queue.create(1, client=new, step=2, length=6))
        await waits(queue.units[0], 2)
        await empty(queue)
        with pytest.raises(Fenced):
            await dead
        assert await successor == [True, True]
        assert {row.meta.step for row in await queue.claim("rollout")} == {2}


async def test_a_creator_that_was_replaced_can_neither_return_nor_clear(cluster):
    async with cluster(units=1) as queue:
        old, new = queue.connect("driver", attempt=1), queue.connect("driver", attempt=2)
        await old.take_over(partition=P, timeout=10)
        await new.take_over(partition=P, timeout=10)
        with pytest.raises(Fenced):
            await old.take_over(partition=P, timeout=10)
        with pytest.raises(Fenced):
            await old.clear_partition(partition=P, timeout=10)
        with pytest.raises(Fenced):
            await queue.create(0)
