"""Which ready rows a claim gets, and which rank gets which rows of a slot.

``ReadyIndex`` keeps what is ready on one shelf for each window of versions that may begin it, each in the task's order,
so that a claim looks at the heads of the shelves and never at all rows. ``Appetite`` is what a claimer can serve.
``balance`` deals rows to ranks, heaviest first.

Invariants: an item is on at most one shelf; a claim costs O(shelves + log items) an item; the same items give the same
choice whatever happened before.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from asyncflow.flow.schedule import Window

T = TypeVar("T", bound=Hashable)
Rank: TypeAlias = tuple[int, ...]

ANY = Window(0, 0)
"""The shelf of items that any version may begin."""


@dataclass(frozen=True, slots=True)
class Appetite:
    """What a claimer can serve.

    version: step of the weights that it has (None: versions do not matter); accept: further ones that it could load.
    """

    version: int | None = None
    accept: tuple[int, ...] = ()

    def suits(self, window: Window) -> bool:
        """Tell whether the claimer can begin such an item as it is."""
        return self.version is None or window.oldest <= self.version <= window.newest

    def accepts(self, window: Window) -> bool:
        """Tell whether the claimer could begin such an item, after loading another version if need be."""
        return self.suits(window) or any(window.oldest <= step <= window.newest for step in self.accept)


class ReadyIndex(Generic[T]):
    """Items that are ready, in order within their window of versions."""

    def __init__(self) -> None:
        self._shelves: dict[Window, list[tuple[Rank, int, T]]] = {}
        self._places: dict[T, tuple[Window, int, int]] = {}
        self._counts: dict[Window, int] = {}
        self._ticks = 0
        self.weight = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, item: T) -> bool:
        return item in self._places

    def __iter__(self) -> Iterator[T]:
        return iter(self._places)

    def count(self, window: Window) -> int:
        """Give how many items lie on the shelf ``window``."""
        return self._counts.get(window, 0)

    def add(self, item: T, *, window: Window, order: Rank, weight: int = 1) -> None:
        """Put ``item`` on its shelf; smaller ``order`` comes first, equal ones as they were added.

        weight: what it adds to ``ReadyIndex.weight``. An item that is there already keeps its place.
        """
        place = self._places.get(item)
        if place is not None:
            self.weight += weight - place[2]
            self._places[item] = (place[0], place[1], weight)
            return
        self._ticks += 1
        self._places[item] = (window, self._ticks, weight)
        self._counts[window] = self.count(window) + 1
        self.weight += weight
        heapq.heappush(self._shelves.setdefault(window, []), (order, self._ticks, item))

    def discard(self, item: T) -> None:
        """Take ``item`` out, if it is there."""
        place = self._places.pop(item, None)
        if place is None:
            return
        window, _, weight = place
        self.weight -= weight
        self._counts[window] -= 1
        shelf = self._shelves[window]
        if not self._counts[window]:
            del self._shelves[window], self._counts[window]
        elif len(shelf) > 2 * self._counts[window] + 64:
            self._shelves[window] = [entry for entry in shelf if self._holds(entry)]
            heapq.heapify(self._shelves[window])

    def head(self, fits: Callable[[Window], bool]) -> T | None:
        """Give the first item whose window ``fits``; it stays where it is."""
        first: tuple[Rank, int, T] | None = None
        for window, shelf in self._shelves.items():
            if not fits(window):
                continue
            while not self._holds(shelf[0]):
                heapq.heappop(shelf)
            if first is None or shelf[0][:2] < first[:2]:
                first = shelf[0]
        return None if first is None else first[2]

    def _holds(self, entry: tuple[Rank, int, T]) -> bool:
        place = self._places.get(entry[2])
        return place is not None and place[1] == entry[1]


def balance(weights: Sequence[int], *, ranks: int, budget: int) -> tuple[list[list[int]], list[int]]:
    """Deal items of ``weights`` to ``ranks``, heaviest first, each to the rank that has least (LPT).

    budget: most weight of one rank; an item heavier than it goes alone to a rank that has nothing yet.
    Gives the indices of each rank and those left over, each in ascending order. At least one item is dealt.
    """
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    left: list[int] = []
    loads = [(0, rank) for rank in range(ranks)]
    for index in sorted(range(len(weights)), key=lambda index: (-weights[index], index)):
        load, rank = loads[0]
        if load and load + weights[index] > budget:
            left.append(index)
            continue
        heapq.heapreplace(loads, (load + weights[index], rank))
        dealt[rank].append(index)
    return [sorted(indices) for indices in dealt], sorted(left)
