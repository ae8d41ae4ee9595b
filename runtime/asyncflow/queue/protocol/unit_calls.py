"""The calls of clients to units, of units to controllers, and of units to each other.

A unit that leaves asks the controller which of its rows go to which unit next (``AskMove``), and takes them there
(``TakeRows``); that unit tells the controller (``MovedRows``), whose answer moves them.

Invariant: as in ``calls``, every call can be sent again after its answer was lost; a ``MoveOrder`` voids earlier ones.
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
"""Rows that one put, or one item of a feed, stands for at most."""
CellBytes = Annotated[int, Meta(ge=0, lt=1 << 32)]
_GroupSize = Annotated[int, Meta(ge=1)]
ClientName = Annotated[bytes, Meta(min_length=8, max_length=64)]
Outcome: TypeAlias = Literal["complete", "return", "keep"]
"""What a write does with leased rows: complete them, return them, or hold on to them."""
GroupNumber = Annotated[int, Meta(ge=0, lt=1 << SERIAL_BITS)]


class Cells(Struct, frozen=True, kw_only=True):
    """Columns of some rows, as their unit tells of them. sizes: bytes of each row."""

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
    """Put rows; the frames hold their columns, ``header.rows`` says how many there are.

    client: name of the client that puts them, random bytes that no other has; group: the client's own number of the
    first group, the others follow it; tags: one set for each row, or none at all; outputs: most bytes of each column
    that is written to each row later; wait_s: for room for all of it; samples: which groups they are, where their
    creator numbers them instead of the client; attempt: of that creator.
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

    new: True where the row is new; on the wire empty when all are. Elsewhere the id is that of the row that was put so
    before or has this key already (its cells are as they were), or 0 where that is gone or its group was refused.
    """

    rows: list[int]
    new: list[bool] = []


class WriteRows(Struct, frozen=True):
    """Put columns of leased rows; those that are not completed by it are unfinished, and kept for the next holder.

    reason: why the rows are returned, for the ledger. What is held on to waits for no room.
    """

    lease: str
    rows: list[int]
    header: BatchHeader
    tags: list[dict[str, Tag]]
    outcome: Outcome
    wait_s: Seconds
    reason: str = ""


class FetchRows(Struct, frozen=True):
    """Get columns of rows."""

    rows: list[int]
    columns: list[str]


class Hello(Struct, frozen=True):
    """A unit asks for the epoch of its rows. address: where others reach it; epoch: that it had last, 0 for none."""

    unit: int
    incarnation: str
    limit: int
    address: str = ""
    epoch: int = 0


class Welcome(Struct, frozen=True):
    """controller: the epoch of the controller; epoch: that of the unit's rows; it must forget rows of any other.

    watch_s: how long the unit may be silent while it has nothing to say; controllers: how many may give leases.
    """

    controller: int
    epoch: int
    watch_s: float
    controllers: int = 1


class Session(Struct, frozen=True):
    """A unit and the controller that it speaks to, which refuses a session that it did not begin."""

    unit: int
    controller: int
    epoch: int

    @property
    def location(self) -> int:
        """Where the rows of this unit lie."""
        return location_at(self.epoch, self.unit)


class Announce(Struct, frozen=True):
    """Rows as a unit holds them. last: it has told of all that it held when the session began."""

    session: Session
    held: list[Held]
    last: bool


class LostRows(Struct, frozen=True):
    """Rows of a unit whose bytes its back end has lost, although the unit itself lives."""

    session: Session
    rows: list[int]


class NewRows(Struct, frozen=True, tag="new"):
    """Rows that a unit was given; see ``PutRows``."""

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
    """Columns of leased rows that a unit was given; see ``WriteRows``."""

    lease: str
    rows: list[int]
    cells: Cells
    tags: list[dict[str, Tag]]
    outcome: Outcome
    reason: str = ""


class MovedRows(Struct, frozen=True, tag="moved"):
    """Rows that came from ``source``, where they are no more once this is admitted. ticket: of ``MoveOrder``.

    partial: those of the columns that are unfinished; tokens, tags: of each row.
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
    """The entries that a unit was given since its last call, in order."""

    session: Session
    entries: list[Entry]


class EntryResult(Struct, frozen=True):
    """The result of an entry, for each row; error: that of ``to_wire`` when the whole entry is refused.

    rows: of ``NewRows`` that are not all ok, the ids to be told to whoever put them (see ``RowIds``).
    """

    ok: list[bool]
    error: dict[str, str] | None = None
    rows: list[int] = []

    def each(self, count: int) -> list[bool]:
        """Return what became of each of ``count`` rows."""
        return self.ok or [False] * count


def results_on(entries: Sized, results: list[EntryResult]) -> list[EntryResult]:
    """Return ``results`` on ``entries``. Raises ProtocolError where they are fewer or more."""
    if len(results) != len(entries):
        raise ProtocolError(f"{len(results)} results came on {len(entries)} entries")
    return results


class Watch(Struct, frozen=True):
    """A unit says how full it is and waits for orders.

    done: number of the last order that it carried out; used: bytes; held: rows.
    """

    session: Session
    done: int
    used: int
    wait_s: Seconds
    held: int = 0


class Orders(Struct, frozen=True):
    """Rows to free; number: of the last of these orders; leave: move all rows to other units."""

    number: int
    rows: list[int]
    leave: bool = False


class AskMove(Struct, frozen=True):
    """A unit that leaves asks what goes next.

    rows: the first of the ``held`` rows that it holds, of ``nbytes`` bytes; but: not to there, if there is another.
    """

    session: Session
    rows: list[int]
    held: Annotated[int, Meta(ge=0)]
    nbytes: Bytes
    but: int = NOWHERE


class MoveOrder(Struct, frozen=True):
    """Move ``rows`` to ``unit``. gone: those that are not needed here any more.

    over: nothing is left here, and the session has ended; alone: there is no other unit, nor is one awaited.
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
    """The entries that ``unit`` was given under leases of this replica."""

    unit: Annotated[int, Meta(ge=0)]
    entries: list[NewCells]
