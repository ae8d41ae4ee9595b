"""Columns of a batch are known row by row, and the serials that were used by their spans."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from asyncflow.errors import ProtocolError
from asyncflow.queue.protocol.messages import SERIAL_BITS
from asyncflow.queue.protocol.unit_calls import Cells
from asyncflow.queue.table.partition import Serials
from asyncflow.queue.table.state import by_row


def test_sizes_told_by_column_are_known_by_row():
    cells = Cells(dtypes={}, sizes={"a": [1, 2], "b": [3, 4]})
    assert by_row(cells, 2) == [{"a": 1, "b": 3}, {"a": 2, "b": 4}]
    assert by_row(Cells(dtypes={}, sizes={}), 2) == [{}, {}]


@pytest.mark.parametrize("sizes", [{"a": [1, 1]}, {"a": [1, 1, 1], "b": []}])
def test_sizes_of_other_rows_are_refused(sizes):
    with pytest.raises(ProtocolError, match="sizes of"):
        by_row(Cells(dtypes={}, sizes=sizes), 3)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(1, 9)), max_size=30))
def test_serials_are_known_once_they_were_used(puts):
    serials, used = Serials(), set()
    for client, first, count in puts:
        start = (client << SERIAL_BITS) + first
        end = start + count
        assert serials.overlaps(start, end) == (not used.isdisjoint(range(start, end)))
        serials.add(start, end)
        used |= set(range(start, end))
    assert all(serial in serials for serial in used)
    assert list(Serials(serials)) == list(serials)
    assert sum(end - first for first, end in serials) == len(used)


def test_what_was_not_put_yet_is_not_taken_for_used_however_many_puts_are_under_way():
    serials = Serials()
    first = 1 << SERIAL_BITS
    for number in range(0, 1000, 2):
        serials.add(first + number, first + number + 1)
    assert not any(first + number in serials for number in range(1, 1000, 2))


@given(st.lists(st.integers(0, 40), max_size=30))
def test_the_serials_of_a_creator_who_gives_them_itself_say_which_comes_next_and_which_were_skipped(given):
    serials = Serials((serial, serial + 1) for serial in given)
    serials.add(1 << SERIAL_BITS, (1 << SERIAL_BITS) + 1)
    assert serials.next() == max(given, default=-1) + 1
    assert serials.missing() == sorted(set(range(serials.next())) - set(given))
