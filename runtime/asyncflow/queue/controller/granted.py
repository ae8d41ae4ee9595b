"""How the rows of a lease are described to who claimed them: nothing where all have the default.

Invariant: ``lot_of(...).leased()`` gives what the rows are now.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.identity import NEWEST
from asyncflow.queue.controller.leases import Lease
from asyncflow.queue.controller.state import Row
from asyncflow.queue.protocol.lot import Lot


def lot_of(lease: Lease, rows: Sequence[Row], task: str, now: float) -> Lot:
    """Describe ``rows``, at least one, which ``lease`` holds for ``task``."""
    groups = [row.group for row in rows]
    purpose = groups[0].purpose
    plain = purpose == "open"
    tags = [row.tags for row in rows]
    return Lot(
        partition=lease.partition,
        purpose=purpose,
        lease=lease.name,
        until=lease.until - now,
        rows=[row.row for row in rows],
        serials=[group.serial for group in groups],
        samples=_unless([row.sample for row in rows], 0),
        attempts=_unless([row.work[task].attempt for row in rows], 0),
        steps=[] if plain else _unless([group.step for group in groups], 0),
        oldest=[] if plain else _unless([group.window.oldest for group in groups], 0),
        newest=[] if plain else _unless([group.window.newest for group in groups], NEWEST),
        tokens=[] if plain else _unless([row.tokens for row in rows], 0),
        tags=tags if any(tags) else [],
        sizes=_sizes(rows),
        units=[row.unit for row in rows] if any(row.moved for row in rows) else [],
    )


def _unless(values: list[int], default: int) -> list[int]:
    """Give ``values``, or nothing where all are ``default``."""
    return [] if values.count(default) == len(values) else values


def _sizes(rows: Sequence[Row]) -> dict[str, list[int]]:
    shape = rows[0].shape
    if [row.shape for row in rows].count(shape) == len(rows) and not any(row.partial for row in rows):
        return dict(zip(shape.names, map(list, zip(*[row.cells for row in rows], strict=True)), strict=True))
    sizes: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        for name, size in row.sizes.items():
            sizes.setdefault(name, [-1] * len(rows))[index] = size
    return sizes
