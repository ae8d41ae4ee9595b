"""When a unit shows a whole parcel to those who are lent it, and when it does no more."""

import asyncio
import os

import numpy as np
import pytest

from asyncflow.net.arena import memfd
from asyncflow.net.arena.loans import Incoming, owner_of
from asyncflow.net.arena.memfd import PAGE, SHOWN, Outgoing
from asyncflow.net.jagged import Jagged
from asyncflow.queue.backends.memory import MemoryBackend
from asyncflow.queue.protocol.messages import RowMeta
from asyncflow.queue.protocol.unit_calls import NewCells, NewRows, Verdict
from asyncflow.queue.unit.budget import Budget
from asyncflow.queue.unit.holdings import Holdings

ROWS = list(range(100, 110))
LARGE = 20_000


class Unit:
    """Holdings whose columns came through an arena."""

    def __init__(self):
        file = memfd.made()
        self.outgoing, self.incoming = Outgoing(file), Incoming(os.dup(file))
        self.holdings = Holdings(
            backend=MemoryBackend(), budget=Budget(1 << 30, where="test"), where="test", lost=lambda _: None
        )

    def came(self, values, rows, *, shared=True):
        """Give a column of ``rows`` of so many values, as it came from a producer."""
        made = np.arange(values * rows, dtype=np.int64)
        if shared and made.nbytes >= memfd.PAGE * 16:
            page = self.outgoing.put(made.view(np.uint8).data)
            made = np.frombuffer(self.incoming.take(page, made.nbytes), np.int64)
        return Jagged.trusted(made, np.full(rows, values), "int64")

    async def create(self, columns, rows=ROWS, *, partial=()):
        parcel = await self.holdings.store_new(
            columns, rows=len(rows), outputs={}, partial=partial, producer="", timeout=0
        )
        metas = [RowMeta(partition="p", serial=row, sample=0, step=1, tokens=1) for row in rows]
        put = self.holdings.propose(NewRows(metas, rows, 1, parcel.cells), parcel, outputs={})
        self.holdings.decide(put, Verdict([True] * len(rows)))

    async def write(self, rows, columns, *, reason=""):
        parcel = await self.holdings.store_outputs(
            columns, rows=rows, lease="1", partial=bool(reason), producer="", timeout=0
        )
        entry = NewCells(lease="1", rows=rows, cells=parcel.cells, tags=[], reason=reason)
        return self.holdings.propose(entry, parcel, outputs={})

    async def shown(self, rows, *columns):
        """Give the first row of the parcel that is lent, None where none is; the marks are as they should be."""
        lent = await self.holdings.lend(rows, columns)
        if lent is None:
            return None
        got, first = lent
        assert all(self.marked(column) for column in got.values() if column.values.nbytes >= PAGE * 16)
        self.lent = got
        return first

    @staticmethod
    def marked(column):
        memory = owner_of(column.values)
        address = column.values.__array_interface__["data"][0]
        return memory[(address - memory.address) // PAGE] == SHOWN


@pytest.fixture
def unit():
    made = Unit()
    yield made
    made.outgoing.close()
    made.incoming.close()


async def test_a_parcel_is_shown_whole_whichever_of_its_rows_are_asked_for(unit):
    await unit.create({"a": unit.came(LARGE, 10), "b": unit.came(LARGE, 10), "small": unit.came(1, 10)})
    for rows in ([104], [109, 100], ROWS):
        assert await unit.shown(rows, "a", "small") == 100
    assert len(unit.lent["a"]) == len(unit.lent["small"]) == 10
    assert await unit.shown([103], "b") == 100


async def test_what_cannot_be_lent_or_is_not_whole_is_not_shown(unit):
    many = list(range(1000, 3000))
    await unit.create({"a": unit.came(LARGE, 10, shared=False), "small": unit.came(1, 10), "b": unit.came(LARGE, 10)})
    await unit.create({"a": unit.came(LARGE // 100, 2000)}, many)
    await unit.create({"a": unit.came(LARGE, 2)}, [200, 202])
    await unit.create({"a": unit.came(LARGE, 2), "b": unit.came(LARGE, 2)}, [300, 301], partial=["b"])
    for rows, columns in [
        ([104], "a"),
        ([104], "small"),
        ([104], "ab"),
        ([104], "nope"),
        ([999], "a"),
        (many[:2], "a"),
        ([200], "a"),
        ([300], "b"),
        ([300], "ab"),
        ([104, 300], "b"),
        ([104], ""),
        ([], "a"),
    ]:
        assert await unit.shown(rows, *(columns if set(columns) <= {"a", "b"} else [columns])) is None
    assert await unit.shown([301], "a") == 300


@pytest.mark.parametrize("ok", [True, False])
async def test_a_cell_that_may_be_replaced_hides_its_parcel_before_that_is_decided_and_for_ever(unit, ok):
    await unit.create({"a": unit.came(LARGE, 10), "b": unit.came(LARGE, 10)})
    assert await unit.shown([104], "a") == 100
    held = unit.lent["a"]
    put = await unit.write([107], {"b": unit.came(LARGE, 1)})
    assert not unit.marked(held)
    assert await unit.shown([104], "a") is None
    unit.holdings.decide(put, Verdict([ok]))
    assert await unit.shown([104], "a") is None
    assert not unit.marked(held)


async def test_no_parcel_is_shown_while_a_write_to_it_is_not_decided(unit):
    await unit.create({"a": unit.came(LARGE, 10), "b": unit.came(LARGE, 10)})
    put = await unit.write([107], {"b": unit.came(LARGE, 1)})
    assert await unit.shown([104], "b") is None
    waits = asyncio.ensure_future(unit.shown([107], "b"))
    await asyncio.sleep(0)
    assert not waits.done()
    unit.holdings.decide(put, Verdict([True]))
    assert await waits == 107
    assert await unit.shown([104], "b") is None


async def test_new_columns_and_unfinished_ones_hide_nothing(unit):
    await unit.create({"a": unit.came(LARGE, 10)})
    assert await unit.shown([104], "a") == 100
    for name, reason in (("c", ""), ("d", "given back")):
        put = await unit.write([107], {name: unit.came(LARGE, 1)}, reason=reason)
        unit.holdings.decide(put, Verdict([True]))
    assert unit.marked(unit.lent["a"])
    assert await unit.shown([104, 107], "a") == 100


async def test_no_column_is_marked_beside_one_that_cannot_be_lent(unit):
    a = unit.came(LARGE, 10)
    await unit.create({"a": a, "b": unit.came(LARGE, 10, shared=False)})
    assert await unit.shown([104], "a", "b") is None
    assert not unit.marked(a)


async def test_a_back_end_that_may_wait_shows_nothing(unit, monkeypatch):
    await unit.create({"a": unit.came(LARGE, 10)})
    monkeypatch.setattr(MemoryBackend, "immediate", False)
    assert await unit.shown([104], "a") is None


@pytest.mark.parametrize("rows", [[103], ROWS])
async def test_cleared_rows_hide_their_parcel(unit, rows):
    await unit.create({"a": unit.came(LARGE, 10)})
    assert await unit.shown([104], "a") == 100
    held = unit.lent["a"]
    unit.holdings.clear(rows)
    assert not unit.marked(held)
    assert await unit.shown([104], "a") is None


async def test_nothing_is_shown_any_more_when_a_unit_ends(unit):
    await unit.create({"a": unit.came(LARGE, 10)})
    await unit.create({"a": unit.came(LARGE, 2)}, [200, 201])
    held = []
    for row in (104, 200):
        await unit.shown([row], "a")
        held.append(unit.lent["a"])
    unit.holdings.shown.end()
    assert not any(map(unit.marked, held))
    assert await unit.shown([104], "a") is None
