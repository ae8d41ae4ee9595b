"""The calls of clients to units, of units to controllers, and of units to each other.

A draining unit asks the controller which of its rows to move next, and to which unit (``AskMove``), and sends them
there (``TakeRows``). The other unit reports them to the controller (``MovedRows``), which then records the move.

Invariant: as in ``calls``, every call can be repeated after its reply was lost; a ``MoveOrder`` voids earlier ones.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from asyncflow.errors import ProtocolError
from asyncflow.identity import location_at
from asyncflow.queue.protocol.calls import NOWHERE, Attempt, Bytes, Seconds
from asyncflow.queue.protocol.messages import SERIAL_BITS, Samples, Tag
from asyncflow.rpc.columns import BatchHeader

MOST_ROWS = 1 << 20
"""The limit of rows in one put, or in one item of a feed."""
CellBytes = Annotated[int, Meta(ge=0, lt=1 << 32)]
_GroupSize = Annotated[int, Meta(ge=1)]
ClientName = Annotated[bytes, Meta(min_length=8, max_length=64)]
Outcome: TypeAlias = Literal["complete", "return", "keep"]
"""The effect of a write on leased rows: complete them, return them, or keep their lease."""
GroupNumber = Annotated[int, Meta(ge=0, lt=1 << SERIAL_BITS)]


class Cells(Struct, frozen=True, kw_only=True):
    """Columns of some rows, as their unit reports them. sizes: bytes of each row."""

    dtypes: dict[str, str]
    sizes: dict[str, list[CellBytes]]


class Held(Struct, frozen=True, kw_only=True):
    """A row as its unit holds it. columns, partial: bytes by column."""

    row: int
    columns: dict[str, CellBytes]
    partial: dict[str, CellBytes]
    tokens: int
    tags: dict[str, Tag]


class PutRows(Struct, frozen=True):
    """Put rows; the frames hold their columns, and ``header.rows`` is their number.

    client: unique name of the client, random bytes; group: the client's own number of the first group, the other groups
    follow it; tags: one set for each row, or none at all; outputs: most bytes of each column that is written to each
    row later; wait_s: time to wait for room for all of that; samples: the groups, if their creator numbers them instead
    of the client; attempt: attempt of that creator.
    """

    partition: str
    client: ClientName
    group: GroupNumber
    group_size: Annotated[int, Meta(ge=1)]
    header: BatchHeader
    tags: list[dict[str, Tag]]
    outputs: dict[str, Bytes]
    wait_s: Seconds
    samples: Samples | None = None
    attempt: Attempt = 0


class RowIds(Struct, frozen=True):
    """Ids of the rows that were put.

    new: True if the row is new; empty on the wire if all rows are. For a row that is not new, the id is the id of the
    row put earlier under its number or key, which is unchanged, or 0 if that row has ended or its group was refused.
    """

    rows: list[int]
    new: list[bool] = []


class WriteRows(Struct, frozen=True):
    """Write columns of leased rows. Unless this completes the rows, the columns are unfinished, for the next holder.

    reason: why the rows are returned, for the ledger. A write that keeps the lease does not wait for room.
    """

    lease: str
    rows: list[int]
    header: BatchHeader
    tags: list[dict[str, Tag]]
    outcome: Outcome
    wait_s: Seconds
    reason: str = ""


class FetchRows(Struct, frozen=True):
    """Fetch columns of rows."""

    rows: list[int]
    columns: list[str]


class Hello(Struct, frozen=True):
    """Request the epoch of a unit's rows. address: where peers reach it; epoch: its last epoch, 0 for none."""

    unit: int
    incarnation: str
    limit: int
    address: str = ""
    epoch: int = 0


class Welcome(Struct, frozen=True):
    """The reply to ``Hello``. controller: its epoch; epoch: epoch of the unit's rows; the unit must forget other rows.

    watch_s: seconds that the unit may be silent while idle; controllers: number of controllers that grant leases.
    """

    controller: int
    epoch: int
    watch_s: float
    controllers: int = 1


class Session(Struct, frozen=True):
    """A unit and its controller, which refuses a session that it did not start."""

    unit: int
    controller: int
    epoch: int

    @property
    def location(self) -> int:
        """The location of this unit's rows."""
        return location_at(self.epoch, self.unit)


