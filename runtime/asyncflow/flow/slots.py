"""Choice of the samples of the trainer's next slot: one micro-batch for each rank.

Ranks get about the same weight over the whole step (``flow.selection.balance``). If the request keeps groups whole,
each group goes to one rank in one slot. If the rows of a group share the tokens of their prompt, as many of them stay
together as the budget allows.

Invariants: a rank's part of a slot is within the budget unless it is a single row, or a single group that must stay
whole; the same rows in the same order produce the same slot.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from asyncflow.flow.selection import balance

SLOT_TOKENS: Final = 4096
"""Most tokens of a rank's part of a slot, if neither the manifest nor a device's memory determines it."""
_LOOKAHEAD = 8
"""Slots that are assigned together, so that the loads of the ranks are even."""
_BY_KEY: Final = attrgetter("group.serial", "sample")
_EVEN = 1.03
"""Ratio of the heaviest rank to the mean up to which loads count as even; above it, groups are split if allowed."""
_MOST_CUTS = 2
"""Most such splits per rank."""


class TrainedRow(Protocol):
    """A sample to be assigned to a slot. The order also depends on its group's ``serial`` and its own ``sample``."""

    @property
    def group(self) -> Any:
        """The group: a hashable object that has a ``serial``."""

    @property
    def tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def response_tokens(self) -> int:
        """Tokens of the response."""

    @property
    def weight(self) -> int:
        """Tokens of prompt and response, at least 1."""


R = TypeVar("R", bound=TrainedRow)


class SlotRequest(NamedTuple):
    """The request for a slot.

    world: number of ranks; tokens: most weight of one rank's part of a slot; groups: whether groups stay whole; shared:
    whether the rows of a group that are in one slot share the tokens of their prompt.
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
    left: Sequence[R], ready: Iterable[Sequence[R]], request: SlotRequest, *, before: Sequence[int], complete: bool
) -> list[list[R]]:
    """Return the rows of each rank in the next slot, sorted by key; empty if there are no rows.

    left: remaining rows of groups that are partly in earlier slots; ready: the rows of each further group, in the order
    in which they may be taken, read only as far as needed; before: weight that each rank already has in this step;
    complete: whether ``left`` and ``ready`` contain all remaining groups of the step.
    """
    by_group: dict[Hashable, list[R]] = {}
    for row in left:
        by_group.setdefault(row.group, []).append(row)
    parts = [part for rows in by_group.values() for part in _parts(rows, request)]
    load = weight_of(left, shared=request.shared)
    for rows in ready:
        if load >= _LOOKAHEAD * request.world * request.tokens:
            complete = False
            break
        parts += _parts(rows, request)
        load += weight_of(rows, shared=request.shared)
    if not parts:
        return []
    slot = _assign(parts, request, before=before, cut=complete)[0]
    return [sorted([row for part in assigned for row in part], key=_BY_KEY) for assigned in slot]


def _parts(rows: Sequence[R], request: SlotRequest) -> list[Sequence[R]]:
    """Return the parts of one group to assign as units: all rows, single rows, or as many rows as fit into a slot."""
    if request.groups:
        return [rows]
    if not request.shared:
        return [[row] for row in rows]
    parts: list[list[R]] = []
    load = 0
    for row in rows:
        if not parts or load + row.response_tokens > request.tokens:
            parts.append([])
            load = row.tokens
        parts[-1].append(row)
        load += row.response_tokens
    return [*parts]


def _assign(
    parts: list[Sequence[R]], request: SlotRequest, *, before: Sequence[int], cut: bool
) -> list[list[list[Sequence[R]]]]:
    """Assign parts to slots and ranks.

    cut: whether to split shared groups as long as the ranks are uneven and a split makes the heaviest rank lighter.
    """
    cuts = _MOST_CUTS * request.world if cut and request.shared and not request.groups else 0
    best: list[list[list[Sequence[R]]]] = []
    lightest = 0
    for left in range(cuts, -1, -1):
        weights = [weight_of(part, shared=request.shared) for part in parts]
        slots = balance(weights, ranks=request.world, budget=request.tokens, before=before)
        loads = [load + sum(weights[i] for slot in slots for i in slot[rank]) for rank, load in enumerate(before)]
        most, mean = max(loads), sum(loads) / request.world
        if best and most >= lightest:
            break
        best = [[[parts[i] for i in indices] for indices in slot] for slot in slots]
        lightest = most
        heaviest = loads.index(most)
        divisible = [i for slot in slots for i in slot[heaviest] if len(parts[i]) > 1]
        if not left or most <= _EVEN * mean or not divisible:
            break
        parts = _cut(parts, max(divisible, key=weights.__getitem__), surplus=most - mean)
    return best


def _cut(parts: Sequence[Sequence[R]], index: int, *, surplus: float) -> list[Sequence[R]]:
    """Return the parts with one of them split in two; the second has about ``surplus`` tokens without its prompt."""
    rows, load = list(parts[index]), 0
    split = len(rows)
    while split > 1 and (split == len(rows) or load + rows[split - 1].response_tokens / 2 <= surplus):
        split -= 1
        load += rows[split].response_tokens
    return [*parts[:index], rows[:split], rows[split:], *parts[index + 1 :]]
