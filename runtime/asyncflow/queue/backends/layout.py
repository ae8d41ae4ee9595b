"""Where the cells of a parcel lie in the values of its samples. Pure.

The value of a sample is its cells back to back, in the order of the parcel's columns: without gaps and without a
header, so a sample that has no bytes has no value.

Invariant: what ``Unpacking`` gives has the lengths that ``Layout`` was made with, whatever the values hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asyncflow.net.dtypes import DTYPES
from asyncflow.net.jagged import Array, Inner, Jagged

Sizes = npt.NDArray[np.int64]


class _Form(NamedTuple):
    dtype: str
    inner: Inner


class Layout:
    """The lengths of all cells of a parcel. names: of its columns; sizes: bytes of the value of each row."""

    def __init__(self, columns: Mapping[str, Jagged]) -> None:
        self.names = tuple(columns)
        self._places = {name: place for place, name in enumerate(columns)}
        self._forms = [_Form(column.dtype, column.inner) for column in columns.values()]
        lengths = [column.lengths * column.values.itemsize for column in columns.values()]
        self._ends: Sizes = np.cumsum(lengths, axis=0, dtype=np.int64)
        self.sizes: Sizes = self._ends[-1]

    def cell(self, column: str, row: int) -> tuple[int, int]:
        """Return where a cell begins and ends in the value of its row."""
        place = self._places[column]
        return int(self._ends[place - 1, row]) if place else 0, int(self._ends[place, row])

    def form(self, column: str) -> _Form:
        """Return dtype and inner shape of a column."""
        return self._forms[self._places[column]]


@dataclass(slots=True)
class Sample:
    """A row of a parcel: its key ("" where it has no bytes), the digest of its value, and columns that were freed."""

    layout: Layout
    row: int
    key: str = ""
    digest: bytes = b""
    freed: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        """Bytes of its value."""
        return int(self.layout.sizes[self.row])

    @property
    def columns(self) -> list[str]:
        """Those that are needed."""
        return [name for name in self.layout.names if name not in self.freed]

    @property
    def sparse(self) -> bool:
        """Whether less than half of the value is needed."""
        needed = (stop - start for start, stop in (self.layout.cell(name, self.row) for name in self.columns))
        return 2 * sum(needed) < self.size


def pieces(columns: Mapping[str, Jagged], rows: Sequence[int]) -> list[Array]:
    """Return the bytes of all cells of ``rows`` in the order of their values."""
    flat = [np.ascontiguousarray(column.values).view(np.uint8) for column in columns.values()]
    bounds = [(column.offsets * column.values.itemsize).tolist() for column in columns.values()]
    return [data[at[row] : at[row + 1]] for row in rows for data, at in zip(flat, bounds, strict=True)]


class Unpacking:
    """Columns that are filled row by row, in any order, from the values of samples."""

    def __init__(self, rows: Sequence[tuple[Layout, int]], columns: Sequence[str]) -> None:
        """Make room for ``columns`` of ``rows``, each a row of a layout. Raises ValueError where forms differ."""
        self._cells = {name: [layout.cell(name, row) for layout, row in rows] for name in columns}
        self._forms = {name: rows[0][0].form(name) for name in columns}
        for name, form in self._forms.items():
            if any(layout.form(name) != form for layout, _ in rows):
                raise ValueError(f"rows of several forms cannot be one column {name!r}")
        self._offsets = {name: _offsets(cells) for name, cells in self._cells.items()}
        self._data = {name: np.empty(int(offsets[-1]), np.uint8) for name, offsets in self._offsets.items()}

    def needs(self, number: int) -> bool:
        """Tell whether any byte of row ``number`` is asked for."""
        return any(stop > start for start, stop in (cells[number] for cells in self._cells.values()))

    def take(self, number: int, value: memoryview) -> None:
        """Take the cells of row ``number`` out of its value."""
        for name, cells in self._cells.items():
            start, stop = cells[number]
            at = int(self._offsets[name][number])
            self._data[name].data[at : at + stop - start] = value[start:stop]

    def columns(self) -> dict[str, Jagged]:
        """Return the columns, when all rows that are needed were taken."""
        return {name: self._column(name, form) for name, form in self._forms.items()}

    def _column(self, name: str, form: _Form) -> Jagged:
        stored = DTYPES[form.dtype]
        offsets = self._offsets[name] // stored.itemsize
        return Jagged(self._data[name].view(stored), offsets, form.dtype, form.inner)


def _offsets(cells: Sequence[tuple[int, int]]) -> Sizes:
    offsets = np.zeros(len(cells) + 1, np.int64)
    np.cumsum([stop - start for start, stop in cells], out=offsets[1:])
    return offsets
