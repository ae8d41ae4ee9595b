"""Tests of how new rows are spread over units, whatever comes: a pure account."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.errors import PeerLost
from asyncflow.queue.putting import Placement


class Counts:
    """The rows that units were given, by all clients together."""

    def __init__(self, units):
        self.units = list(units)
        self.given = dict.fromkeys(self.units, 0)

    def client(self, name="client"):
        return Placement(units=lambda: self.units, client=name)

    def put(self, placement, rows):
        self.given[placement.choose(rows)] += rows

    def join(self, unit):
        self.given[unit] = min(self.given.values())
        self.units.append(unit)


@given(st.integers(1, 6), st.lists(st.integers(1, 64), min_size=1, max_size=200), st.text(max_size=5))
def test_two_units_differ_by_no_more_than_the_largest_put_of_a_client(units, sizes, name):
    counts = Counts(range(units))
    placement = counts.client(name)
    for rows in sizes:
        counts.put(placement, rows)
        assert max(counts.given.values()) - min(counts.given.values()) <= max(sizes)


def test_clients_that_put_little_do_not_all_begin_with_the_same_unit():
    counts = Counts(range(4))
    for number in range(1000):
        counts.put(counts.client(f"client-{number}"), 1)
    assert all(200 <= given <= 300 for given in counts.given.values())


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
    placement = Placement(units=lambda: [0, 1, 2], client="me")
    first = placement.choose(4)
    second = placement.choose(4, but={first})
    assert placement.choose(4, but={first, second}) not in (first, second)
    assert placement.choose(1, but={0, 1, 2}) in (0, 1, 2)


def test_without_units_nothing_is_chosen():
    with pytest.raises(PeerLost, match="no storage unit"):
        Placement(units=list, client="me").choose(1)
