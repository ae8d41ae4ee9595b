"""Cells in the unit's own memory, where they arrived.

Invariant: a column of a blob of which less than half lives is copied to where it needs no more, so the memory is
never more than twice that of the cells; otherwise nothing is copied that lies in one piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from asyncflow.queue.storage.backend import Backend, Place
from asyncflow.rpc.columns import Jagged

_OFFSET = 8
"""Bytes that a row needs besides its values."""


class _Gaps:
    """Freed rows of one column of a blob. kept: the indices that its other rows had in the blob, None for all."""

    __slots__ = ("_alive", "_bytes", "_kept", "_rows")

    def __init__(self, column: Jagged) -> None:
        self._kept: npt.NDArray[np.int64] | None = None
        self._alive: npt.NDArray[np.bool_] | None = None
        self._rows = len(column)
        self._bytes = column.values.nbytes

    def at(self, index: int) -> int:
        """Return where in the column the row lies that had this index in the blob."""
        return index if self._kept is None else int(np.searchsorted(self._kept, index))

    def free(self, column: Jagged, first: int, rows: int) -> Jagged | None:
        """Forget rows of ``column``; return the column for those that are left, None for none."""
        self._rows -= rows
        if not self._rows:
            return None
        if self._alive is None:
            self._alive = np.ones(len(column), np.bool_)
        start = self.at(first)
        self._alive[start : start + rows] = False
        self._bytes -= int(column.offsets[start + rows] - column.offsets[start]) * column.values.itemsize
        if 2 * (self._bytes + _OFFSET * self._rows) >= column.nbytes:
            return column
        left = np.flatnonzero(self._alive)
        self._kept = left if self._kept is None else self._kept[left]
        self._alive = None
        return column.take(left)


class _Blob:
    """Columns of a blob, as far as they live, and the gaps of those that have some."""

    __slots__ = ("columns", "gaps")

    def __init__(self, columns: Mapping[str, Jagged]) -> None:
        self.columns = dict(columns)
        self.gaps: dict[str, _Gaps] = {}

    def run(self, name: str, first: int, rows: int) -> tuple[Jagged, int, int]:
        """Return a column, and where in it the rows from index ``first`` of the blob lie."""
        gaps = self.gaps.get(name)
        start = first if gaps is None else gaps.at(first)
        return self.columns[name], start, start + rows

    def free(self, names: Sequence[str], first: int, rows: int) -> None:
        """Forget rows of these columns."""
        for name in names:
            column = self.columns.pop(name)
            if rows == len(column):
                continue
            if name not in self.gaps:
                self.gaps[name] = _Gaps(column)
            if (left := self.gaps[name].free(column, first, rows)) is not None:
                self.columns[name] = left


class MemoryBackend(Backend):
    """Blobs in a dict."""

    def __init__(self) -> None:
        self._blobs: dict[int, _Blob] = {}

    async def put(self, blob: int, columns: Mapping[str, Jagged]) -> None:
        """Keep the columns themselves."""
        self._blobs[blob] = _Blob(columns)

    async def get(self, places: Sequence[Place], columns: Sequence[str]) -> dict[str, Jagged]:
        """Return rows that lie one after another as they lie, others as a copy."""
        places = _joined(places)
        number, first, rows = places[0]
        whole = self._blobs[number]
        if len(places) == 1 and not whole.gaps:
            return {name: whole.columns[name].cut(first, first + rows) for name in columns}
        runs = [(self._blobs[number], first, rows) for number, first, rows in places]
        return {name: Jagged.gather([of.run(name, first, rows) for of, first, rows in runs]) for name in columns}

    async def free(self, places: Sequence[Place], columns: Sequence[str]) -> None:
        """Forget cells."""
        for number, first, rows in _joined(places):
            blob = self._blobs[number]
            blob.free(columns, first, rows)
            if not blob.columns:
                del self._blobs[number]

    async def close(self) -> None:
        """Forget all."""
        self._blobs.clear()

    @property
    def nbytes(self) -> int:
        """Bytes in memory, those that nobody needs any more included."""
        return sum(column.nbytes for blob in self._blobs.values() for column in blob.columns.values())


def _joined(places: Sequence[Place]) -> Sequence[Place]:
    """Return the same rows, those that lie one after another as one place."""
    if len(places) < 2:
        return places
    joined = []
    blob, first, rows = places[0]
    for place in places[1:]:
        if place.blob == blob and place.row == first + rows:
            rows += place.rows
        else:
            joined.append(Place(blob, first, rows))
            blob, first, rows = place
    return [*joined, Place(blob, first, rows)]
