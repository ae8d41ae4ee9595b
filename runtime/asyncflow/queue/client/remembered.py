"""Parcels that came whole and at which the caller still looks: their rows need not be fetched again.

Invariants: nothing is kept alive that the caller does not hold itself; what is given is what the unit would give, which
a mark in the shared memory says for as long as it is so.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from asyncflow.net.arena.borrowing import Mark, mark_of
from asyncflow.net.frames import Array, Inner, Jagged
from asyncflow.net.jagged import Offsets

_MOST = 16


class _Column(NamedTuple):
    """A column of a parcel, but for its values. mark: of its unit, where it was lent."""

    values: weakref.ref[Array]
    mark: Mark | None
    offsets: Offsets
    lengths: Offsets
    dtype: str
    inner: Inner

    def of(self, values: Array) -> Jagged:
        """Give the column."""
        return Jagged.trusted(values, self.lengths, self.dtype, self.inner, self.offsets)


class _Parcel(NamedTuple):
    """A parcel. rows: their ids."""

    rows: range
    columns: Mapping[str, _Column]

    @property
    def alive(self) -> bool:
        """Whether it may still be used."""
        return any(column.values() is not None for column in self.columns.values())

    def cut(self, rows: Sequence[int], names: Sequence[str]) -> dict[str, Jagged] | None:
        """Give columns of rows; None where they are not all here, or may have changed.

        The mark of a column means something while its values are held; all marks of a parcel are taken back together.
        """
        found: dict[str, Jagged] = {}
        marks: list[Mark] = []
        for name in names:
            column = self.columns.get(name)
            values = None if column is None else column.values()
            if column is None or values is None:
                return None
            found[name] = column.of(values)
            marks += [column.mark] if column.mark is not None else []
        if not marks or not all(mark.shown for mark in marks):
            return None
        return cut(found, rows, first=self.rows.start)


class Remembered:
    """The parcels that a client remembers."""

    def __init__(self) -> None:
        self._parcels: list[_Parcel] = []

    def find(self, rows: Sequence[int], names: Sequence[str]) -> dict[str, Jagged] | None:
        """Give columns of rows, in that order; None where some are not remembered."""
        if self._parcels and rows:
            low, high = min(rows), max(rows)
            for parcel in self._parcels:
                if low in parcel.rows and high in parcel.rows and (found := parcel.cut(rows, names)) is not None:
                    return found
        return None

    def keep(self, first: int, columns: Mapping[str, Jagged]) -> None:
        """Remember a parcel whose rows have the ids from ``first`` on. Nobody can write to its values from now on."""
        rows = range(first, first + len(next(iter(columns.values()))))
        made = _Parcel(rows, {name: _column(of) for name, of in columns.items()})
        others = [of for of in self._parcels if of.alive and (of.rows != rows or of.columns.keys() != columns.keys())]
        self._parcels = [made, *others[: _MOST - 1]]


def _column(of: Jagged) -> _Column:
    for array in (of.values, of.offsets, of.lengths):
        array.flags.writeable = False
    return _Column(weakref.ref(of.values), mark_of(of.values), of.offsets, of.lengths, of.dtype, of.inner)


def cut(columns: Mapping[str, Jagged], rows: Sequence[int], *, first: int) -> dict[str, Jagged]:
    """Give some of the rows from ``first`` on, by id: as they lie where one follows the other, else as a copy."""
    start, stop = rows[0] - first, rows[-1] - first + 1
    if stop - start == len(rows) and list(rows) == list(range(rows[0], rows[-1] + 1)):
        return {name: column.cut(start, stop) for name, column in columns.items()}
    indices = [row - first for row in rows]
    return {name: column.take(indices) for name, column in columns.items()}
