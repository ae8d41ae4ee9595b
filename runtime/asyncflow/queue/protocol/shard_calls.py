"""The calls between controllers, and of units to shards: who follows whose rows, and whose word a lease's holder needs.

Controller 0 is the *home*, which decides about rows; the others, *shards*, follow its rows and decide about the leases
of their own tasks. A lease's id says which controller gave it.

Invariant: as in ``calls``, every call can be sent again after its answer was lost.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Raw, Struct

from asyncflow.queue.protocol import sizes
from asyncflow.queue.protocol.calls import Seconds
from asyncflow.queue.protocol.unit_calls import Cells, NewCells

LEASE_BITS = 59
"""Below these bits of a lease's id are its epoch and count, above is the controller that gave it."""

_LONGEST = 16
_Count = Annotated[int, Meta(ge=0)]


def controller_of(lease: str) -> int:
    """Return the controller that gave ``lease``; the home for anything that is no lease."""
    if not LEASE_BITS // 4 < len(lease) <= _LONGEST:
        return 0
    try:
        return max(0, int(lease, 16) >> LEASE_BITS)
    except ValueError:
        return 0


def chosen(cells: Cells, count: int, indices: list[int]) -> Cells:
    """Return the cells of some of ``count`` rows."""
    if len(indices) == count:
        return cells
    return Cells(dtypes=cells.dtypes, sizes={name: sizes.chosen(of, indices) for name, of in cells.sizes.items()})


class Follow(Struct, frozen=True):
    """What happened to rows after ``position`` in the time of the home with this epoch? Parks for ``wait_s``.

    home: 0 asks for a snapshot.
    """

    shard: _Count
    home: _Count
    position: _Count
    wait_s: Seconds


class Feed(Struct, frozen=True):
    """What happened, up to ``position``; the items are encoded one by one.

    parts: if not 0, the shard must take a snapshot of so many parts (``AskPart``) and follow from ``position`` on.
    """

    home: int
    position: int
    items: list[Raw]
    parts: int = 0


class AskPart(Struct, frozen=True):
    """Request for part ``part`` of the snapshot that was made for this shard at ``position``."""

    shard: _Count
    position: _Count
    part: _Count


class Part(Struct, frozen=True):
    """The items of a part, encoded one by one."""

    items: list[Raw]


class Reach(Struct, frozen=True):
    """Answer when everything up to ``position`` of that home is known; parks for ``wait_s``."""

    home: int
    position: int
    wait_s: Seconds


class Reached(Struct, frozen=True):
    """Whether it is known."""

    ok: bool


class EnterTypes(Struct, frozen=True):
    """New columns of a partition, with their dtypes."""

    partition: str
    dtypes: dict[str, str]


class DropRows(Struct, frozen=True):
    """Rows whose holder gives them up for ever."""

    partition: str
    rows: list[int]
    reason: str


class AdmitCells(Struct, frozen=True):
    """What a unit was given under leases of this shard."""

    entries: list[NewCells]
