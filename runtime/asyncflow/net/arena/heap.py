"""Which pages of a heap are free: places only, no memory.

Invariants: a place lies within the heap and overlaps no other; free pages beside each other are one run; the lowest run
that is long enough is taken, so pages that were used before come before those that never were.
"""

from __future__ import annotations

from bisect import bisect


class Heap:
    """The pages from ``first`` up to ``end``. A place is named by its first page."""

    def __init__(self, *, first: int, end: int) -> None:
        self._begins = [first] if first < end else []
        self._ends = [end] if first < end else []
        self._places: dict[int, int] = {}

    def __contains__(self, place: int) -> bool:
        return place in self._places

    def take(self, pages: int) -> int | None:
        """Return a place of so many pages, at least one; None where no run is long enough."""
        for index, begin in enumerate(self._begins):
            left = self._ends[index] - begin - pages
            if left >= 0:
                if left:
                    self._begins[index] += pages
                else:
                    del self._begins[index], self._ends[index]
                self._places[begin] = pages
                return begin
        return None

    def give_back(self, place: int) -> None:
        """Free a place that was taken."""
        end = place + self._places.pop(place)
        index = bisect(self._begins, place)
        joins_next = index < len(self._begins) and self._begins[index] == end
        if index and self._ends[index - 1] == place:
            self._ends[index - 1] = self._ends[index] if joins_next else end
            if joins_next:
                del self._begins[index], self._ends[index]
        elif joins_next:
            self._begins[index] = place
        else:
            self._begins.insert(index, place)
            self._ends.insert(index, end)
