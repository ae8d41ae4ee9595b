"""Tests of how calls reach rows wherever they lie, without sockets."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.errors import DeadlineExceeded, PeerLost, StaleHandle, WrongUnit
from asyncflow.identity import RowPlace
from asyncflow.queue.client import QueueClient
from asyncflow.queue.protocol.calls import NOWHERE
from asyncflow.rpc.columns import Jagged, encode_batch

sys.path.insert(0, str(Path(__file__).parent))
from by_hand import ByHand, carry_out


class Units:
    """Units and the controller, played by hand. lies: the unit of each row; failures: what the next calls raise."""

    def __init__(self, *, there=(0, 1, 2)):
        self.lies, self.failures, self.asked = {}, [], []
        self.client = QueueClient(find=lambda *_: None, units=lambda: list(there), worker="w")
        self.client.peers.call = ByHand(self.answer).call

    def put(self, unit, count):
        rows = [RowPlace(1, unit, len(self.lies) + i).row for i in range(count)]
        self.lies.update(dict.fromkeys(rows, unit))
        return rows

    def fetch(self, rows):
        return carry_out(self.client.fetch(rows, ["x", "y"], timeout=60.0))

    def answer(self, call):
        rows = list(call.request.rows)
        self.asked.append((call.method, call.peer.number, rows))
        if call.method == "queue.where":
            return [self.lies.get(row, NOWHERE) for row in rows], []
        if self.failures:
            raise self.failures.pop(0)
        if any(self.lies.get(row) != call.peer.number for row in rows):
            raise WrongUnit("not here")
        header, frames = encode_batch(
            {
                "x": Jagged.from_rows([[row] * (row % 4) for row in rows], "int64"),
                "y": Jagged.from_rows(rows, "int64", inner=None),
            }
        )
        return header, [memoryview(bytes(frame)) for frame in frames]


def rows_of(got):
    assert [list(row) for row in got["x"].rows()] == [[n] * (n % 4) for n in got["y"].rows()]
    return [int(row) for row in got["y"].rows()]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=24), st.permutations(range(24)), st.integers(0, 2))
def test_rows_come_in_the_order_asked_for_wherever_they_lie(owners, order, taker):
    units = Units()
    rows = [row for owner in owners for row in units.put(owner, 1)]
    moved = rows[::3]
    units.lies.update(dict.fromkeys(moved, taker))
    asked = [rows[place] for place in order if place < len(rows)]
    assert rows_of(units.fetch(asked)) == asked


def test_rows_of_one_unit_cost_one_call():
    units = Units()
    rows = units.put(1, 5)
    assert rows_of(units.fetch(rows)) == rows
    assert units.asked == [("unit.fetch", 1, rows)]


def test_rows_of_two_units_cost_one_call_each():
    units = Units()
    rows = [*units.put(1, 2), *units.put(0, 2)]
    assert rows_of(units.fetch(rows)) == rows
    assert [unit for _, unit, _ in units.asked] == [1, 0]


@pytest.mark.parametrize("error", [PeerLost, DeadlineExceeded])
def test_a_call_that_failed_is_made_again(error):
    units = Units()
    rows = units.put(1, 2)
    units.failures = [error("gone"), error("gone")]
    assert rows_of(units.fetch(rows)) == rows
    assert units.asked == [("unit.fetch", 1, rows)] * 3


def test_a_unit_that_is_gone_is_not_called():
    units = Units(there=[1])
    rows = units.put(0, 2)
    units.lies.update(dict.fromkeys(rows, 1))
    assert rows_of(units.fetch(rows)) == rows
    assert units.asked == [("queue.where", 0, rows), ("unit.fetch", 1, rows)]


def test_rows_that_lie_nowhere_are_named():
    units = Units()
    kept, cleared = units.put(0, 2), units.put(0, 1)
    del units.lies[cleared[0]]
    with pytest.raises(StaleHandle, match=f"row {cleared[0]} and 0 others do not exist"):
        units.fetch([*kept, *cleared])
