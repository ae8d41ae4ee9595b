"""Index of the items that are ready for a task, in the task's order: a claim takes the first items without a scan.

``VersionFilter`` selects the items that a claimer can serve. ``ReadyIndex`` keeps one shelf for each window of versions
that may start an item. A shelf is a sorted list of runs; a run is a list of consecutive items that became ready at the
same time. New items nearly always go to the end, items are taken from the front, and a discarded item stays in its run
until it is skipped or removed.

Invariants: an item is on at most one shelf, in the run that ``_places`` names; taking an item costs O(shelves), adding
one at the end costs O(1); the choice depends on the present items alone, not on earlier calls.
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
"""(order, tick of the first item, the items in reverse order, their shelf)"""

_SLACK = 64
_BEFORE = itemgetter(0, 1)


@dataclass(frozen=True, slots=True)
class VersionFilter:
    """Versions of the weights under which a claimer can serve items.

    version: step of its loaded weights (None: any version); accept: steps of further versions that it could load.
    """

    version: int | None = None
    accept: tuple[int, ...] = ()

    def suits(self, window: VersionWindow) -> bool:
        """Return whether the claimer can start an item of this window with the loaded weights."""
        return self.version is None or window.oldest <= self.version <= window.newest

    def accepts(self, window: VersionWindow) -> bool:
        """Return whether the claimer can start an item of this window, if necessary after loading another version."""
        return self.suits(window) or any(window.oldest <= step <= window.newest for step in self.accept)


class _Shelf:
    """Items of one window. runs: sorted, those before ``start`` are empty; count: number of valid items in the runs;
    stale: number of discarded items still in the runs.
    """

    __slots__ = ("count", "runs", "stale", "start", "window")

    def __init__(self, window: VersionWindow) -> None:
        self.window = window
        self.runs: list[_Run] = []
        self.start = 0
        self.count = 0
        self.stale = 0

    def insert(self, run: _Run) -> None:
        runs = self.runs
        if not runs or runs[-1][0] <= run[0]:
            runs.append(run)
        else:
            bisect.insort(runs, run, lo=self.start, key=_BEFORE)
        self.count += len(run[2])


class ReadyIndex(Generic[T]):
    """The ready items, in order within their window of versions. weight: total weight of the items."""

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
        """Return the number of items with the window ``window``."""
        shelf = self._shelves.get(window)
        return shelf.count if shelf is not None else 0

    def fitting(self, fits: Callable[[VersionWindow], bool]) -> int:
        """Return the number of items whose window ``fits``."""
        return sum([shelf.count for window, shelf in self._shelves.items() if fits(window)])

    def add(self, item: T, *, window: VersionWindow, order: Rank, weight: int = 1) -> None:
        """Add ``item``. Items with a smaller ``order`` come first, equal ones in the order in which they were added.

        weight: its part of ``ReadyIndex.weight``. An item that is already present keeps its place.
        """
        if item in self._places:
            self.weight -= self._heavy.pop(item, 1)
        else:
            self._places[item] = self._insert([item], window, order)
        self.weight += weight
        if weight != 1:
            self._heavy[item] = weight

    def extend(self, items: Sequence[T], *, window: VersionWindow, order: Rank) -> None:
        """Add items that are not present, each of weight 1, all of one window and one order."""
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
        """Remove ``item`` if it is present."""
        run = self._places.pop(item, None)
        if run is not None:
            self.weight -= self._heavy.pop(item, 1) if self._heavy else 1
            shelf = run[3]
            shelf.count -= 1
            shelf.stale += 1
            self._tidy(shelf)

    def discard_all(self, items: Collection[T]) -> None:
        """Remove each of ``items`` that is present."""
        if not self._places.keys().isdisjoint(items):
            for item in items:
                self.discard(item)

    def head(self, fits: Callable[[VersionWindow], bool]) -> T | None:
        """Return the first item whose window ``fits``, without removing it."""
        first: _Run | None = None
        for window, shelf in self._shelves.items():
            if fits(window):
                run = self._first(shelf)
                if first is None or run[:2] < first[:2]:
                    first = run
        return None if first is None else first[2][-1]

    def take(self, fits: Callable[[VersionWindow], bool], most: int) -> list[T]:
        """Remove and return the first items whose window ``fits``, at most ``most``."""
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
            valid = [item for item in last if places.get(item) is run]
            for item in valid:
                del places[item]
            shelf.stale -= len(last) - len(valid)
            taken += valid
            shelf.start += not items
        shelf.count -= len(taken)
        self.weight -= sum([self._heavy.pop(item, 1) for item in taken]) if self._heavy else len(taken)
        self._tidy(shelf)
        return taken

    def each(self, fits: Callable[[VersionWindow], bool]) -> Iterator[T]:
        """Return the items whose window ``fits``, in order; none is removed. The index must not change meanwhile."""
        shelves = [self._runs(shelf) for window, shelf in self._shelves.items() if fits(window)]
        merged = shelves[0] if len(shelves) == 1 else heapq.merge(*shelves, key=_BEFORE)
        return (item for run in merged for item in self._valid_items(run))

    def in_order(self, window: VersionWindow) -> Iterator[T]:
        """Yield the items of ``window`` in order; none is removed. The index must not change meanwhile."""
        shelf = self._shelves.get(window)
        if shelf is not None:
            for run in self._runs(shelf):
                yield from self._valid_items(run)

    def _runs(self, shelf: _Shelf) -> Iterator[_Run]:
        self._first(shelf)
        return islice(shelf.runs, shelf.start, None)

    def _valid_items(self, run: _Run) -> Iterator[T]:
        places = self._places
        return (item for item in reversed(run[2]) if places.get(item) is run)

    def _first(self, shelf: _Shelf) -> _Run:
        """Return the run of the first valid item, and remove the stale items before it."""
        while True:
            run = shelf.runs[shelf.start]
            items = run[2]
            while items:
                if self._places.get(items[-1]) is run:
                    return run
                items.pop()
                shelf.stale -= 1
            shelf.start += 1

    def _tidy(self, shelf: _Shelf) -> None:
        """Remove the stale items if they outnumber the valid ones; each item is so moved O(1) times on average."""
        if not shelf.count:
            del self._shelves[shelf.window]
        elif shelf.stale > shelf.count + _SLACK:
            for run in shelf.runs:
                run[2][:] = [item for item in run[2] if self._places.get(item) is run]
            shelf.runs = [run for run in shelf.runs if run[2]]
            shelf.start = shelf.stale = 0
        elif shelf.start > len(shelf.runs) // 2 + _SLACK:
            del shelf.runs[: shelf.start]
            shelf.start = 0
