"""The calls of clients to units, and of units to the controller.

Invariant: as in ``calls``, every call can be sent again after its answer was lost.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from asyncflow.identity import home
from asyncflow.net.frames import BatchHeader
from asyncflow.queue.protocol.calls import Attempt, Bytes, Seconds
from asyncflow.queue.protocol.messages import SERIAL_BITS, RowMeta, Tag
from asyncflow.queue.protocol.runs import expand_equal, shrink_equal
from asyncflow.queue.protocol.sizes import MOST_BYTES

CellBytes = Annotated[int, Meta(ge=0, le=MOST_BYTES)]
_GroupSize = Annotated[int, Meta(ge=1)]
ClientName = Annotated[bytes, Meta(min_length=8, max_length=64)]
GroupNumber = Annotated[int, Meta(ge=0, lt=1 << SERIAL_BITS)]


class Cells(Struct, frozen=True, kw_only=True):
    """Columns of some rows, as their unit tells of them. sizes: bytes of each row, see ``sizes``."""

    dtypes: dict[str, str]
    sizes: dict[str, bytes]


class Held(Struct, frozen=True, kw_only=True):
    """A row as its unit holds it. columns, partial: bytes by column."""

    row: int
    columns: dict[str, CellBytes]
    partial: dict[str, CellBytes]
    tokens: int
    tags: dict[str, Tag]


class CreateRows(Struct, frozen=True):
    """Put new samples; the frames hold their columns in the order of ``metas``.

    outputs: most bytes of each column that is written to each of them later; wait_s: for room for all of it; attempt:
    of their creator; producer: who puts, and shares the room fairly with others.
    """

    metas: list[RowMeta]
    group_size: int
    header: BatchHeader
    outputs: dict[str, Bytes]
    wait_s: Seconds
    attempt: Attempt = 0
    producer: str = ""


class PutRows(Struct, frozen=True):
    """Put rows of an open partition; the frames hold their columns, ``header.rows`` says how many there are.

    client: name of who puts, random bytes that nobody else has; group: the client's own number of the first group, the
    others follow it; tags: one set a row, or none at all; outputs, wait_s: as for ``CreateRows``.
    """

    partition: str
    client: ClientName
    group: GroupNumber
    group_size: Annotated[int, Meta(ge=1)]
    header: BatchHeader
    tags: list[dict[str, Tag]]
    outputs: dict[str, Bytes]
    wait_s: Seconds
    producer: str = ""


class Numbers(Struct, frozen=True):
    """Ids of the rows that were put.

    new: True where the row is new; empty when all are. Elsewhere the id is that of the row that was put so before or
    has this key already (its cells are as they were), or 0 where it was put before and has been cleared.
    """

    rows: list[int]
    new: list[bool] = []


class WriteRows(Struct, frozen=True):
    """Put columns of leased rows. reason: empty to complete them, else to give them back with what there is."""

    lease: str
    rows: list[int]
    header: BatchHeader
    tags: list[dict[str, Tag]]
    reason: str
    wait_s: Seconds
    producer: str = ""


class FetchRows(Struct, frozen=True):
    """Get columns of rows."""

    rows: list[int]
    columns: list[str]


class Fetched(Struct, frozen=True):
    """The columns of the rows that were asked for, which the frames hold."""

    header: BatchHeader


class Hello(Struct, frozen=True):
    """A unit asks for the epoch of its rows. address: where others reach it."""

    unit: int
    incarnation: str
    limit: int
    address: str = ""


class Welcome(Struct, frozen=True):
    """controller: the epoch of the controller; epoch: that of the unit's rows; it must forget rows of any other.

    watch_s: how long the unit may be silent while it has nothing to say; controllers: how many may give leases.
    """

    controller: int
    epoch: int
    watch_s: float
    controllers: int = 1


class Session(Struct, frozen=True):
    """Who speaks to whom; the controller refuses one that it did not begin."""

    unit: int
    controller: int
    epoch: int

    @property
    def home(self) -> int:
        """Where the rows of this unit lie."""
        return home(self.epoch, self.unit)


class Announce(Struct, frozen=True):
    """Some of the rows that a unit holds. last: there are no others."""

    session: Session
    held: list[Held]
    last: bool


class Strangers(Struct, frozen=True):
    """Rows that nobody needs any more."""

    rows: list[int]


class LostRows(Struct, frozen=True):
    """Rows of a unit whose bytes its back end has lost, although the unit itself lives."""

    session: Session
    rows: list[int]


class NewRows(Struct, frozen=True, tag="new"):
    """Samples that a unit was given by an attempt of their creator."""

    metas: list[RowMeta]
    rows: list[int]
    group_size: _GroupSize
    cells: Cells
    attempt: Attempt = 0


class OpenRows(Struct, frozen=True, tag="open"):
    """Rows of an open partition that a unit was given; see ``PutRows``."""

    partition: str
    client: ClientName
    group: GroupNumber
    group_size: _GroupSize
    rows: list[int]
    cells: Cells
    tags: list[dict[str, Tag]]


class NewCells(Struct, frozen=True, tag="cells"):
    """Columns of leased rows that a unit was given, to complete them or, with a reason, to give them back."""

    lease: str
    rows: list[int]
    cells: Cells
    tags: list[dict[str, Tag]]
    reason: str


class MovedRows(Struct, frozen=True, tag="moved"):
    """Rows that came from ``home``, where they are no more once this is admitted. ticket: of ``Leg``.

    partial: those of the columns that are unfinished; tokens, tags: of each row.
    """

    home: int
    ticket: int
    rows: list[int]
    cells: Cells
    partial: list[str]
    tokens: list[int]
    tags: list[dict[str, Tag]]


Entry: TypeAlias = NewRows | OpenRows | NewCells | MovedRows
"""Their ``rows`` are as of ``shrink``."""


class Admit(Struct, frozen=True):
    """What a unit was given since its last call, in order."""

    session: Session
    entries: list[Entry]


class Verdict(Struct, frozen=True):
    """What became of each row of an entry; error: that of ``to_wire`` when the whole entry is refused.

    rows: of ``OpenRows`` that are not all ok, the ids to be told to their creator (see ``Numbers``). It crosses the
    socket ``short``.
    """

    ok: list[bool]
    error: dict[str, str] | None = None
    rows: list[int] = []

    def short(self) -> Verdict:
        """Return the same in few bytes."""
        return Verdict(shrink_equal(self.ok), self.error, self.rows) if len(self.ok) > 1 else self

    def each(self, count: int) -> list[bool]:
        """Return what became of each of ``count`` rows."""
        return expand_equal(self.ok, count) or [False] * count


class Admitted(Struct, frozen=True):
    """A verdict for each entry."""

    verdicts: list[Verdict]


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
