"""How a put is cut, numbered and repeated, without sockets: a verb is only asked what it would do."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.errors import DeadlineExceeded, PeerLost, Refused
from asyncflow.net.frames import Jagged, decode_batch
from asyncflow.queue.client import putting
from asyncflow.queue.client.placement import Placement
from asyncflow.queue.client.putting import Putter
from asyncflow.queue.protocol.moving_calls import Shares
from asyncflow.queue.protocol.unit_calls import Numbers

sys.path.insert(0, str(Path(__file__).parent))
import by_hand


def column(rows):
    return Jagged.from_rows([[row, row] for row in range(rows)], "int64")


def putter_of(units):
    return Putter(placement=Placement(units=units, clock=lambda: 0.0), worker="w", clock=lambda: 0.0)


def put(putter, rows, **options):
    settings = {"tags": None, "group_size": 1, "outputs": {}, "timeout": 5.0, **options}
    return putter.put("p", {"x": column(rows)}, **settings)


def carry_out(verb, answer):
    """Run a verb of a putter whose controller names no shares."""
    return by_hand.carry_out(verb, lambda ask: (Shares({}, 0) if ask.method == "queue.shares" else answer(ask), []))


def values_of(ask):
    frames = [memoryview(bytes(frame)) for frame in ask.frames]
    got = decode_batch(ask.request.header, frames, max_bytes=1 << 30)["x"]
    return [int(got.row(i)[0]) for i in range(len(got))]


def taken(asked):
    return lambda ask: asked.append(ask) or Numbers([100 + i for i in range(ask.request.header.rows)])


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 3), st.integers(1, 5))
def test_all_rows_arrive_once_whole_groups_together_and_numbers_follow_each_other(sizes, group_size, units):
    putter, asked = putter_of(lambda: range(units)), []
    for groups in sizes:
        before = len(asked)
        carry_out(put(putter, groups * group_size, group_size=group_size), taken(asked))
        came = []
        for ask in sorted(asked[before:], key=lambda ask: ask.request.group):
            assert ask.request.header.rows % group_size == 0
            came += values_of(ask)
        assert came == list(range(groups * group_size))
    numbers = sorted(
        number
        for ask in asked
        for number in range(ask.request.group, ask.request.group + ask.request.header.rows // group_size)
    )
    assert numbers == list(range(sum(sizes)))


def test_small_puts_go_to_one_unit_after_another():
    putter, asked = putter_of(lambda: [3, 5, 9]), []
    for _ in range(6):
        carry_out(put(putter, 2), taken(asked))
    homes = [ask.unit for ask in asked]
    assert sorted(homes[:3]) == [3, 5, 9]
    assert homes[3:] == homes[:3]


def test_a_large_put_is_split_and_its_ids_come_in_order(monkeypatch):
    monkeypatch.setattr(putting, "_SPLIT_BYTES", 64)
    putter, asked = putter_of(lambda: [0, 1, 2]), []

    def answer(ask):
        asked.append(ask)
        first = values_of(ask)[0]
        return Numbers([first + i for i in range(ask.request.header.rows)], [first > 0] * ask.request.header.rows)

    numbers = carry_out(put(putter, 12, tags=[{"n": i} for i in range(12)]), answer)
    assert numbers.rows == list(range(12))
    assert numbers.new == [False] * 4 + [True] * 8
    assert sorted(ask.unit for ask in asked) == [0, 1, 2]
    assert [tag["n"] for ask in asked for tag in ask.request.tags] == list(range(12))


def test_no_part_has_more_rows_than_can_be_told_of_at_once(monkeypatch):
    monkeypatch.setattr(putting, "MOST", 10)
    putter, asked = putter_of(lambda: [0]), []
    carry_out(put(putter, 27, group_size=3), taken(asked))
    sizes = [ask.request.header.rows for ask in asked]
    assert max(sizes) <= 10
    assert sorted(value for ask in asked for value in values_of(ask)) == list(range(27))


def test_what_got_no_answer_is_put_again_elsewhere_under_the_same_number():
    putter, asked = putter_of(lambda: [0, 1]), []

    def answer(ask):
        asked.append(ask)
        if len(asked) < 3:
            raise (PeerLost, DeadlineExceeded)[len(asked) - 1]("gone")
        return Numbers([7])

    assert carry_out(put(putter, 1), answer).rows == [7]
    assert len({(ask.request.client, ask.request.group) for ask in asked}) == 1
    assert asked[0].unit == asked[2].unit != asked[1].unit


def test_two_clients_never_share_a_name():
    asked = []
    for _ in range(50):
        carry_out(put(putter_of(lambda: [0]), 3), taken(asked))
    assert len({ask.request.client for ask in asked}) == 50
    assert all(len(ask.request.client) == 16 for ask in asked)


@pytest.mark.parametrize(("rows", "options"), [(0, {}), (3, {"group_size": 2}), (3, {"tags": [{}]})])
def test_what_makes_no_groups_is_refused(rows, options):
    with pytest.raises(Refused, match="make no groups"):
        carry_out(put(putter_of(lambda: [0]), rows, **options), taken([]))
