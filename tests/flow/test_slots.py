"""Rows of a slot: those that were offered, each once, within the budget, and groups whole where that is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.flow.slots import SlotRequest, next_slot, weight_of


@dataclass(frozen=True)
class Group:
    serial: int


@dataclass(frozen=True)
class Row:
    group: Group
    sample: int
    tokens: int
    response_tokens: int

    @property
    def weight(self) -> int:
        return max(1, self.tokens + self.response_tokens)


def group_of(serial: int, prompt: int, responses: list[int]) -> list[Row]:
    return [Row(Group(serial), sample, prompt, tokens) for sample, tokens in enumerate(responses)]


GROUPS = st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 9), min_size=1, max_size=5)), max_size=9).map(
    lambda groups: [group_of(serial, *each) for serial, each in enumerate(groups)]
)
REQUESTS = st.builds(SlotRequest, st.integers(1, 3), st.integers(1, 20), groups=st.booleans(), shared=st.booleans())


@settings(max_examples=60, deadline=None)
@given(groups=GROUPS, begun=st.integers(0, 2), asked=REQUESTS, complete=st.booleans(), data=st.data())
def test_a_slot_keeps_the_budget_and_groups_that_stay_whole(
    groups: list[list[Row]], begun: int, asked: SlotRequest, complete: bool, data: st.DataObject
) -> None:
    before = data.draw(st.lists(st.integers(0, 30), min_size=asked.world, max_size=asked.world))
    left, read = [row for rows in groups[:begun] for row in rows], list[list[Row]]()
    ready = (read.append(rows) or rows for rows in groups[begun:])
    slot = next_slot(left, ready, asked, before=before, complete=complete)
    rows = [row for part in slot for row in part]
    assert bool(rows) == bool(groups)
    assert len(set(rows)) == len(rows)
    assert set(rows) <= {row for offered in [left, *read] for row in offered}
    for part in slot:
        assert part == sorted(part, key=lambda row: (row.group.serial, row.sample))
        alone = len({row.group for row in part}) == 1 if asked.groups else len(part) == 1
        assert alone or weight_of(part, shared=asked.shared) <= asked.tokens
        if asked.groups:
            assert all(row in part for given in groups for row in given if {*given} & {*part})
    loads = [weight_of(given, shared=asked.shared) for given in [left, *read]]
    assert len(read) < 2 or sum(loads[:-2]) < 8 * asked.world * asked.tokens, "no more is read than is needed"


def test_rows_of_a_group_share_a_prompt_as_far_as_the_budget_allows() -> None:
    rows = group_of(0, 4, [3, 3, 3])
    asked = SlotRequest(world=1, tokens=10, shared=True)
    assert next_slot([], [rows], asked, before=[0], complete=False) == [rows[:2]]
    assert next_slot([], [], asked, before=[0], complete=True) == []
    assert weight_of(rows, shared=True) == 13
    assert weight_of(rows, shared=False) == 21


def test_only_a_group_that_need_not_stay_whole_is_cut_so_that_ranks_are_even() -> None:
    rows = group_of(0, 4, [10, 10, 10, 10])
    whole = SlotRequest(world=2, tokens=100, groups=True, shared=True)
    assert sorted(map(len, next_slot([], [rows], whole, before=[0, 0], complete=True))) == [0, 4]
    parted = whole._replace(groups=False)
    assert sorted(map(len, next_slot([], [rows], parted, before=[0, 0], complete=True))) == [2, 2]
    assert sorted(map(len, next_slot([], [rows], parted, before=[0, 0], complete=False))) == [0, 4]
