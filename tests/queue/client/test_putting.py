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
def test_a_put_goes_whole_to_one_unit_and_numbers_follow_each_other(sizes, group_size, units):
    putter, asked = putter_of(lambda: range(units)), []
    for groups in sizes:
        carry_out(put(putter, groups * group_size, group_size=group_size), taken(asked))
    assert [values_of(ask) for ask in asked] == [list(range(groups * group_size)) for groups in sizes]
    assert [ask.request.group for ask in asked] == [sum(sizes[:n]) for n in range(len(sizes))]


def test_small_puts_go_to_one_unit_after_another():
    putter, asked = putter_of(lambda: [3, 5, 9]), []
    for _ in range(6):
        carry_out(put(putter, 2), taken(asked))
    homes = [ask.unit for ask in asked]
    assert sorted(homes[:3]) == [3, 5, 9]
    assert homes[3:] == homes[:3]


def test_tags_and_ids_come_in_the_order_of_the_rows():
    asked = []
    numbers = carry_out(put(putter_of(lambda: [0, 1, 2]), 12, tags=[{"n": i} for i in range(12)]), taken(asked))
    assert numbers.rows == list(range(100, 112))
    assert [tag["n"] for ask in asked for tag in ask.request.tags] == list(range(12))


@pytest.mark.parametrize("limit", ["MOST", "_MOST_BYTES"])
def test_what_is_too_much_for_one_put_is_refused_before_anything_is_sent(monkeypatch, limit):
    monkeypatch.setattr(putting, limit, 10)
    asked = []
    with pytest.raises(Refused, match=r"11 rows of 272 bytes are more than one put takes: .*Put fewer rows at a time"):
        carry_out(put(putter_of(lambda: [0]), 11), taken(asked))
    assert not asked


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
