"""How new rows are spread over units, whatever comes: a pure account, with the controller's counts played by hand."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.errors import PeerLost
from asyncflow.queue.protocol.calls import Shares
from asyncflow.queue.putting import Placement

sys.path.insert(0, str(Path(__file__).parent))
from by_hand import ByHand, carry_out


class Counts:
    """What the controller counts, and the clients that ask it when they begin."""

    def __init__(self, units):
        self.units = list(units)
        self.given = dict.fromkeys(self.units, 0)
        self.turn = 0

    def client(self):
        placement = Placement(units=lambda: self.units)
        carry_out(placement.begin(ByHand(lambda _: (Shares(dict(self.given), self.turn), []))))
        self.turn += 1
        return placement

    def put(self, placement, rows):
        self.given[placement.choose(rows)] += rows

    def join(self, unit):
        self.given[unit] = min(self.given.values())
        self.units.append(unit)


@given(st.integers(1, 6), st.lists(st.lists(st.integers(1, 64), min_size=1, max_size=5), min_size=1, max_size=60))
def test_many_clients_with_few_puts_each_are_spread_as_one_with_many(units, clients):
    counts = Counts(range(units))
    largest = max(max(sizes) for sizes in clients)
    for sizes in clients:
        placement = counts.client()
        for rows in sizes:
            counts.put(placement, rows)
        assert max(counts.given.values()) - min(counts.given.values()) <= largest


@given(st.integers(2, 5), st.lists(st.integers(0, 3), min_size=400, max_size=400), st.integers(1, 4))
def test_clients_that_put_at_the_same_time_stay_within_five_percent(units, order, clients):
    counts = Counts(range(units))
    placements = [counts.client() for _ in range(clients)]
    sizes = (8, 1, 4, 8)
    for number, who in enumerate(order):
        counts.put(placements[who % clients], sizes[(number + who) % 4])
    mean = sum(counts.given.values()) / units
    allowed = max(0.05 * mean, 8 * clients)
    assert all(abs(given - mean) <= allowed for given in counts.given.values())


@pytest.mark.parametrize("group_size", [1, 7, 16])
def test_serials_and_sizes_that_follow_a_pattern_do_not_matter(group_size):
    counts = Counts([0, 1, 2, 4])
    placement = counts.client()
    for number in range(4000):
        counts.put(placement, group_size if number % 2 else 31)
    mean = sum(counts.given.values()) / 4
    assert all(abs(given - mean) <= 0.05 * mean for given in counts.given.values())


@given(st.lists(st.integers(1, 8), min_size=50, max_size=200))
def test_a_unit_that_comes_gets_its_share_from_then_on(sizes):
    counts = Counts([0, 1])
    placement = counts.client()
    for rows in sizes:
        counts.put(placement, rows)
    before = dict(counts.given)
    counts.join(2)
    for rows in sizes:
        counts.put(placement, rows)
    gained = [counts.given[unit] - before.get(unit, min(before.values())) for unit in (0, 1, 2)]
    assert max(gained) - min(gained) <= 16


def test_what_was_tried_counts_and_is_not_tried_again_while_there_are_others():
    placement = Placement(units=lambda: [0, 1, 2])
    first = placement.choose(4)
    second = placement.choose(4, but={first})
    assert placement.choose(4, but={first, second}) not in (first, second)
    assert placement.choose(1, but={0, 1, 2}) in (0, 1, 2)


def test_without_units_nothing_is_chosen():
    with pytest.raises(PeerLost, match="no storage unit"):
        Placement(units=list).choose(1)
