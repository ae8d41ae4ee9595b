"""Which rows come first: the selection of a task, by name, and the assignment of a slot's rows to ranks (``balance``).

Free-running replicas of a task share its rows best when long ones come first (``longest``): what comes last evens out
what is there, as in ``balance``. A package adds a selection as an entry point of the group ``asyncflow.selections``.

Invariant: the same items give the same choice whatever happened before; no selection owns a clock or keeps a state.
"""

from __future__ import annotations

import bisect
import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from asyncflow.plugins import load_plugin

_SWAPS = 4
"""Most swaps for each rank after LPT; hardly ever as many."""

_CLOSE = 200
"""Ranks are even when they differ by less than this part of the heaviest."""


class ReadyItem(NamedTuple):
    """A row, or a whole group, that is ready for a task.

    step: the optimizer step that it belongs to; serial: of its prompt; sample: its number in the group, 0 for a group;
    version: step of the oldest version that made a token of it; tokens: of prompt and response, of a group all
    together.
    """

    step: int
    serial: int
    sample: int
    version: int
    tokens: int


class Selection(ABC):
    """The order in which a task takes what is ready."""

    @abstractmethod
    def rank(self, item: ReadyItem) -> tuple[int, ...]:
        """Return the place of a item: smaller ones come first, equal ones as they became ready.

        All ranks have the same number of entries. Called once for each item, in the controller: it must be quick,
        and a function of its argument alone.
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
        """Return the step, and the tokens downwards."""
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
    """Return the selection of that name. Raises ManifestError, which names ``where``, where there is none."""
    kind: type[Selection] = _KNOWN.get(name) or load_plugin(SELECTIONS, name, kind=Selection, where=where)
    return kind()


def balance(weights: Sequence[int], *, ranks: int, budget: int, before: Sequence[int] = ()) -> list[list[list[int]]]:
    """Deal items of ``weights`` to ``ranks`` so that all end with about the same; give what each does in each slot.

    before: what each rank had already. budget: most weight of one rank in one slot; an item heavier than it goes alone.
    Gives the indices of the items by slot and rank, in ascending order. Heavy ones come first, so what comes last evens
    out what is there; a rank may have nothing in the last slots.
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
    """Return each item, heaviest first, to the rank that has least (LPT)."""
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
    """Swap items between the ranks that have most and least, as long as that brings them closer."""
    for _ in range(_SWAPS * len(shares)):
        most = max(range(len(totals)), key=lambda rank: totals[rank])
        least = min(range(len(totals)), key=lambda rank: totals[rank])
        if (totals[most] - totals[least]) * _CLOSE <= totals[most]:
            return
        swap = _best_swap(shares[most], shares[least], totals[most] - totals[least], weights)
        if swap is None:
            return
        given, taken = swap
        gain = weights[given] - weights[taken]
        shares[most][shares[most].index(given)] = taken
        shares[least][shares[least].index(taken)] = given
        totals[most] -= gain
        totals[least] += gain


def _best_swap(most: list[int], least: list[int], gap: int, weights: Sequence[int]) -> tuple[int, int] | None:
    """Return the pair whose difference comes closest to half of ``gap``; None where no swap makes it smaller."""
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
