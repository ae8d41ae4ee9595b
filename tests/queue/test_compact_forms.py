"""What is kept or sent in few bytes says the same: ids as runs, serials as spans, batches."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from asyncflow.errors import ProtocolError
from asyncflow.identity import NEWEST
from asyncflow.queue.protocol.batches import ABSENT, RowBatch, Slot, pack, packed
from asyncflow.queue.protocol.messages import SERIAL_BITS
from asyncflow.queue.protocol.unit_calls import Cells
from asyncflow.queue.table.partition import Serials
from asyncflow.queue.table.state import by_row
from asyncflow.rpc.columns import Jagged


@given(st.integers(1, 4).flatmap(lambda count: st.lists(st.lists(st.integers(0, 1), min_size=count, max_size=count))))
def test_sizes_told_by_column_are_known_by_row(columns):
    count = len(columns[0]) if columns else 3
    sizes = {str(index): packed(Jagged.from_rows([[0] * n for n in of], "uint8")) for index, of in enumerate(columns)}
    names, rows = by_row(Cells(dtypes={}, sizes=sizes), count)
    assert names == tuple(sizes)
    assert [list(row) for row in rows] == [[of[index] for of in columns] for index in range(count)]


@pytest.mark.parametrize("sizes", [{"a": b"\1\0\0\0" * 2}, {"a": b"\1\0\0\0", "b": b""}, {"a": b"\1" * 11}])
def test_sizes_of_other_rows_are_refused(sizes):
    with pytest.raises(ProtocolError, match="sizes in"):
        by_row(Cells(dtypes={}, sizes=sizes), 3)


NAMES = st.sampled_from([b"one", b"two", b""])


@given(st.lists(st.tuples(NAMES, st.integers(0, 60), st.integers(1, 9)), max_size=30))
def test_serials_are_known_once_they_were_used(puts):
    serials, used = Serials(), set()
    for name, first, count in puts:
        number = 7 if not name else serials.number(name) or serials.unused_number()
        if name:
            serials.name(name, number)
        start = (number << SERIAL_BITS) + first
        assert serials.overlaps(range(start, start + count)) == (not used.isdisjoint(range(start, start + count)))
        serials.add(start, count)
        used |= set(range(start, start + count))
    assert all(serial in serials for serial in used)
    again = Serials()
    for name, number, spans in serials.clients():
        again.restore(name, number, spans)
    assert list(again.clients()) == list(serials.clients())
    spans = [span for _, _, spans in serials.clients() for span in spans]
    assert sum(end - first for first, end in spans) == len(used)


def test_of_the_clients_those_without_rows_that_were_silent_longest_are_forgotten(monkeypatch):
    monkeypatch.setattr("asyncflow.queue.table.partition._IDLE", 4)
    serials, living = Serials(), {1 << SERIAL_BITS}
    for count in range(20):
        number = serials.unused_number()
        serials.name(b"client %d" % count, number)
        serials.add(number << SERIAL_BITS, 1, living=living)
    known = [name for name, _, _ in serials.clients()]
    assert known[0] == b"client 0"
    assert known[-2:] == [b"client 18", b"client 19"]
    assert len(known) <= 5
    assert len({number for _, number, _ in serials.clients()}) == len(known)


def test_numbers_begin_anew_when_all_were_given_and_pass_over_those_that_are_taken(monkeypatch):
    monkeypatch.setattr("asyncflow.queue.table.partition._NUMBERS", 3)
    serials = Serials()
    for name, number in ((b"a", 1), (b"b", 3)):
        serials.name(name, number)
    assert serials.unused_number() == 2


def test_what_was_not_put_yet_is_not_taken_for_used_however_many_puts_are_under_way():
    serials = Serials()
    first = 1 << SERIAL_BITS
    for number in range(0, 1000, 2):
        serials.add(first + number, 1)
    assert not any(first + number in serials for number in range(1, 1000, 2))


@given(st.lists(st.integers(0, 40), max_size=30))
def test_the_serials_of_a_creator_who_gives_them_itself_say_which_comes_next_and_which_were_skipped(given):
    serials = Serials()
    for serial in given:
        serials.add(serial, 1)
    serials.name(b"a client", serials.unused_number())
    serials.add(1 << SERIAL_BITS, 1)
    assert serials.next() == max(given, default=-1) + 1
    assert serials.missing() == sorted(set(range(serials.next())) - set(given))


def a_batch(*, rows):
    return RowBatch(
        partition="p",
        purpose="train",
        lease="a",
        until=1.0,
        rows=[*range(8, 8 + rows - 1), 4000],
        serials=[1] * rows,
        steps=[3] * rows,
        tags=[{"n": n} for n in range(rows)],
        sizes={"x": pack([8] * rows), "y": pack([1, ABSENT, *[3] * (rows - 2)])},
    )


@pytest.mark.parametrize("rows", [2, 31, 32, 100])
def test_a_batch_is_what_it_was(rows):
    batch = a_batch(rows=rows)
    leased = batch.leased()
    assert [row.bytes for row in leased[:2]] == [{"x": 8, "y": 1}, {"x": 8}]
    assert {row.meta.max_version for row in leased} == {NEWEST}


@pytest.mark.parametrize("rows", [0, 2, 100])
def test_a_slot_is_what_it_was(rows):
    slot = Slot(step=1, slot=2, batch=a_batch(rows=rows) if rows else None, last=False)
    assert [(row.row, row.meta, row.unit, row.bytes) for row in slot.rows] == [
        (row.row, row.meta, row.unit, row.bytes) for row in (slot.batch.leased() if rows else [])
    ]
    assert [row.meta.key for row in slot.rows] == (slot.batch.keys if rows else [])