class Announce(Struct, frozen=True):
    """Rows as a unit holds them. last: these are the last of the rows that it held at the start of the session."""

    session: Session
    held: list[Held]
    last: bool


class LostRows(Struct, frozen=True):
    """Rows whose bytes the unit's backend has lost, although the unit itself lives."""

    session: Session
    rows: list[int]


class NewRows(Struct, frozen=True, tag="new"):
    """Rows that a unit received; see ``PutRows``."""

    partition: str
    client: ClientName
    group: GroupNumber
    group_size: _GroupSize
    rows: list[int]
    cells: Cells
    tags: list[dict[str, Tag]]
    samples: Samples | None = None
    attempt: Attempt = 0


class NewCells(Struct, frozen=True, tag="cells"):
    """Columns of leased rows that a unit received; see ``WriteRows``."""

    lease: str
    rows: list[int]
    cells: Cells
    tags: list[dict[str, Tag]]
    outcome: Outcome
    reason: str = ""


class MovedRows(Struct, frozen=True, tag="moved"):
    """Rows that came from ``source``, which loses them once this is admitted. ticket: see ``MoveOrder``.

    partial: the unfinished ones of the columns; tokens, tags: values of each row.
    """

    source: int
    ticket: int
    rows: list[int]
    cells: Cells
    partial: list[str]
    tokens: list[int]
    tags: list[dict[str, Tag]]


Entry: TypeAlias = NewRows | NewCells | MovedRows


class Admit(Struct, frozen=True):
    """The entries that a unit received since its last call, in order."""

    session: Session
    entries: list[Entry]


class EntryResult(Struct, frozen=True):
    """The result of an entry, for each row; error: in the form of ``to_wire``, if the whole entry is refused.

    rows: for ``NewRows`` that are not all ok, the ids to return to the client (see ``RowIds``).
    """

    ok: list[bool]
    error: dict[str, str] | None = None
    rows: list[int] = []

    def each(self, count: int) -> list[bool]:
        """Return whether each of ``count`` rows was admitted."""
        return self.ok or [False] * count


def results_on(entries: Sized, results: list[EntryResult]) -> list[EntryResult]:
    """Return ``results`` on ``entries``. Raises ProtocolError if their number differs."""
    if len(results) != len(entries):
        raise ProtocolError(f"{len(results)} results came on {len(entries)} entries")
    return results


class Watch(Struct, frozen=True):
    """Report the fill of a unit and wait for orders.

    done: number of the last order that it carried out; used: bytes; held: rows.
    """

    session: Session
    done: int
    used: int
    wait_s: Seconds
    held: int = 0


class Orders(Struct, frozen=True):
    """Rows to free; number: number of the last of these orders; leave: move all rows to other units."""

    number: int
    rows: list[int]
    leave: bool = False


class AskMove(Struct, frozen=True):
    """Request the next move of a draining unit.

    rows: the first of the ``held`` rows of the unit, with ``nbytes`` bytes; but: a unit to avoid if there is another.
    """

    session: Session
    rows: list[int]
    held: Annotated[int, Meta(ge=0)]
    nbytes: Bytes
    but: int = NOWHERE


class MoveOrder(Struct, frozen=True):
    """Move ``rows`` to ``unit``. gone: rows that this unit no longer needs.

    over: no row is left here, and the session has ended; alone: there is no other unit, and none is expected.
    """

    ticket: int
    unit: int
    rows: list[int]
    gone: list[int]
    over: bool = False
    alone: bool = False


class TakeRows(Struct, frozen=True):
    """Take rows over from another unit; the frames hold all their columns.

    source, ticket, partial, tokens, tags: see ``MovedRows``; outputs: most bytes of each column that is written later.
    """

    source: int
    ticket: int
    rows: list[int]
    header: BatchHeader
    partial: list[str]
    tokens: list[int]
    tags: list[dict[str, Tag]]
    outputs: dict[str, Bytes]
    wait_s: Seconds


class AdmitCells(Struct, frozen=True):
    """The entries that ``unit`` received under leases of this replica."""

    unit: Annotated[int, Meta(ge=0)]
    entries: list[NewCells]
