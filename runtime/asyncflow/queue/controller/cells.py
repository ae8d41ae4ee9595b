"""The bytes of columns, which units tell column by column, row by row.

Invariant: rows of which the same is told share it.
"""

from __future__ import annotations

from asyncflow.queue.protocol.runs import expand_equal
from asyncflow.queue.protocol.unit_calls import Cells


def by_row(cells: Cells, count: int) -> tuple[tuple[str, ...], list[tuple[int, ...]]]:
    """Give the columns' names, and the bytes of each of ``count`` rows. ValueError where there are not so many."""
    sizes = list(cells.sizes.values())
    if max(map(len, sizes), default=1) > 1:
        sizes = [expand_equal(of, count) for of in sizes]
    rows: list[tuple[int, ...]] = list(zip(*sizes, strict=True)) if sizes else [()]
    if len(rows) == 1:
        rows *= count
    if len(rows) != count:
        raise ValueError(f"sizes of {len(rows)} rows came with {count} rows")
    return tuple(cells.sizes), rows
