"""The calls of clients to units, and of units to the controller.

Invariant: as in ``calls``, every call can be sent again after its answer was lost.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from asyncflow.net.frames import BatchHeader
from asyncflow.queue.calls import Attempt, Bytes, Seconds
from asyncflow.queue.messages import RowMeta, Tag
from asyncflow.queue.table import Cells, Held


class CreateRows(Struct, frozen=True):
    """Put new samples; the frames hold their columns in the order of ``metas``.

    outputs: most bytes of each column that is written to each of them later; wait_s: for room for all of it; attempt:
    of their creator.
    """

    metas: list[RowMeta]
    group_size: int
    header: BatchHeader
    outputs: dict[str, Bytes]
    wait_s: Seconds
    attempt: Attempt = 0


class WriteRows(Struct, frozen=True):
    """Put columns of leased rows. reason: empty to complete them, else to give them back with what there is."""

    lease: str
    rows: list[int]
    header: BatchHeader
    tags: list[dict[str, Tag]]
    reason: str
    wait_s: Seconds


class FetchRows(Struct, frozen=True):
    """Get columns of rows."""

    rows: list[int]
    columns: list[str]


class Fetched(Struct, frozen=True):
    """The frames hold the columns."""

    header: BatchHeader


class Hello(Struct, frozen=True):
    """A unit asks for the epoch of its rows."""

    unit: int
    incarnation: str
    limit: int


class Welcome(Struct, frozen=True):
    """controller: the epoch of the controller; epoch: that of the unit's rows; it must forget rows of any other.

    watch_s: how long the unit may be silent while it has nothing to say.
    """

    controller: int
    epoch: int
    watch_s: float


class Session(Struct, frozen=True):
    """Who speaks to whom; the controller refuses one that it did not begin."""

    unit: int
    controller: int
    epoch: int


class Announce(Struct, frozen=True):
    """Some of the rows that a unit holds. last: there are no others."""

    session: Session
    held: list[Held]
    last: bool


class Strangers(Struct, frozen=True):
    """Rows that nobody needs any more."""

    rows: list[int]


class NewRows(Struct, frozen=True, tag="new"):
    """Samples that a unit was given by an attempt of their creator."""

    metas: list[RowMeta]
    rows: list[int]
    group_size: int
    cells: Cells
    attempt: Attempt = 0


class NewCells(Struct, frozen=True, tag="cells"):
    """Columns of leased rows that a unit was given, to complete them or, with a reason, to give them back."""

    lease: str
    rows: list[int]
    cells: Cells
    tags: list[dict[str, Tag]]
    reason: str


Entry: TypeAlias = NewRows | NewCells


class Admit(Struct, frozen=True):
    """What a unit was given since its last call, in order."""

    session: Session
    entries: list[Entry]


class Verdict(Struct, frozen=True):
    """What became of each row of an entry; error: that of ``to_wire`` when the whole entry is refused."""

    ok: list[bool]
    error: dict[str, str] | None = None


class Admitted(Struct, frozen=True):
    """A verdict for each entry."""

    verdicts: list[Verdict]


class Watch(Struct, frozen=True):
    """A unit says how full it is and waits for orders. done: number of the last order that it carried out."""

    session: Session
    done: int
    used: int
    wait_s: Seconds


class Orders(Struct, frozen=True):
    """Rows to free; number: of the last of these orders."""

    number: int
    rows: list[int]
