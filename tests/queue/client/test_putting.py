"""Tests of how a put is numbered, repeated and given time, without sockets."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.errors import DeadlineExceeded, PeerLost, Refused
from asyncflow.queue import putting
from asyncflow.queue.client import QueueClient
from asyncflow.queue.protocol.unit_calls import RowIds
from asyncflow.queue.putting import time_at_unit
from asyncflow.rpc.columns import Jagged, decode_batch

sys.path.insert(0, str(Path(__file__).parent))
from by_hand import ByHand, carry_out

seconds = st.floats(0.001, 1e5)
sizes = st.integers(0, 1 << 30)


def column(rows):
    return Jagged.from_rows([[row, row] for row in range(rows)], "int64")


class Units:
    """A client that puts, and what it asked the units, which ``answer``."""

    def __init__(self, units, answer=lambda call: RowIds([100 + i for i in range(call.request.header.rows)])):
        self.answer, self.asked = answer, []
        self.client = QueueClient(find=lambda *_: None, units=lambda: units, worker="w")
        self.client.peers.call = ByHand(self.call).call

    def call(self, call):
        self.asked.append(call)
        return self.answer(call), []

    def put(self, rows, **options):
        return carry_out(self.client.put("p", {"x": column(rows)}, timeout=5.0, **options))


def values_of(call):
    frames = [memoryview(bytes(frame)) for frame in call.frames]
    got = decode_batch(call.request.header, frames, max_bytes=1 << 30)["x"]
    return [int(got.row(i)[0]) for i in range(len(got))]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 3), st.integers(1, 5))
def test_a_put_goes_whole_to_one_unit_and_numbers_follow_each_other(sizes, group_size, units):
    made = Units(range(units))
    for groups in sizes:
        made.put(groups * group_size, group_size=group_size)
    assert [values_of(call) for call in made.asked] == [list(range(groups * group_size)) for groups in sizes]
    assert [call.request.group for call in made.asked] == [sum(sizes[:n]) for n in range(len(sizes))]


def test_small_puts_go_to_one_unit_after_another():
    made = Units([3, 5, 9])
    for _ in range(6):
        made.put(2)
    units = [call.peer.number for call in made.asked]
    assert sorted(units[:3]) == [3, 5, 9]
    assert units[3:] == units[:3]


def test_tags_and_ids_come_in_the_order_of_the_rows():
    made = Units([0, 1, 2])
    assert made.put(12, tags=[{"n": i} for i in range(12)]).rows == list(range(100, 112))
    assert [tag["n"] for call in made.asked for tag in call.request.tags] == list(range(12))


@pytest.mark.parametrize("limit", ["MOST_ROWS", "_MOST_BYTES"])
def test_what_is_too_much_for_one_put_is_refused_before_anything_is_sent(monkeypatch, limit):
    monkeypatch.setattr(putting, limit, 10)
    made = Units([0])
    with pytest.raises(Refused, match=r"11 rows of 272 bytes are more than one put takes: .*Put fewer rows at a time"):
        made.put(11)
    assert not made.asked


def test_what_got_no_answer_is_put_again_elsewhere_under_the_same_number():
    def answer(_):
        if len(made.asked) < 3:
            raise (PeerLost, DeadlineExceeded)[len(made.asked) - 1]("gone")
        return RowIds([7])

    made = Units([0, 1], answer)
    assert made.put(1).rows == [7]
    assert len({(call.request.client, call.request.group) for call in made.asked}) == 1
    assert made.asked[0].peer == made.asked[2].peer != made.asked[1].peer


def test_two_clients_never_share_a_name():
    names = []
    for _ in range(50):
        made = Units([0])
        made.put(3)
        names += [call.request.client for call in made.asked]
    assert len(set(names)) == 50
    assert all(len(name) == 16 for name in names)


@pytest.mark.parametrize(
    ("rows", "options", "why"),
    [
        (0, {}, "0 rows make no groups"),
        (3, {"group_size": 2}, "3 rows make no groups"),
        (3, {"tags": [{}]}, "3 rows came with 1 sets of tags"),
    ],
)
def test_what_makes_no_groups_is_refused(rows, options, why):
    with pytest.raises(Refused, match=why):
        Units([0]).put(rows, **options)


@given(seconds, sizes, st.booleans())
def test_the_caller_outlasts_the_unit_and_neither_the_deadline(left_s, nbytes, others):
    room_s, answer_s = time_at_unit(left_s, nbytes=nbytes, others=others)
    assert 0 < room_s < answer_s <= left_s


@given(seconds, sizes)
def test_others_make_it_shorter_and_bytes_longer(left_s, nbytes):
    (_, alone), (_, among) = (time_at_unit(left_s, nbytes=nbytes, others=others) for others in (False, True))
    assert among <= alone
    assert time_at_unit(left_s, nbytes=2 * nbytes, others=True)[1] >= among


def test_a_small_part_leaves_a_unit_that_does_not_answer_long_before_the_deadline():
    assert time_at_unit(60.0, nbytes=1000, others=True)[1] < 5


@pytest.mark.parametrize("keys", [["a"], ["a", "b", "c"], []])
def test_keys_of_another_number_than_rows_are_refused(keys):
    units = Units([0])
    with pytest.raises(Refused, match=f"column x has 2 rows, not {len(keys)}"):
        units.put(2, keys=keys)
    assert units.asked == []
