"""Cells in the unit's own memory, in the buffers in which they arrived.

Invariant: if less than half of a blob's column is live, the live cells are copied to a buffer of their size, so the
memory is never more than twice that of the cells. Apart from that, contiguous cells are never copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from asyncflow.queue.storage.backend import Backend, Place
from asyncflow.rpc.columns import Jagged

_OFFSET = 8
"""Bytes that a row needs in addition to its values."""


class _Cells:
    """One column of a blob. kept: the remaining rows' indices in the blob, None for all; alive: which rows are live."""

    __slots__ = ("_alive", "_bytes", "_kept", "_rows", "column")

    def __init__(self, column: Jagged) -> None:
        self.column = column
        self._kept: npt.NDArray[np.int64] | None = None
        self._alive: npt.NDArray[np.bool_] | None = None

    def start(self, first: int) -> int:
        """Return the index in the column of the row with index ``first`` of the blob."""
        return first if self._kept is None else int(np.searchsorted(self._kept, first))

    def cut(self, first: int, rows: int) -> Jagged:
        """Return the rows from index ``first`` of the blob."""
        start = self.start(first)
        return self.column.cut(start, start + rows)

    def free(self, first: int, rows: int) -> bool:
        """Forget rows, and return whether any row is left."""
        column = self.column
        if self._alive is None:
            self._rows, self._bytes = len(column), column.values.nbytes
        self._rows -= rows
        if not self._rows:
            return False
        if self._alive is None:
            self._alive = np.ones(len(column), np.bool_)
        start = self.start(first)
        self._alive[start : start + rows] = False
        self._bytes -= column.cut(start, start + rows).values.nbytes
        if 2 * (self._bytes + _OFFSET * self._rows) < column.nbytes:
            remaining = np.flatnonzero(self._alive)
            self.column = column.take(remaining)
            self._kept = remaining if self._kept is None else self._kept[remaining]
            self._alive = None
        return True


class MemoryBackend(Backend):
    """Blobs in a dictionary."""

    def __init__(self) -> None:
        self._blobs: dict[int, dict[str, _Cells]] = {}

    async def put(self, blob: int, columns: Mapping[str, Jagged]) -> None:
        """Keep the columns without copying them."""
        self._blobs[blob] = {name: _Cells(column) for name, column in columns.items()}

    async def get(self, places: Sequence[Place], columns: Sequence[str]) -> dict[str, Jagged]:
        """Return contiguous rows without copying, other rows as a copy."""
        runs = [(self._blobs[blob], first, rows) for blob, first, rows in _runs(places)]
        return {name: Jagged.concat([blob[name].cut(first, rows) for blob, first, rows in runs]) for name in columns}

    async def free(self, places: Sequence[Place], columns: Sequence[str]) -> None:
        """Forget cells."""
        for number, first, rows in _runs(places):
            blob = self._blobs[number]
            for name in columns:
                if not blob[name].free(first, rows):
                    del blob[name]
            if not blob:
                del self._blobs[number]

    async def close(self) -> None:
        """Forget everything."""
        self._blobs.clear()


def _runs(places: Sequence[Place]) -> list[list[int]]:
    """Return the blob, the first row and the number of rows of each run of contiguous rows."""
    runs: list[list[int]] = []
    following = None
    for blob, row in places:
        if (blob, row) != following:
            runs.append([blob, row, 0])
        runs[-1][2] += 1
        following = blob, row + 1
    return runs
