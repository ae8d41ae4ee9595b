"""Cells in the unit's own memory, where they arrived.

Invariant: a column of a parcel of which less than half lives is copied to where it needs no more, so the memory is
never more than twice that of the cells; otherwise nothing is copied that lies in one piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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

    def free(self, first: int, rows: int) -> bool:
        """Forget rows; True when none is left."""
        self._rows -= rows
        if not self._rows:
            return True
        column, start, stop = self.run(first, rows)
        if self._alive is None:
            self._alive = np.ones(len(column), np.bool_)
        self._alive[start:stop] = False
        self._bytes -= int(column.offsets[stop] - column.offsets[start]) * column.values.itemsize
        if 2 * (self._bytes + _OFFSET * self._rows) < column.nbytes:
            left = np.flatnonzero(self._alive)
            self._column = column.take(left)
            self._kept = left if self._kept is None else self._kept[left]
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
        if len(places) == 1:
            ((parcel, first, rows),) = places
            shelves = self._parcels[parcel]
            return {name: Jagged.cut(*shelves[name].run(first, rows)) for name in columns}
        runs = [(self._parcels[parcel], first, rows) for parcel, first, rows in _joined(places)]
        return {name: Jagged.gather([of[name].run(first, rows) for of, first, rows in runs]) for name in columns}

    async def free(self, places: Sequence[Place], columns: Sequence[str]) -> None:
        """Forget cells."""
        for parcel, first, rows in _joined(places):
            shelves = self._parcels[parcel]
            for name in columns:
                if shelves[name].free(first, rows):
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


def _joined(places: Sequence[Place]) -> Sequence[Place]:
    """Give the same rows, those that lie one after another as one place."""
    if len(places) < 2:
        return places
    joined = []
    parcel, first, rows = places[0]
    for place in places[1:]:
        if place.parcel == parcel and place.row == first + rows:
            rows += place.rows
        else:
            joined.append(Place(parcel, first, rows))
            parcel, first, rows = place
    return [*joined, Place(parcel, first, rows)]
