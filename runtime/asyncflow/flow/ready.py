"""What is ready for a task, in the task's order, so that a claim takes the first items and never looks at the others.

``ReadyIndex`` keeps one shelf for each window of versions that may begin an item. A shelf is a sorted list with a
cursor: what becomes ready goes to its end nearly always, what is taken leaves at the cursor, and what is discarded is
only passed over later.

Invariants: an item is on at most one shelf; taking an item costs O(shelves), adding one O(1) where it comes last; the
same items give the same choice whatever happened before.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import islice
from operator import itemgetter
from typing import Any, Generic, TypeAlias, TypeVar

from asyncflow.flow.schedule import Window

T = TypeVar("T", bound=Hashable)
Rank: TypeAlias = tuple[int, ...]
_SLACK = 64
_BEFORE = itemgetter(0, 1)


class _Shelf:
    """entries: sorted (order, tick, item, shelf, weight), those before ``start`` are gone; count: how many hold."""

    __slots__ = ("count", "entries", "start", "window")

    def __init__(self, window: Window) -> None:
        self.window = window
        self.entries: list[tuple[Any, ...]] = []
        self.start = 0
        self.count = 0

    def insert(self, entry: tuple[Any, ...]) -> None:
        entries = self.entries
        if not entries or entries[-1][:2] < entry[:2]:
            entries.append(entry)
        else:
            bisect.insort(entries, entry, lo=self.start, key=_BEFORE)
        self.count += 1


class ReadyIndex(Generic[T]):
    """Items that are ready, in order within their window of versions. weight: the sum of theirs."""

    def __init__(self) -> None:
        self._shelves: dict[Window, _Shelf] = {}
        self._places: dict[T, tuple[Any, ...]] = {}
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
        shelf = self._shelves.get(window)
        return shelf.count if shelf is not None else 0

    def fitting(self, fits: Callable[[Window], bool]) -> int:
        """Give how many items have a window that ``fits``."""
        return sum(shelf.count for window, shelf in self._shelves.items() if fits(window))

    def add(self, item: T, *, window: Window, order: Rank, weight: int = 1) -> None:
        """Put ``item`` on its shelf; smaller ``order`` comes first, equal ones as they were added.

        weight: what it adds to ``ReadyIndex.weight``. An item that is there already keeps its place.
        """
        place = self._places.get(item)
        if place is not None:
            self.weight += weight - place[4]
            self._places[item] = (*place[:4], weight)
            return
        shelf = self._shelves.get(window)
        if shelf is None:
            self._shelves[window] = shelf = _Shelf(window)
        self._ticks += 1
        self._places[item] = entry = (order, self._ticks, item, shelf, weight)
        self.weight += weight
        shelf.insert(entry)

    def extend(self, items: Iterable[T], *, window: Window, order: Rank) -> None:
        """Add items that are not there, all of weight 1, one window and one order."""
        shelf = self._shelves.get(window)
        if shelf is None:
            self._shelves[window] = shelf = _Shelf(window)
        first = self._ticks + 1
        entries = [(order, tick, item, shelf, 1) for tick, item in enumerate(items, first)]
        if shelf.entries and entries and shelf.entries[-1][:2] > entries[0][:2]:
            for entry in entries:
                shelf.insert(entry)
        else:
            shelf.entries += entries
            shelf.count += len(entries)
        self._places.update((entry[2], entry) for entry in entries)
        self._ticks += len(entries)
        self.weight += len(entries)
        if not shelf.count:
            del self._shelves[window]

    def discard(self, item: T) -> None:
        """Take ``item`` out, if it is there."""
        place = self._places.pop(item, None)
        if place is not None:
            self.weight -= place[4]
            self._left(place[3])

    def head(self, fits: Callable[[Window], bool]) -> T | None:
        """Give the first item whose window ``fits``; it stays where it is."""
        first: tuple[Any, ...] | None = None
        for window, shelf in self._shelves.items():
            if fits(window):
                entry = self._first(shelf)
                if first is None or entry[:2] < first[:2]:
                    first = entry
        return None if first is None else first[2]

    def take(self, fits: Callable[[Window], bool], most: int) -> list[T]:
        """Take out the first items whose windows ``fits``, at most so many."""
        fitting = [shelf for window, shelf in self._shelves.items() if fits(window)]
        taken: list[T] = []
        if len(fitting) > 1:
            while len(taken) < most and (item := self.head(fits)) is not None:
                self.discard(item)
                taken.append(item)
        elif fitting:
            (shelf,) = fitting
            places, entries, at, weight = self._places, shelf.entries, shelf.start, 0
            most = min(most, shelf.count)
            while len(taken) < most:
                entry = entries[at]
                at += 1
                item = entry[2]
                place = places.pop(item, None)
                if place is None:
                    continue
                if place is not entry and place[1] != entry[1]:
                    places[item] = place
                    continue
                weight += place[4]
                taken.append(item)
            self.weight -= weight
            shelf.start = at
            shelf.count -= len(taken)
            self._tidy(shelf)
        return taken

    def each(self, fits: Callable[[Window], bool]) -> Iterator[T]:
        """Give the items whose windows ``fits`` in order; they stay where they are. Nothing may change meanwhile."""
        shelves = [self._entries(shelf) for window, shelf in self._shelves.items() if fits(window)]
        merged = shelves[0] if len(shelves) == 1 else heapq.merge(*shelves, key=_BEFORE)
        return (entry[2] for entry in merged)

    def _entries(self, shelf: _Shelf) -> Iterator[tuple[Any, ...]]:
        self._first(shelf)
        return (entry for entry in islice(shelf.entries, shelf.start, None) if self._holds(entry))

    def in_order(self, window: Window) -> Iterator[T]:
        """Give the items of the shelf ``window`` in order; they stay where they are. Nothing may change meanwhile."""
        shelf = self._shelves.get(window)
        if shelf is not None:
            yield from (entry[2] for entry in self._entries(shelf))

    def _first(self, shelf: _Shelf) -> tuple[Any, ...]:
        entries, start = shelf.entries, shelf.start
        while not self._holds(entries[start]):
            start += 1
        shelf.start = start
        return entries[start]

    def _holds(self, entry: tuple[Any, ...]) -> bool:
        place = self._places.get(entry[2])
        return place is not None and bool(place[1] == entry[1])

    def _left(self, shelf: _Shelf) -> None:
        shelf.count -= 1
        self._tidy(shelf)

    def _tidy(self, shelf: _Shelf) -> None:
        """Forget what is gone when it is more than what is there; each entry is so moved O(1) times."""
        if not shelf.count:
            del self._shelves[shelf.window]
        elif len(shelf.entries) > 2 * shelf.count + _SLACK:
            shelf.entries = [entry for entry in shelf.entries[shelf.start :] if self._holds(entry)]
            shelf.start = 0
