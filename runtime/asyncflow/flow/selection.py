"""Order of a task's rows (its selection, by name), and the assignment of a slot's rows to ranks (``balance``).

Replicas of a task that run independently share its rows most evenly if long rows come first (``longest``): the short
rows at the end even out the loads, as in ``balance``. A package adds a selection as an entry point of the group
``asyncflow.selections``.

Invariant: the choice depends on the items alone, not on earlier calls; no selection has a clock or keeps state.
"""

from __future__ import annotations

import bisect
import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from asyncflow.plugins import load_plugin

_SWAPS = 4
"""Most swaps per rank after LPT; rarely reached."""

_CLOSE = 200
"""Loads count as even if they differ by at most 1/200 of the heaviest."""


class ReadyItem(NamedTuple):
    """A row, or a whole group, that is ready for a task.

    step: the optimizer step that it belongs to; serial: the serial of its prompt; sample: its number in the group, 0
    for a group; version: step of the oldest version that generated a token of it; tokens: number of tokens of prompt
    and response, for a group the sum over its rows.
    """

    step: int
    serial: int
    sample: int
    version: int
    tokens: int


class Selection(ABC):
    """The order in which a task takes ready rows."""

    @abstractmethod
    def rank(self, item: ReadyItem) -> tuple[int, ...]:
        """Return the sort key of an item: smaller keys come first, equal keys in the order in which they became ready.

        All keys have the same length. The controller calls this once for each item, so it must be fast and depend on
        its argument alone.
        """


class Fifo(Selection):
    """Oldest step first."""

    def rank(self, item: ReadyItem) -> tuple[int, ...]:
        """Return the step."""
        return (item.step,)


class ByKey(Selection):
    """In the order of the data."""

    def rank(self, item: ReadyItem) -> tuple[int, ...]:
        """Return serial and sample."""
        return (item.serial, item.sample)


class OldestVersion(Selection):
    """Samples of the oldest weights first, so that none becomes too stale behind newer ones."""

    def rank(self, item: ReadyItem) -> tuple[int, ...]:
        """Return version and step."""
        return (item.version, item.step)


class LongestFirst(Selection):
    """Most tokens first, within the oldest step: longest-processing-time scheduling (Graham, 1969)."""

    def rank(self, item: ReadyItem) -> tuple[int, ...]:
        """Return the step and the negative number of tokens."""
        return (item.step, -item.tokens)


SELECTIONS: Final = "asyncflow.selections"
"""Entry points of further selections."""
_KNOWN: Final[Mapping[str, type[Selection]]] = {
    "fifo": Fifo,
    "key": ByKey,
    "oldest": OldestVersion,
    "longest": LongestFirst,
}


def selection_of(name: str, *, where: str) -> Selection:
    """Return the selection of that name. Raises ManifestError, which names ``where``, if there is none."""
    kind = _KNOWN.get(name) or load_plugin(SELECTIONS, name, kind=Selection, where=where, built_in=_KNOWN)
    made: Selection = kind()
    return made


def balance(weights: Sequence[int], *, ranks: int, budget: int, before: Sequence[int] = ()) -> list[list[list[int]]]:
    """Assign items of ``weights`` to slots and ``ranks`` so that all ranks have about the same total weight.

    before: weight that each rank already has. budget: most weight of one rank in one slot; a heavier item has the slot
    to itself. Returns the indices of the items by slot and rank, in ascending order. Heavy items are assigned first, so
    the light ones even out the loads. A rank may have no items in the last slots.
    """
    shares, totals = _shares(weights, list(before) or [0] * ranks)
    _even_out(shares, totals, weights)
    packed = [_slots(share, weights, budget) for share in shares]
    return [
        [sorted(slots[number]) if number < len(slots) else [] for slots in packed]
        for number in range(max(map(len, packed)))
    ]


def _slots(share: Iterable[int], weights: Sequence[int], budget: int) -> list[list[int]]:
    """Put each item, heaviest first, into the first slot that has room for it."""
    slots: list[list[int]] = []
    loads: list[int] = []
    for index in _heaviest_first(share, weights):
        weight = weights[index]
        for place, load in enumerate(loads):
            if load + weight <= budget:
                slots[place].append(index)
                loads[place] += weight
                break
        else:
            slots.append([index])
            loads.append(weight)
    return slots


def _heaviest_first(indices: Iterable[int], weights: Sequence[int]) -> list[int]:
    return sorted(sorted(indices), key=weights.__getitem__, reverse=True)


def _shares(weights: Sequence[int], totals: list[int]) -> tuple[list[list[int]], list[int]]:
    """Assign each item, heaviest first, to the rank with the least weight (LPT). Return the items and weights by rank.

    Changes ``totals``, the weights that the ranks already have.
    """
    shares: list[list[int]] = [[] for _ in totals]
    loads = [(total, rank) for rank, total in enumerate(totals)]
    heapq.heapify(loads)
    for index in _heaviest_first(range(len(weights)), weights):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + weights[index], rank))
        shares[rank].append(index)
        totals[rank] += weights[index]
    return shares, totals


def _even_out(shares: list[list[int]], totals: list[int], weights: Sequence[int]) -> None:
    """Swap items between the heaviest and the lightest rank as long as that brings their weights closer."""
    for _ in range(_SWAPS * len(shares)):
        most = max(range(len(totals)), key=lambda rank: totals[rank])
        least = min(range(len(totals)), key=lambda rank: totals[rank])
        if (totals[most] - totals[least]) * _CLOSE <= totals[most]:
            return
        swap = _best_swap(shares[most], shares[least], totals[most] - totals[least], weights)
        if swap is None:
            return
        heavy, light = swap
        gain = weights[heavy] - weights[light]
        shares[most][shares[most].index(heavy)] = light
        shares[least][shares[least].index(light)] = heavy
        totals[most] -= gain
        totals[least] += gain


def _best_swap(most: list[int], least: list[int], gap: int, weights: Sequence[int]) -> tuple[int, int] | None:
    """Return the pair whose difference is closest to half of ``gap``; None if no swap makes the gap smaller."""
    light = sorted(least, key=lambda index: (weights[index], index))
    sizes = [weights[index] for index in light]
    best: tuple[int, int, int] | None = None
    for index in most:
        place = bisect.bisect_left(sizes, weights[index] - gap / 2)
        for other in light[max(0, place - 1) : place + 1]:
            gain = weights[index] - weights[other]
            miss = abs(gap - 2 * gain)
            if 0 < gain < gap and (best is None or miss < best[0]):
                best = (miss, index, other)
    return None if best is None else best[1:]
