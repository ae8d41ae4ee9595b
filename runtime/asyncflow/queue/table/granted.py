"""How the rows of a lease or of a slot are described to who gets them: nothing where all have the default.

Invariant: ``lot_of_lease(...).leased()`` and ``lot_of_slot(...).staged()`` give what the rows are now.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.identity import NEWEST
from asyncflow.queue.protocol.lot import Lot
from asyncflow.queue.protocol.sizes import ABSENT, pack
from asyncflow.queue.table.cells import Told
from asyncflow.queue.table.leases import Lease
from asyncflow.queue.table.state import Row


def lot_of_lease(lease: Lease, rows: Sequence[Row], now: float) -> Lot:
    """Describe ``rows``, at least one: those that ``lease`` holds."""
    attempts = [row.work[lease.task].attempt for row in rows]
    return _lot_of(rows, lease=lease.name, until=lease.until - now, attempts=attempts)


def lot_of_slot(rows: Sequence[Row]) -> Lot:
    """Describe ``rows``, at least one: those that a rank trains in a slot."""
    return _lot_of(rows, lease="", until=0.0, attempts=[])


def _lot_of(rows: Sequence[Row], *, lease: str, until: float, attempts: list[int]) -> Lot:
    groups = [row.group for row in rows]
    numbers = [row.row for row in rows]
    tags = [row.tags for row in rows]
    moved = [row.moved for row in rows]
    first = groups[0]
    stepped = [] if first.purpose == "open" else groups
    return Lot(
        partition=first.partition,
        purpose=first.purpose,
        lease=lease,
        until=until,
        rows=numbers,
        serials=[group.serial for group in groups],
        samples=_unless([row.sample for row in rows], 0),
        attempts=_unless(attempts, 0),
        steps=_unless([group.step for group in stepped], 0),
        oldest=_unless([group.window.oldest for group in stepped], 0),
        newest=_unless([group.window.newest for group in stepped], NEWEST),
        tokens=_unless([row.tokens for row in rows], 0) if stepped else [],
        tags=tags if any(tags) else [],
        sizes=_sizes(rows, numbers),
        units=[row.unit for row in rows] if any(moved) else [],
    )


def _unless(values: list[int], default: int) -> list[int]:
    """Return ``values``, or nothing where all are ``default``."""
    return [] if values.count(default) == len(values) else values


def _sizes(rows: Sequence[Row], numbers: Sequence[int]) -> dict[str, bytes]:
    shape, told, count = rows[0].shape, rows[0].cells, len(rows)
    if not [row for row in rows if row.shape is not shape or row.partial]:
        if isinstance(told, Told) and not [row for row in rows if row.cells is not told]:
            return dict(zip(shape.names, told.columns(numbers), strict=True))
        cells = [row.own_cells for row in rows]
        return dict(zip(shape.names, map(pack, zip(*cells, strict=True)), strict=True))
    sizes: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        for name, size in row.sizes.items():
            sizes.setdefault(name, [ABSENT] * count)[index] = size
    return {name: pack(of) for name, of in sizes.items()}
