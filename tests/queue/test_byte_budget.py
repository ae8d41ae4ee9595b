"""The byte budget of a unit by itself."""

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.errors import DeadlineExceeded, Refused
from asyncflow.queue.storage.budget import ByteBudget


async def test_budget_is_first_come_first_served_and_forgets_those_who_left():
    budget = ByteBudget(10, where="test")
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


async def test_what_need_not_be_there_fits_where_a_quarter_stays_free_and_nobody_waits():
    budget = ByteBudget(100, where="test")
    await budget.reserve(20, promise=30, timeout=1)
    assert [budget.fits(size) for size in (25, 26)] == [True, False]
    waiting = asyncio.create_task(budget.reserve(60, timeout=60))
    await asyncio.sleep(0)
    assert not budget.fits(1)
    budget.release(20)
    await waiting
    assert not budget.fits(1)
    budget.release(60, promise=30)
    assert budget.fits(75)


async def test_the_largest_gets_its_turn_although_smaller_ones_would_fit():
    budget = ByteBudget(10, where="test")
    await budget.reserve(8, timeout=1)
    large = asyncio.create_task(budget.reserve(10, timeout=60))
    await asyncio.sleep(0)
    small = asyncio.create_task(budget.reserve(1, timeout=60))
    await asyncio.sleep(0.001)
    assert not small.done()
    budget.release(8)
    await asyncio.sleep(0.001)
    assert large.done()
    assert not small.done()
    budget.release(10)
    await small


async def test_what_can_never_fit_is_refused_at_once():
    budget = ByteBudget(10, where="test")
    with pytest.raises(Refused, match="11 bytes never fit into 10"):
        await budget.reserve(6, promise=5, timeout=60)


sizes = st.integers(0, 40)


@given(st.lists(st.tuples(sizes, st.lists(sizes, max_size=3), st.booleans()), max_size=12), st.randoms())
def test_reserved_writes_never_wait_whatever_else_does(rows, random):
    """Rows come as they find room, write in any order what they were promised or less, some twice, and go."""

    async def live(budget, size, outputs, repeats):
        await budget.reserve(size, promise=sum(outputs), timeout=10)
        written = size
        for most in outputs:
            await asyncio.sleep(0)
            size = random.randint(0, most)
            async with asyncio.timeout(0):
                await budget.draw(size, timeout=10)
            assert budget.used <= budget.limit
            await asyncio.sleep(0)
            budget.release(0, promise=most)
            written += size
            if repeats:
                with contextlib.suppress(DeadlineExceeded):
                    await budget.reserve(size, timeout=0)
                    budget.release(size)
        await asyncio.sleep(0)
        budget.release(written)

    async def run():
        budget = ByteBudget(100, where="test")
        fitting = [row for row in rows if row[0] + sum(row[1]) <= budget.limit]
        async with asyncio.TaskGroup() as group:
            for row in fitting:
                group.create_task(live(budget, *row))
        assert (budget.used, budget.promised, len(budget)) == (0, 0, 0)

    asyncio.run(run())
