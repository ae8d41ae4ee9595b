"""How the rows of a lease are described to who claimed them: nothing where all have the default.

Invariant: ``lot_of(...).leased()`` gives what the rows are now.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from msgspec.structs import replace

from asyncflow.identity import NEWEST
from asyncflow.queue.controller.leases import Lease
from asyncflow.queue.controller.state import Row, Shape
from asyncflow.queue.protocol.lot import Lot

_SEEN = attrgetter("group", "row", "sample", "work", "tokens", "tags", "moved", "shape", "cells", "partial")


def lot_of(lease: Lease, rows: Sequence[Row], task: str, now: float) -> Lot:
    """Describe ``rows``, at least one, which ``lease`` holds for ``task``."""
    groups, numbers, samples, works, tokens, tags, moved, shapes, cells, partial = zip(*map(_SEEN, rows), strict=True)
    lot = Lot(
        partition=lease.partition,
        purpose=groups[0].purpose,
        lease=lease.name,
        until=lease.until - now,
        rows=list(numbers),
        serials=[group.serial for group in groups],
        samples=list(samples) if any(samples) else [],
        attempts=_unless([work[task].attempt for work in works], 0),
        tags=list(tags) if any(tags) else [],
        sizes=_sizes(rows) if any(partial) or shapes.count(shapes[0]) < len(rows) else _alike(shapes[0], cells),
        units=[row.unit for row in rows] if any(moved) else [],
    )
    if lot.purpose == "open":
        return lot
    return replace(
        lot,
        steps=_unless([group.step for group in groups], 0),
        oldest=_unless([group.window.oldest for group in groups], 0),
        newest=_unless([group.window.newest for group in groups], NEWEST),
        tokens=_unless(list(tokens), 0),
    )


def _unless(values: list[int], default: int) -> list[int]:
    """Give ``values``, or nothing where all are ``default``."""
    return [] if values.count(default) == len(values) else values


def _alike(shape: Shape, cells: Sequence[tuple[int, ...]]) -> dict[str, list[int]]:
    """Give the bytes of rows that are all of one shape."""
    if cells.count(cells[0]) == len(cells):
        return {name: [size] * len(cells) for name, size in zip(shape.names, cells[0], strict=True)}
    return dict(zip(shape.names, map(list, zip(*cells, strict=True)), strict=True))


def _sizes(rows: Sequence[Row]) -> dict[str, list[int]]:
    sizes: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        for name, size in row.sizes.items():
            sizes.setdefault(name, [-1] * len(rows))[index] = size
    return sizes
