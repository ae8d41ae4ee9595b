"""How the rows of a lease are described to who claimed them: nothing where all have the default.

Invariant: ``lot_of(...).leased()`` gives what the rows are now.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from asyncflow.identity import NEWEST
from asyncflow.queue.protocol.lot import Lot
from asyncflow.queue.protocol.sizes import ABSENT, pack
from asyncflow.queue.table.cells import Told
from asyncflow.queue.table.leases import Lease
from asyncflow.queue.table.state import Row


def lot_of(lease: Lease, rows: Sequence[Row], task: str, now: float) -> Lot:
    """Describe ``rows``, at least one: those that ``lease`` holds for ``task``."""
    groups = [row.group for row in rows]
    tags = [row.tags for row in rows]
    moved = [row.moved for row in rows]
    lot = Lot(
        partition=lease.partition,
        purpose=groups[0].purpose,
        lease=lease.name,
        until=lease.until - now,
        rows=list(lease.rows),
        serials=[group.serial for group in groups],
        samples=_unless([row.sample for row in rows], 0),
        attempts=_unless([row.work[task].attempt for row in rows], 0),
        tags=tags if any(tags) else [],
        sizes=_sizes(rows),
        units=[row.unit for row in rows] if any(moved) else [],
    )
    if lot.purpose == "open":
        return lot
    return replace(
        lot,
        steps=_unless([group.step for group in groups], 0),
        oldest=_unless([group.window.oldest for group in groups], 0),
        newest=_unless([group.window.newest for group in groups], NEWEST),
        tokens=_unless([row.tokens for row in rows], 0),
    )


def _unless(values: list[int], default: int) -> list[int]:
    """Give ``values``, or nothing where all are ``default``."""
    return [] if values.count(default) == len(values) else values


def _sizes(rows: Sequence[Row]) -> dict[str, bytes]:
    shape, count = rows[0].shape, len(rows)
    partial = [row.partial for row in rows]
    if [row.shape for row in rows].count(shape) == count and not any(partial):
        told = rows[0].cells
        if isinstance(told, Told) and [row.cells for row in rows].count(told) == count:
            return dict(zip(shape.names, told.columns([row.row for row in rows]), strict=True))
        cells = [row.own_cells for row in rows]
        return dict(zip(shape.names, map(pack, zip(*cells, strict=True)), strict=True))
    sizes: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        for name, size in row.sizes.items():
            sizes.setdefault(name, [ABSENT] * count)[index] = size
    return {name: pack(of) for name, of in sizes.items()}
