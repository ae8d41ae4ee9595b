"""What is fetched through shared memory is lent; its neighbours need no call; what is replaced or cleared is seen."""

import asyncio
import gc

import numpy as np
import pytest

from asyncflow.errors import StaleHandle
from asyncflow.net.arena.lending import Lending
from asyncflow.net.jagged import Jagged

ROWS = 40
VALUES = 8192
TASK = "grade"


def column(factor: int, rows: int = ROWS) -> Jagged:
    return Jagged.from_rows([np.full(VALUES + row, factor * row) for row in range(rows)], "int32")


def is_row(found: Jagged, factor: int, *rows: int) -> bool:
    return found == Jagged.from_rows([np.full(VALUES + row, factor * row) for row in rows], "int32")


class Lent:
    """One partition on one unit. calls: fetches that the unit has answered; lends: its back end has memory to lend."""

    def __init__(self, queue):
        self.queue, self.client = queue, queue.client
        self.lends = queue.world.name == "memory"

    async def put(self, client=None, **columns):
        made = columns or {"a": column(1), "b": column(2)}
        got = await (client or self.client).put("p", made, timeout=10)
        return got.rows

    async def fetch(self, rows, *columns, client=None):
        return await (client or self.client).fetch(rows, columns or ("a", "b"), timeout=10)

    async def known(self, client=None):
        """Let a client know that the unit lends; give rows of which it remembers nothing."""
        first = await self.put()
        await self.fetch(first[:3], client=client)
        await self.client.clear_rows(partition="p", rows=first, timeout=10)
        gc.collect()
        return await self.put()

    @property
    def calls(self):
        return sum(self.queue.units[0].server.counters.calls[of] for of in ("unit.fetch", "unit.lend"))


@pytest.fixture
async def lent(queue):
    async with queue(units=1) as made:
        yield Lent(made)


async def test_neighbours_of_what_is_looked_at_need_no_call(lent):
    rows = await lent.known()
    held = await lent.fetch(rows[:4])
    before = lent.calls
    for first in range(4, ROWS, 4):
        held = await lent.fetch(rows[first : first + 4])
        assert is_row(held["a"], 1, *range(first, first + 4))
        assert is_row(held["b"], 2, *range(first, first + 4))
        assert held["a"].values.flags.writeable is not lent.lends
    order = [31, 2, 2, 17]
    assert is_row((await lent.fetch([rows[place] for place in order], "b"))["b"], 2, *order)
    assert (lent.calls == before) is lent.lends
    if lent.lends:
        del held
        gc.collect()
        assert is_row((await lent.fetch(rows[7:8]))["a"], 1, 7)
        assert lent.calls == before + 1


async def test_a_replaced_cell_is_seen_whoever_replaced_it(lent):
    rows = await lent.known()
    held = await lent.fetch(rows[:4])
    writer = lent.queue.connect("writer")
    for factor in (7, 8):
        new = Jagged.from_rows([np.full(VALUES + 20, factor * 20)], "int32")
        await writer.write(rows[20:21], {"b": new}, timeout=10)
        found = await lent.fetch(rows[20:22])
        assert is_row(found["a"], 1, 20, 21)
        assert found["b"].rows()[0].tolist() == [factor * 20] * (VALUES + 20)
        assert is_row(held["b"], 2, 0, 1, 2, 3)
        held |= await lent.fetch(rows[:4], "a")


async def test_a_cleared_row_is_gone_although_its_neighbours_are_looked_at(lent):
    rows = await lent.known()
    held = await lent.fetch(rows[:4])
    await lent.queue.connect("other").clear_rows(partition="p", rows=rows[4:8], timeout=10)
    await lent.queue.until(lambda: rows[4] not in lent.queue.units[0].holdings)
    with pytest.raises(StaleHandle):
        await lent.fetch(rows[6:7])
    again = await lent.fetch(rows[8:12])
    assert is_row(again["a"], 1, *range(8, 12))
    assert is_row(held["b"], 2, 0, 1, 2, 3)


async def test_what_is_looked_at_stays_as_it_is_when_its_rows_are_cleared_and_others_come(lent):
    rows = await lent.known()
    held = await lent.fetch(rows[:4])
    await lent.client.clear_rows(partition="p", rows=rows, timeout=10)
    for factor in range(3, 23):
        new = await lent.put(a=column(factor), b=column(-factor))
        assert is_row((await lent.fetch(new[5:6]))["a"], factor, 5)
        await lent.client.clear_rows(partition="p", rows=new, timeout=10)
        assert is_row(held["a"], 1, 0, 1, 2, 3)
    await lent.queue.until(lambda: lent.queue.held == 0)


async def test_columns_that_came_apart_are_given_together(lent):
    rows = await lent.known()
    await lent.client.write(rows, {"c": column(5)}, timeout=10)
    for first in (0, 9, 18):
        held = await lent.fetch(rows[first : first + 9], "a", "c")
        assert is_row(held["a"], 1, *range(first, first + 9))
        assert is_row(held["c"], 5, *range(first, first + 9))


async def test_small_columns_come_with_large_ones_and_nobody_can_change_them_for_others(lent):
    await lent.known()
    small = Jagged.from_rows([np.array([row]) for row in range(ROWS)], "int64")
    rows = await lent.put(a=column(1), small=small)
    held = await lent.fetch(rows[:8], "a", "small")
    if lent.lends:
        with pytest.raises(ValueError, match="read-only"):
            held["small"].values[0] = 9
    assert (await lent.fetch(rows[3:9], "a", "small"))["small"].values.tolist() == list(range(3, 9))
    assert (await lent.fetch(rows[3:9], "small"))["small"].values.tolist() == list(range(3, 9))


async def test_of_a_parcel_that_was_copied_whole_nothing_else_is_kept_and_no_other_is_asked_for_soon(lent, monkeypatch):
    rows = await lent.known()
    counted = lent.queue.units[0].server.counters.calls
    lends = 1 if lent.lends else 0
    before = counted["unit.lend"]
    with monkeypatch.context() as patch:
        patch.setattr(Lending, "lend", lambda *_: None)
        found = await lent.fetch(rows[4:8])
        assert is_row(found["a"], 1, *range(4, 8))
        assert lent.queue.world.name != "memory" or found["a"].values.base is None
        assert is_row((await lent.fetch(rows[8:12]))["b"], 2, *range(8, 12))
    for _ in range(16):
        assert is_row((await lent.fetch(rows[4:8]))["b"], 2, *range(4, 8))
    assert counted["unit.lend"] == before + lends
    await lent.fetch(rows[4:8])
    assert counted["unit.lend"] == before + 2 * lends


async def test_a_unit_that_leaves_gives_its_rows_to_others_while_they_are_looked_at(queue):
    async with queue(units=2) as made:
        lent = Lent(made)
        rows = await lent.known()
        held = await lent.fetch(rows[:4])
        (index,) = [index for index, unit in made.units.items() if rows[0] in unit.holdings]
        async with asyncio.timeout(20):
            assert await made.units[index].leave()
        await made.stop_unit(index)
        found = await lent.fetch(rows)
        assert is_row(found["b"], 2, *range(ROWS))
        assert is_row(held["b"], 2, 0, 1, 2, 3)
