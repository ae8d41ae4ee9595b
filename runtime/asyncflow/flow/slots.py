"""Which samples make the trainer's next slot: one micro-batch for each rank.

Ranks get about the same weight over the whole step (``flow.selection.balance``); a group goes to one rank in one slot
where that is asked for, and where its rows share their prompt's tokens as many of them as the budget allows.

Invariants: a rank's part of a slot is within the budget unless it is a single row, or a single group where groups stay
whole; the same rows in the same order give the same slot.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from asyncflow.flow.selection import balance

SLOT_TOKENS: Final = 4096
"""Most tokens of a rank's part of a slot, where neither the manifest nor a device's memory decides it."""
_AHEAD = 8
"""Slots that are dealt together, so that the ranks come out even."""
_BY_KEY: Final = attrgetter("group.serial", "sample")
_EVEN = 1.03
"""Ranks are even when the heaviest has at most this much of the mean; beyond, groups that may be cut are cut."""
_MOST_CUTS = 2
"""Most such cuts for each rank."""


class TrainedRow(Protocol):
    """A sample as it is dealt; also its group's ``serial`` and its own number ``sample`` are read, for the order."""

    @property
    def group(self) -> Any:
        """The group, a hashable that has a ``serial``."""

    @property
    def tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def response_tokens(self) -> int:
        """Tokens of the response."""

    @property
    def weight(self) -> int:
        """Tokens of both, at least 1."""


R = TypeVar("R", bound=TrainedRow)


class SlotRequest(NamedTuple):
    """The request for which slots are dealt.

    tokens: most weight of one rank's part of a slot; groups: whether they stay whole; shared: whether the rows of a
    group that are in one slot share the tokens of their prompt.
    """

    world: int
    tokens: int
    groups: bool = False
    shared: bool = False


def weight_of(rows: Sequence[TrainedRow], *, shared: bool) -> int:
    """Return the tokens of rows that one rank has in one slot, at least 1 for each row."""
    if not shared:
        return sum([row.weight for row in rows])
    prompts: dict[Hashable, int] = {}
    for row in rows:
        prompts[row.group] = max(row.tokens, prompts.get(row.group, 0))
    return max(len(rows), sum(prompts.values()) + sum([row.response_tokens for row in rows]))


def next_slot(
    left: Sequence[R], ready: Iterable[Sequence[R]], asked: SlotRequest, *, before: Sequence[int], complete: bool
) -> list[list[R]]:
    """Return the rows of each rank in the next slot, by key; nothing where there are none.

    left: rows of groups that slots before began; ready: the rows of each further group, in the order in which they may
    be taken, read only as far as needed; before: what each rank has had of the step; complete: whether all groups of
    the step are among these.
    """
    by_group: dict[Hashable, list[R]] = {}
    for row in left:
        by_group.setdefault(row.group, []).append(row)
    parts = [part for rows in by_group.values() for part in _parts(rows, asked)]
    load = weight_of(left, shared=asked.shared)
    for rows in ready:
        if load >= _AHEAD * asked.world * asked.tokens:
            complete = False
            break
        parts += _parts(rows, asked)
        load += weight_of(rows, shared=asked.shared)
    if not parts:
        return []
    slot = _deal(parts, asked, before=before, cut=complete)[0]
    return [sorted([row for part in given for row in part], key=_BY_KEY) for given in slot]


def _parts(rows: Sequence[R], asked: SlotRequest) -> list[Sequence[R]]:
    """Return rows of one group as they are to be dealt: all together, each alone, or as many as fit into a slot."""
    if asked.groups:
        return [rows]
    if not asked.shared:
        return [[row] for row in rows]
    parts: list[list[R]] = []
    load = 0
    for row in rows:
        if not parts or load + row.response_tokens > asked.tokens:
            parts.append([])
            load = row.tokens
        parts[-1].append(row)
        load += row.response_tokens
    return [*parts]


def _deal(
    parts: list[Sequence[R]], asked: SlotRequest, *, before: Sequence[int], cut: bool
) -> list[list[list[Sequence[R]]]]:
    """Deal parts to slots and ranks.

    cut: groups that may be cut are, as long as ranks are uneven and it makes the heaviest lighter.
    """
    cuts = _MOST_CUTS * asked.world if cut and asked.shared and not asked.groups else 0
    best: list[list[list[Sequence[R]]]] = []
    lightest = 0
    for left in range(cuts, -1, -1):
        weights = [weight_of(part, shared=asked.shared) for part in parts]
        dealt = balance(weights, ranks=asked.world, budget=asked.tokens, before=before)
        loads = [had + sum(weights[i] for slot in dealt for i in slot[rank]) for rank, had in enumerate(before)]
        most, mean = max(loads), sum(loads) / asked.world
        if best and most >= lightest:
            break
        best = [[[parts[i] for i in indices] for indices in slot] for slot in dealt]
        lightest = most
        heaviest = loads.index(most)
        own = [i for slot in dealt for i in slot[heaviest] if len(parts[i]) > 1]
        if not left or most <= _EVEN * mean or not own:
            break
        parts = _cut(parts, max(own, key=weights.__getitem__), surplus=most - mean)
    return best


def _cut(parts: Sequence[Sequence[R]], index: int, *, surplus: float) -> list[Sequence[R]]:
    """Return the parts with one of them cut in two, the second of about ``surplus`` tokens beside the shared ones."""
    rows, load = list(parts[index]), 0
    split = len(rows)
    while split > 1 and (split == len(rows) or load + rows[split - 1].response_tokens / 2 <= surplus):
        split -= 1
        load += rows[split].response_tokens
    return [*parts[:index], rows[:split], rows[split:], *parts[index + 1 :]]
