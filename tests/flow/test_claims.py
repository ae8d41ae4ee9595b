"""Tests of how much an instance claims, and which groups it gets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncflow.flow.claims import claims_more, rows_at_once, whole_groups


def test_a_quarter_of_the_slots_is_asked_for_and_nothing_beyond_four_times_the_slots() -> None:
    assert [rows_at_once(wanted, slots=16) for wanted in (1, 4, 30)] == [1, 4, 4]
    assert rows_at_once(5, slots=2) == 1
    assert [claims_more(backlog=backlog, slots=4) for backlog in (0, 16, 17)] == [True, True, False]


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 20))
def test_groups_are_given_whole_and_in_order(sizes: list[int], most: int) -> None:
    ready = [[number] * size for number, size in enumerate(sizes)]
    offered = iter(ready)
    taken = whole_groups(offered, most=most)
    count = sum(map(len, taken))
    assert taken == ready[: len(taken)]
    assert bool(taken) == bool(ready)
    assert count <= most or len(taken) == 1
    assert len(taken) == len(ready) or count + len(ready[len(taken)]) > most
    assert len(list(offered)) >= len(ready) - len(taken) - (count < most), "no more is read than is needed"
