"""Bytes are budgeted: puts wait in line, clearing frees at once."""

import asyncio

import pytest

from asyncflow.errors import DeadlineExceeded, Refused
from asyncflow.queue import putting

P = "train"


async def test_a_put_waits_for_room_and_then_says_why_it_could_not(cluster):
    async with cluster(limit=100, units=1) as queue:
        assert await queue.create(0, length=6) == [True, True]
        with pytest.raises(Refused, match="never fit"):
            await queue.create(1, length=7)
        with pytest.raises(DeadlineExceeded, match="no room for 96 bytes"):
            await queue.create(1, length=6, timeout=5)
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


async def test_what_was_reserved_gets_through_a_unit_that_creations_have_filled(cluster):
    async with cluster(limit=1000, units=1) as queue:
        budget = queue.units[0].holdings.budget
        outputs = {"response": 400, "reward": 8}
        assert await queue.create(0, length=6, outputs=outputs) == [True, True]
        assert (budget.used, budget.promised) == (96, 816)
        waiting = [asyncio.create_task(queue.create(serial, length=6)) for serial in (1, 2)]
        while len(budget) < 2:
            await asyncio.sleep(0.01)
        rows = await queue.claim("rollout")
        assert await queue.complete(rows, "response", length=50) == [True, True]
        assert (budget.used, budget.promised) == (96 + 800, 16)
        assert not any(creation.done() for creation in waiting)
        rows = await queue.claim("score")
        assert await queue.complete(rows, "reward") == [True, True]
        assert (budget.used, budget.promised) == (96 + 816, 0)
        rows = await queue.claim("advantage")
        await queue.client.drop(rows, reason="test", timeout=10)
        assert await asyncio.gather(*waiting) == [[True, True]] * 2
        assert (budget.used, budget.promised) == (192, 0)


async def test_a_response_shorter_than_reserved_leaves_room_for_creations(cluster):
    async with cluster(limit=1000, units=1) as queue:
        await queue.create(0, length=1, outputs={"response": 480})
        waiting = asyncio.create_task(queue.create(1, length=1, outputs={"response": 400}))
        rows = await queue.claim("rollout")
        assert await queue.complete(rows, "response") == [True, True]
        assert await waiting == [True, True]


async def test_promises_end_with_their_rows(cluster):
    async with cluster(limit=1000, units=1) as queue:
        budget = queue.units[0].holdings.budget
        await queue.create(0, length=1, outputs={"response": 400})
        assert await queue.create(0, length=1, outputs={"response": 80}) == [False, False]
        assert (budget.used, budget.promised) == (16, 800)
        late = await queue.claim("rollout")
        await queue.client.expire(worker="test", timeout=10)
        rows = await queue.claim("rollout", client=queue.connect("other"))
        assert await queue.complete(late, "response", length=50) == [False, False]
        assert (budget.used, budget.promised) == (16, 800)
        assert await queue.complete(rows, "response") == [True, True]
        assert await queue.complete(rows, "response") == [True, True]
        assert (budget.used, budget.promised) == (32, 0)
        await queue.create(1, length=1, outputs={"response": 400})
        await queue.client.clear_partition(partition=P, timeout=10)
        while budget.used:
            await asyncio.sleep(0.01)
        assert budget.promised == 0


async def test_a_group_that_finds_no_room_at_its_unit_goes_to_another(cluster, monkeypatch):
    monkeypatch.setattr(putting, "_ROOM_S", 0.01)
    async with cluster(limit=200, units=2) as queue:
        await queue.create(0, length=12)
        await queue.create(1, length=1)
        assert [unit.holdings.budget.used for unit in queue.units.values()] == [192, 16]
        assert await queue.create(2, length=6) == [True] * 2
        assert [unit.holdings.budget.used for unit in queue.units.values()] == [192, 112]


async def test_a_put_larger_than_a_unit_goes_in_parts(cluster):
    async with cluster(limit=1 << 20, units=2) as queue:
        assert await queue.create(0, 2, 4, length=1 << 14, outputs={"response": 1 << 10}) == [True] * 6
        held = sum(unit.holdings.budget.used for unit in queue.units.values())
        assert held == 6 * 8 << 14
