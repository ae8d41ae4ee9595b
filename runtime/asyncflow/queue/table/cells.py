"""The bytes of columns, which units tell column by column, row by row.

Invariant: rows of which the same is told share it.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.queue.protocol.sizes import alike, chosen, fit, one, part
from asyncflow.queue.protocol.unit_calls import Cells


class Told:
    """What was told of rows that were put together. first: id of the first of them; the others follow."""

    __slots__ = ("_first", "_sizes")

    def __init__(self, cells: Cells, *, first: int) -> None:
        self._sizes = tuple(cells.sizes.values())
        self._first = first

    def of(self, row: int) -> tuple[int, ...]:
        """Return the bytes of each column of a row."""
        return tuple([part(sizes, row - self._first, 1)[0] for sizes in self._sizes])

    def columns(self, rows: Sequence[int]) -> list[bytes]:
        """Return the bytes of ``rows``, column by column."""
        start, count = rows[0] - self._first, len(rows)
        follow = list(rows) == list(range(rows[0], rows[0] + count))
        indices = range(start, start + count) if follow else [row - self._first for row in rows]
        return [chosen(sizes, indices) for sizes in self._sizes]


def told_of(cells: Cells, rows: Sequence[int]) -> Told | tuple[int, ...]:
    """Return what each of ``rows``, which were put together, keeps of what was told of them."""
    return Told(cells, first=rows[0]) if len(rows) > 1 else tuple(map(one, cells.sizes.values()))


def check(cells: Cells, count: int) -> None:
    """Raise ValueError where they are not those of ``count`` rows."""
    if wrong := {name: len(sizes) for name, sizes in cells.sizes.items() if not fit(sizes, count)}:
        raise ValueError(f"sizes in {wrong} bytes came with {count} rows")


def by_row(cells: Cells, count: int) -> tuple[tuple[str, ...], list[tuple[int, ...]]]:
    """Return the columns' names, and the bytes of each of ``count`` rows. ValueError where there are not so many."""
    check(cells, count)
    names, sizes = tuple(cells.sizes), cells.sizes.values()
    if all(map(alike, sizes)):
        return names, [tuple(map(one, sizes))] * count
    return names, list(zip(*[part(of, 0, count) for of in sizes], strict=True))
