"""Cells in the unit's own memory, where they arrived.

Invariant: a column of a parcel of which less than half lives is copied to where it needs no more, so the memory is
never more than twice that of the cells; otherwise nothing is copied that lies in one piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from asyncflow.net.jagged import Jagged
from asyncflow.queue.backends.base import Backend, Place

_OFFSET = 8
"""Bytes that a row needs besides its values."""


class _Shelf:
    """One column of a parcel, as far as it lives.

    kept: the indices that its rows had in the parcel, None while they are all there.
    """

    __slots__ = ("_alive", "_bytes", "_column", "_kept", "_rows")

    def __init__(self, column: Jagged) -> None:
        self._column = column
        self._kept: npt.NDArray[np.int64] | None = None
        self._alive: npt.NDArray[np.bool_] | None = None
        self._rows = len(column)
        self._bytes = column.values.nbytes

    def run(self, first: int, rows: int) -> tuple[Jagged, int, int]:
        """Give a column, and where in it the rows from index ``first`` of the parcel lie."""
        start = first if self._kept is None else int(np.searchsorted(self._kept, first))
        return self._column, start, start + rows

    def free(self, indices: Sequence[int]) -> bool:
        """Forget rows; True when none is left."""
        self._rows -= len(indices)
        if not self._rows:
            return True
        if self._alive is None:
            self._alive = np.ones(len(self._column), np.bool_)
        dead = np.asarray(indices) if self._kept is None else np.searchsorted(self._kept, indices)
        self._alive[dead] = False
        values = self._column.offsets[dead + 1] - self._column.offsets[dead]
        self._bytes -= int(values.sum()) * self._column.values.itemsize
        if 2 * (self._bytes + _OFFSET * self._rows) < self._column.nbytes:
            rows = np.flatnonzero(self._alive)
            self._column = self._column.take(rows)
            self._kept = rows if self._kept is None else self._kept[rows]
            self._alive = None
        return False

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self._column.nbytes


class MemoryBackend(Backend):
    """Columns of parcels in dicts."""

    immediate = True

    def __init__(self) -> None:
        self._parcels: dict[int, dict[str, _Shelf]] = {}

    async def put(self, parcel: int, columns: Mapping[str, Jagged]) -> None:
        """Keep the columns themselves."""
        self._parcels[parcel] = {name: _Shelf(column) for name, column in columns.items()}

    async def get(self, places: Sequence[Place], columns: Sequence[str]) -> dict[str, Jagged]:
        """Give rows that lie one after another as they lie, others as a copy."""
        runs = _runs(places)
        return {
            name: Jagged.gather([self._parcels[parcel][name].run(first, rows) for parcel, first, rows in runs])
            for name in columns
        }

    async def free(self, places: Sequence[Place], columns: Sequence[str]) -> None:
        """Forget cells."""
        for parcel, of in groupby(sorted(places), key=attrgetter("parcel")):
            indices = [place.row for place in of]
            shelves = self._parcels[parcel]
            for name in columns:
                if shelves[name].free(indices):
                    del shelves[name]
            if not shelves:
                del self._parcels[parcel]

    async def close(self) -> None:
        """Forget all."""
        self._parcels.clear()

    @property
    def nbytes(self) -> int:
        """Bytes in memory, those that nobody needs any more included."""
        return sum(shelf.nbytes for shelves in self._parcels.values() for shelf in shelves.values())


def _runs(places: Sequence[Place]) -> list[tuple[int, int, int]]:
    """Give parcel, first index and number of the rows that lie one after another."""
    runs = []
    parcel, first = places[0]
    after = first
    for place in places:
        if place.parcel != parcel or place.row != after:
            runs.append((parcel, first, after - first))
            parcel, first = place
            after = first
        after += 1
    runs.append((parcel, first, after - first))
    return runs
