"""Index of items ready for a task, in the task's order: a claim takes the first and never looks at the others.

``VersionFilter`` says which items a claimer can serve. ``ReadyIndex`` keeps one shelf for each window of versions that
may begin an item. A shelf is a sorted list of runs, each of items that became ready at once and come one after another.
What becomes ready goes to the end nearly always, what is taken leaves at the front, and what is discarded is only
passed over later.

Invariants: an item is on at most one shelf, in the run that its place names; taking an item costs O(shelves), adding
one O(1) where it comes last; the same items give the same choice whatever happened before.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Any, Generic, TypeAlias, TypeVar

from asyncflow.flow.schedule import VersionWindow

T = TypeVar("T", bound=Hashable)
Rank: TypeAlias = tuple[int, ...]
_Run: TypeAlias = tuple[Rank, int, list[Any], "_Shelf"]
"""(order, tick of the first item, the items, of which the last one comes first, where they lie)"""

_SLACK = 64
_BEFORE = itemgetter(0, 1)


@dataclass(frozen=True, slots=True)
class VersionFilter:
    """Versions of the weights under which a claimer can serve items.

    version: step of the weights that it has (None: versions do not matter); accept: further ones that it could load.
    """

    version: int | None = None
    accept: tuple[int, ...] = ()

    def suits(self, window: VersionWindow) -> bool:
        """Return whether the claimer can begin an item of this window as it is."""
        return self.version is None or window.oldest <= self.version <= window.newest

    def accepts(self, window: VersionWindow) -> bool:
        """Return whether the claimer could begin an item of this window, after loading another version if need be."""
        return self.suits(window) or any(window.oldest <= step <= window.newest for step in self.accept)


class _Shelf:
    """runs: sorted, those before ``start`` are empty; count: how many items in them hold; gone: how many do not."""

    __slots__ = ("count", "gone", "runs", "start", "window")

    def __init__(self, window: VersionWindow) -> None:
        self.window = window
        self.runs: list[_Run] = []
        self.start = 0
        self.count = 0
        self.gone = 0

    def insert(self, run: _Run) -> None:
        runs = self.runs
        if not runs or runs[-1][0] <= run[0]:
            runs.append(run)
        else:
            bisect.insort(runs, run, lo=self.start, key=_BEFORE)
        self.count += len(run[2])


class ReadyIndex(Generic[T]):
    """Items that are ready, in order within their window of versions. weight: the sum of theirs."""

    def __init__(self) -> None:
        self._shelves: dict[VersionWindow, _Shelf] = {}
        self._places: dict[T, _Run] = {}
        self._heavy: dict[T, int] = {}
        self._ticks = 0
        self.weight = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, item: T) -> bool:
        return item in self._places

    def __iter__(self) -> Iterator[T]:
        return iter(self._places)

    def count(self, window: VersionWindow) -> int:
        """Return how many items lie on the shelf ``window``."""
        shelf = self._shelves.get(window)
        return shelf.count if shelf is not None else 0

    def fitting(self, fits: Callable[[VersionWindow], bool]) -> int:
        """Return how many items have a window that ``fits``."""
        return sum([shelf.count for window, shelf in self._shelves.items() if fits(window)])

    def add(self, item: T, *, window: VersionWindow, order: Rank, weight: int = 1) -> None:
        """Put ``item`` on its shelf; smaller ``order`` comes first, equal ones as they were added.

        weight: what it adds to ``ReadyIndex.weight``. An item that is there already keeps its place.
        """
        if item in self._places:
            self.weight -= self._heavy.pop(item, 1)
        else:
            self._places[item] = self._insert([item], window, order)
        self.weight += weight
        if weight != 1:
            self._heavy[item] = weight

    def extend(self, items: Sequence[T], *, window: VersionWindow, order: Rank) -> None:
        """Add items that are not there, each of weight 1, all of one window and one order."""
        if not items:
            return
        self._places.update(dict.fromkeys(items, self._insert([*items[::-1]], window, order)))
        self.weight += len(items)

    def _insert(self, items: list[T], window: VersionWindow, order: Rank) -> _Run:
        shelf = self._shelves.get(window)
        if shelf is None:
            self._shelves[window] = shelf = _Shelf(window)
        run = (order, self._ticks, items, shelf)
        self._ticks += len(items)
        shelf.insert(run)
        return run

    def discard(self, item: T) -> None:
        """Take ``item`` out, if it is there."""
        run = self._places.pop(item, None)
        if run is not None:
            self.weight -= self._heavy.pop(item, 1) if self._heavy else 1
            shelf = run[3]
            shelf.count -= 1
            shelf.gone += 1
            self._tidy(shelf)

    def discard_all(self, items: Collection[T]) -> None:
        """Take those of ``items`` out that are there."""
        if not self._places.keys().isdisjoint(items):
            for item in items:
                self.discard(item)

    def head(self, fits: Callable[[VersionWindow], bool]) -> T | None:
        """Return the first item whose window ``fits``; it stays where it is."""
        first: _Run | None = None
        for window, shelf in self._shelves.items():
            if fits(window):
                run = self._first(shelf)
                if first is None or run[:2] < first[:2]:
                    first = run
        return None if first is None else first[2][-1]

    def take(self, fits: Callable[[VersionWindow], bool], most: int) -> list[T]:
        """Take out the first items whose windows ``fits``, at most so many."""
        fitting = [shelf for window, shelf in self._shelves.items() if fits(window)]
        if len(fitting) == 1:
            return self._take(fitting[0], most)
        taken: list[T] = []
        while len(taken) < most and (item := self.head(fits)) is not None:
            self.discard(item)
            taken.append(item)
        return taken

    def _take(self, shelf: _Shelf, most: int) -> list[T]:
        places = self._places
        taken: list[T] = []
        most = min(most, shelf.count)
        while len(taken) < most:
            run = shelf.runs[shelf.start]
            items = run[2]
            last = items[: len(taken) - most - 1 : -1]
            del items[-len(last) :]
            mine = [item for item in last if places.get(item) is run]
            for item in mine:
                del places[item]
            shelf.gone -= len(last) - len(mine)
            taken += mine
            shelf.start += not items
        shelf.count -= len(taken)
        self.weight -= sum([self._heavy.pop(item, 1) for item in taken]) if self._heavy else len(taken)
        self._tidy(shelf)
        return taken

    def each(self, fits: Callable[[VersionWindow], bool]) -> Iterator[T]:
        """Return the items whose windows ``fits`` in order; they stay where they are. Nothing may change meanwhile."""
        shelves = [self._runs(shelf) for window, shelf in self._shelves.items() if fits(window)]
        merged = shelves[0] if len(shelves) == 1 else heapq.merge(*shelves, key=_BEFORE)
        return (item for run in merged for item in self._held(run))

    def in_order(self, window: VersionWindow) -> Iterator[T]:
        """Yield the items of the shelf ``window`` in order; they stay where they are. Nothing may change meanwhile."""
        shelf = self._shelves.get(window)
        if shelf is not None:
            for run in self._runs(shelf):
                yield from self._held(run)

    def _runs(self, shelf: _Shelf) -> Iterator[_Run]:
        self._first(shelf)
        return islice(shelf.runs, shelf.start, None)

    def _held(self, run: _Run) -> Iterator[T]:
        places = self._places
        return (item for item in reversed(run[2]) if places.get(item) is run)

    def _first(self, shelf: _Shelf) -> _Run:
        """Return the run of the first item that holds, and forget those before it."""
        while True:
            run = shelf.runs[shelf.start]
            items = run[2]
            while items:
                if self._places.get(items[-1]) is run:
                    return run
                items.pop()
                shelf.gone -= 1
            shelf.start += 1

    def _tidy(self, shelf: _Shelf) -> None:
        """Forget what is gone when it is more than what is there; each item is so moved O(1) times."""
        if not shelf.count:
            del self._shelves[shelf.window]
        elif shelf.gone > shelf.count + _SLACK:
            for run in shelf.runs:
                run[2][:] = [item for item in run[2] if self._places.get(item) is run]
            shelf.runs = [run for run in shelf.runs if run[2]]
            shelf.start = shelf.gone = 0
        elif shelf.start > len(shelf.runs) // 2 + _SLACK:
            del shelf.runs[: shelf.start]
            shelf.start = 0
