"""The bytes of columns, which units tell column by column, row by row.

Invariant: rows of which the same is told share it.
"""

from __future__ import annotations

from asyncflow.queue.protocol.sizes import alike, fit, part
from asyncflow.queue.protocol.unit_calls import Cells


def check(cells: Cells, count: int) -> None:
    """Raise ValueError where they are not those of ``count`` rows."""
    if not all(fit(sizes, count) for sizes in cells.sizes.values()):
        told = {name: len(sizes) for name, sizes in cells.sizes.items()}
        raise ValueError(f"sizes in {told} bytes came with {count} rows")


def by_row(cells: Cells, count: int) -> tuple[tuple[str, ...], list[tuple[int, ...]]]:
    """Give the columns' names, and the bytes of each of ``count`` rows. ValueError where there are not so many."""
    check(cells, count)
    names, sizes = tuple(cells.sizes), cells.sizes.values()
    if all(map(alike, sizes)):
        return names, [tuple([part(of, 0, 1)[0] for of in sizes])] * count
    return names, list(zip(*[part(of, 0, count) for of in sizes], strict=True))
