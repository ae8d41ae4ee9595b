"""Tests of what a unit holds, against a model: rows, results, reservations and bytes."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.errors import DeadlineExceeded, PeerLost, ProtocolError, Refused, StaleHandle, WrongUnit
from asyncflow.queue.protocol.messages import Samples
from asyncflow.queue.protocol.unit_calls import EntryResult, MovedRows, NewCells, NewRows
from asyncflow.queue.storage.backend import BytesLost, Place
from asyncflow.queue.storage.budget import ByteBudget
from asyncflow.queue.storage.drain import MovingRows
from asyncflow.queue.storage.holdings import Holdings
from asyncflow.queue.storage.memory import MemoryBackend
from asyncflow.rpc.columns import Jagged

OUTPUTS = {"b": 24}


async def freed():
    """Wait until memory has let go of what was freed."""
    await asyncio.sleep(0)


class Unit:
    """Holdings with a controller that decides what it is told to."""

    def __init__(self, *, limit=1 << 20, backend=None):
        self.backend = backend or MemoryBackend()
        self.budget = ByteBudget(limit, where="test")
        self.lost = []
        self.holdings = Holdings(backend=self.backend, budget=self.budget, where="test", lost=self.lost.extend)
        self.rows = 0

    async def create(self, lengths, *, ok=None, outputs=OUTPUTS):
        columns = {"a": Jagged.from_rows([np.full(n, self.rows + i) for i, n in enumerate(lengths)], "int64")}
        blob = await self.holdings.store(columns, new=len(lengths), outputs=outputs, timeout=0)
        rows = list(range(self.rows, self.rows + len(lengths)))
        self.rows += len(lengths)
        tags = [{"made": row} if row % 2 else {} for row in rows]
        entry = NewRows("p", b"a client", 0, 1, rows, blob.cells, tags, Samples(serials=rows, step=1, tokens=rows))
        put = self.holdings.propose(entry, blob)
        self.holdings.decide(put, EntryResult(ok if ok is not None else [True] * len(rows)))
        return rows

    async def send(self, rows, lengths):
        """Store rows from another unit, with a whole column and an unfinished one, to be decided about."""
        columns = {
            name: Jagged.from_rows([np.full(n, row) for n, row in zip(lengths, rows, strict=True)], "int64")
            for name in "ab"
        }
        blob = await self.holdings.store(columns, new=len(rows), outputs=OUTPUTS, partial=["b"], timeout=0)
        tokens, tags = [2 * row for row in rows], [{"moved": row} for row in rows]
        return self.holdings.propose(MovedRows(0, 1, rows, blob.cells, ["b"], tokens, tags), blob)

    async def move(self, rows, lengths, *, ok):
        self.holdings.decide(await self.send(rows, lengths), EntryResult(ok))

    async def store(self, rows, columns, *, lease="1", outcome="complete", tags=()):
        made = {name: Jagged.from_rows([np.full(n, v) for n, v in cells], "int64") for name, cells in columns.items()}
        partial = () if outcome == "complete" else made
        blob = await self.holdings.store(made, rows=rows, lease=lease, partial=partial, timeout=0)
        entry = NewCells(lease, rows, blob.cells, list(tags), outcome)
        return self.holdings.propose(entry, blob)

    async def write(self, rows, columns, *, ok=None, **how):
        put = await self.store(rows, columns, **how)
        self.holdings.decide(put, EntryResult(ok if ok is not None else [True] * len(rows)))


class Model:
    """The rows as they should be, one by one: columns as (length, value) with the lease that wrote them."""

    def __init__(self):
        self.whole = {}
        self.partial = {}
        self.about = {}

    def hold(self, row, *, whole, partial, tokens, tags):
        self.whole[row] = {name: (cell, "") for name, cell in whole.items()}
        self.partial[row] = {name: (cell, "") for name, cell in partial.items()}
        self.about[row] = (tokens, tags)

    def write(self, row, cells, lease, outcome, tags):
        whole, partial = self.whole.get(row), self.partial.get(row)
        if whole is None or any(whole[name][1] == lease for name in cells if name in whole):
            return
        for name, cell in cells.items():
            if outcome == "complete":
                whole[name] = (cell, lease)
                partial.pop(name, None)
            elif name not in whole:
                partial[name] = (cell, lease)
        if outcome == "complete":
            self.about[row] = (self.about[row][0], self.about[row][1] | tags)

    def clear(self, row):
        for shelf in (self.whole, self.partial, self.about):
            shelf.pop(row, None)

    def cells(self, row):
        return {name: cell for shelf in (self.partial[row], self.whole[row]) for name, (cell, _) in shelf.items()}

    @property
    def used(self):
        shelves = [*self.whole.values(), *self.partial.values()]
        return sum(8 * length for shelf in shelves for (length, _), _ in shelf.values())

    @property
    def reserved(self):
        return sum(size for whole in self.whole.values() for name, size in OUTPUTS.items() if name not in whole)


cell_lists = st.dictionaries(st.sampled_from("abc"), st.tuples(st.integers(0, 4), st.integers(0, 9)))
FAR = 1000
"""The least id of rows that come from elsewhere."""


def some_of(rows, *, unique=False):
    """Rows one after another, any rows, or some that are named twice."""
    runs = st.tuples(st.integers(0, len(rows) - 1), st.integers(1, 6)).map(lambda run: rows[run[0] :][: run[1]])
    any_ = st.lists(st.sampled_from(rows), min_size=1, max_size=5, unique=unique)
    return st.one_of(runs, any_) if unique else st.one_of(runs, any_, runs.map(lambda run: [run[-1], *run]))


@settings(max_examples=150)
@given(st.data())
def test_rows_bytes_promises_and_tags_are_those_of_a_model_that_keeps_row_by_row(data):
    async def run():
        unit, model = Unit(), Model()
        known = [FAR, FAR + 1, FAR + 2, FAR + 4]

        def results(rows):
            return data.draw(
                st.one_of(st.just([True] * len(rows)), st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
            )

        for _ in range(data.draw(st.integers(1, 12))):
            action = data.draw(st.sampled_from(["create", "move", "write", "write", "write", "clear"]))
            if action == "create":
                lengths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=8))
                ok = results(lengths)
                for row, length, admitted in zip(await unit.create(lengths, ok=ok), lengths, ok, strict=True):
                    known.append(row)
                    if admitted:
                        tags = {"made": row} if row % 2 else {}
                        model.hold(row, whole={"a": (length, row)}, partial={}, tokens=row, tags=tags)
            elif action == "move":
                rows = data.draw(some_of(known[:4], unique=True))
                lengths, ok = [row % 3 for row in rows], results(rows)
                await unit.move(rows, lengths, ok=ok)
                for row, length, admitted in zip(rows, lengths, ok, strict=True):
                    if admitted and row not in model.whole:
                        cell = (length, row)
                        model.hold(row, whole={"a": cell}, partial={"b": cell}, tokens=2 * row, tags={"moved": row})
            elif action == "write":
                rows = data.draw(some_of(sorted(known)))
                cells, ok = data.draw(cell_lists), results(rows)
                lease = data.draw(st.sampled_from("123"))
                outcome = data.draw(st.sampled_from(["complete", "complete", "return", "keep"]))
                tags = data.draw(st.sampled_from([[], [{"n": number} for number, _ in enumerate(rows)]]))
                columns = {name: [cell] * len(rows) for name, cell in cells.items()}
                await unit.write(rows, columns, ok=ok, lease=lease, outcome=outcome, tags=tags)
                for row, admitted, told in zip(rows, ok, tags or [{}] * len(rows), strict=True):
                    if admitted:
                        model.write(row, cells, lease, outcome, told)
            else:
                rows = data.draw(some_of(sorted(known)))
                unit.holdings.clear(rows)
                for row in rows:
                    model.clear(row)
            await freed()
            assert (unit.budget.used, unit.budget.promised) == (model.used, model.reserved)
            assert {h.row for h in unit.holdings.held(unit.holdings.rows)} == model.whole.keys()
            for held in unit.holdings.held(unit.holdings.rows):
                assert held.columns == {n: 8 * c[0] for n, (c, _) in model.whole[held.row].items()}
                assert held.partial == {n: 8 * c[0] for n, (c, _) in model.partial[held.row].items()}
                assert (held.tokens, held.tags) == model.about[held.row]
            for names in ("a", "ab", "cba"):
                there = [row for row in sorted(model.whole) if model.cells(row).keys() >= set(names)]
                for asked in (there, data.draw(st.permutations(there))) if there else ():
                    got = await unit.holdings.fetch(asked, list(names))
                    for name in names:
                        cells = [model.cells(row)[name] for row in asked]
                        assert got[name] == Jagged.from_rows([np.full(*cell) for cell in cells], "int64")
        unit.holdings.wipe()
        await freed()
        assert (unit.budget.used, unit.budget.promised, len(unit.holdings), unit.backend._blobs) == (0, 0, 0, {})

    asyncio.run(run())


async def test_a_row_that_one_write_names_twice_keeps_one_cell_and_the_other_is_freed():
    unit = Unit()
    rows = await unit.create([1] * 8, outputs={})
    await unit.write([rows[6], *rows[4:7]], {"c": [(1, 0), (2, 1), (3, 2), (4, 3)]})
    got = await unit.holdings.fetch(rows[4:7], ["c"])
    await freed()
    assert (got["c"].lengths.tolist(), unit.budget.used) == ([2, 3, 1], 8 * (8 + 6))
    unit.holdings.wipe()
    await freed()
    assert (unit.budget.used, unit.backend._blobs) == (0, {})


async def test_who_asks_for_cells_that_are_not_decided_about_waits_for_the_result():
    unit = Unit()
    rows = await unit.create([1, 1])
    put = await unit.store(rows[:1], {"b": [(2, 7)]})
    waiting = asyncio.create_task(unit.holdings.fetch(rows[:1], ["b"]))
    await asyncio.sleep(0)
    assert (await unit.holdings.fetch(rows, ["a"]))["a"].values.tolist() == rows
    assert not waiting.done()
    unit.holdings.decide(put, EntryResult([True]))
    assert (await waiting)["b"].values.tolist() == [7, 7]
    assert (await put.result).ok == [True]


async def test_rows_on_their_way_are_elsewhere_until_they_have_come():
    unit = Unit()
    moving = MovingRows(unit.holdings, location=lambda: -1, where="test")
    put = await unit.send([FAR], [1])
    for write in (False, True):
        with pytest.raises(WrongUnit, match="1 of 1 rows are not on this unit"):
            moving.check([FAR], write=write)
    unit.holdings.decide(put, EntryResult([True]))
    moving.check([FAR], write=True)
    moving.frozen = frozenset([FAR])
    moving.check([FAR])
    with pytest.raises(WrongUnit):
        moving.check([FAR], write=True)


async def test_whoever_put_and_has_gone_takes_the_result_from_nobody_else():
    unit = Unit()
    rows = await unit.create([1])
    put = await unit.store(rows, {"b": [(2, 7)]})
    gone, stays = asyncio.create_task(put.decided()), asyncio.create_task(put.decided())
    left, reads = (asyncio.create_task(unit.holdings.fetch(rows, ["b"])) for _ in range(2))
    await asyncio.sleep(0)
    for task in (gone, left):
        task.cancel()
    await asyncio.wait([gone, left])
    assert (stays.done(), reads.done()) == (False, False)
    unit.holdings.decide(put, EntryResult([True]))
    assert (await stays).ok == [True]
    assert (await reads)["b"].values.tolist() == [7, 7]


async def test_what_is_not_there_is_a_stale_handle_that_says_what_is():
    unit = Unit()
    (row,) = await unit.create([1])
    with pytest.raises(Refused, match=f"row {row} has no column 'z'. It has a"):
        await unit.holdings.fetch([row], ["z"])
    unit.holdings.clear([row])
    with pytest.raises(StaleHandle, match=f"row {row} is not on this unit"):
        await unit.holdings.fetch([row], ["a"])


async def test_a_full_unit_takes_what_it_reserved_for_each_row_once_and_nothing_else():
    unit = Unit(limit=2 * (8 + 24))
    *rows, other = await unit.create([1, 1])
    for refused in ({"c": [(1, 0)]}, {"b": [(4, 0)]}):
        with pytest.raises(DeadlineExceeded):
            await unit.write(rows, refused)
    with pytest.raises(DeadlineExceeded):
        await unit.write(rows, {"b": [(1, 0)]}, outcome="keep")
    await unit.write(rows, {"b": [(3, 7)]})
    assert (unit.budget.used, unit.budget.promised) == (40, 24)
    with pytest.raises(DeadlineExceeded):
        await unit.write(rows, {"b": [(3, 8)]}, lease="2")
    await unit.write([other], {"b": [(3, 9)]})
    assert (await unit.holdings.fetch([*rows, other], ["b"]))["b"].values.tolist() == [7] * 3 + [9] * 3


async def test_what_was_stored_and_is_not_proposed_is_freed():
    unit = Unit()
    rows = await unit.create([1, 1], outputs={})
    blob = await unit.holdings.store({"c": Jagged.from_rows([[1], [2, 3]], "int64")}, rows=rows, timeout=0)
    assert unit.budget.used == 16 + 24
    unit.holdings.discard(blob, 2)
    await freed()
    assert unit.budget.used == 16
    assert len(unit.backend._blobs) == 1


async def test_whoever_put_hears_that_the_unit_was_given_up():
    unit = Unit()
    rows = await unit.create([1])
    written, sent = await unit.store(rows, {"b": [(2, 7)]}), await unit.send([FAR], [1])
    unit.holdings.wipe()
    assert (await written.decided()).ok == [False]
    with pytest.raises(PeerLost, match="the unit was given up"):
        await sent.decided()
    await freed()
    assert (unit.budget.used, unit.budget.promised, unit.holdings.puts, unit.backend._blobs) == (0, 0, {}, {})


@pytest.mark.parametrize("rows", [[], [0, 0]])
async def test_a_fetch_names_rows_and_each_once(rows):
    unit = Unit()
    await unit.create([1])
    with pytest.raises(ProtocolError, match="each once"):
        await unit.holdings.fetch(rows, ["a"])


class Slow(MemoryBackend):
    """A store that takes its time, can lose blobs, and can fail to take them."""

    def __init__(self):
        super().__init__()
        self.removing = asyncio.Event()
        self.gone = set()
        self.full = False

    async def put(self, blob, columns):
        if self.full:
            raise DeadlineExceeded("the store is full")
        await super().put(blob, columns)

    async def get(self, places, columns):
        if lost := [place for place in places if place in self.gone]:
            raise BytesLost(lost)
        return await super().get(places, columns)

    async def free(self, places, columns):
        await self.removing.wait()
        await super().free(places, columns)


async def test_bytes_are_in_the_budget_until_the_store_has_removed_them_and_promises_are_not():
    unit = Unit(backend=Slow())
    rows = await unit.create([1, 2])
    unit.holdings.clear(rows)
    assert (unit.budget.used, unit.budget.promised) == (24, 0)
    unit.backend.removing.set()
    await asyncio.sleep(0.001)
    assert (unit.budget.used, unit.backend._blobs) == (0, {})


async def test_a_row_whose_bytes_the_store_has_lost_is_given_up_and_told_of():
    unit = Unit(backend=Slow())
    unit.backend.removing.set()
    rows = await unit.create([1, 2, 3])
    unit.backend.gone = {Place(1, 1)}
    with pytest.raises(StaleHandle, match="lost"):
        await unit.holdings.fetch(rows, ["a"])
    assert unit.lost == [rows[1]]
    assert rows[1] not in unit.holdings.rows
    assert (await unit.holdings.fetch([rows[0], rows[2]], ["a"]))["a"].lengths.tolist() == [1, 3]
    await asyncio.sleep(0.001)
    assert unit.budget.used == 32


async def test_a_put_that_the_store_refuses_leaves_nothing_in_the_budget():
    unit = Unit(backend=Slow())
    unit.backend.full = True
    with pytest.raises(DeadlineExceeded):
        await unit.create([3])
    assert (unit.budget.used, unit.budget.promised) == (0, 0)


class Remote(MemoryBackend):
    """Finds cells at once, and gives them when it is let."""

    def __init__(self):
        super().__init__()
        self.asked, self.may_give = asyncio.Event(), asyncio.Event()

    async def get(self, places, columns):
        found = await super().get(places, columns)
        self.asked.set()
        await self.may_give.wait()
        return found


async def test_cells_that_are_replaced_or_cleared_while_others_of_a_fetch_are_read_are_what_they_were():
    for change in ("write", "clear"):
        unit = Unit(backend=Remote())
        rows = await unit.create([1, 1])
        await unit.write(rows, {"b": [(1, 5), (1, 6)]})
        fetching = asyncio.create_task(unit.holdings.fetch(rows, ["b", "a"]))
        await unit.backend.asked.wait()
        if change == "write":
            await unit.write(rows, {"b": [(1, 7), (1, 8)]}, lease="2")
        else:
            unit.holdings.clear(rows)
        await freed()
        await freed()
        unit.backend.may_give.set()
        got = await fetching
        assert list(got) == ["b", "a"]
        assert (got["b"].values.tolist(), got["a"].values.tolist()) == ([5, 6], rows)
