"""The calls about units that come and go, and about rows that lie elsewhere than where they were put.

A unit that leaves asks the controller for a *leg* (``AskLeg``), which rows go to which unit next, and takes them there
(``TakeRows``); that unit tells the controller (``MovedRows``), whose word moves them.

Invariant: as in ``calls``, every call can be sent again after its answer was lost: a leg makes those before it void.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from asyncflow.net.frames import BatchHeader
from asyncflow.queue.protocol.calls import Bytes, Seconds
from asyncflow.queue.protocol.messages import Tag
from asyncflow.queue.protocol.unit_calls import Session

NOWHERE = -1
"""The unit of a row that is not there, and of a leg that has no unit to go to."""


class Drain(Struct, frozen=True):
    """A unit shall leave. incarnation: only this one of it, or any (empty)."""

    unit: Annotated[int, Meta(ge=0)]
    incarnation: str = ""


class AskWhere(Struct, frozen=True):
    """A question: where these rows lie."""

    rows: list[int]


class Whereabouts(Struct, frozen=True):
    """The unit of each row, or one for all that have the same; NOWHERE for a row that is not there."""

    units: list[int]


UnitState: TypeAlias = Literal["serving", "silent", "leaving", "away"]


class UnitView(Struct, frozen=True, kw_only=True):
    """A unit as the controller knows it. away: it has not told what it holds since it, or the controller, began.

    silent: it has not been heard for several times as long as it should be; rows: that it holds, those still to be
    moved where it leaves; bytes: used; limit: most bytes; epoch: of its rows.
    """

    unit: int
    state: UnitState
    rows: int
    bytes: int
    limit: int
    epoch: int = 0
    address: str = ""


class Units(Struct, frozen=True):
    """All units, by index."""

    units: list[UnitView]


class Shares(Struct, frozen=True):
    """Rows that each unit was given, to be compared with each other; turn: of whom asks, to be told from others."""

    given: dict[int, int]
    turn: int


class AskLeg(Struct, frozen=True):
    """A unit that leaves asks what goes next.

    rows: the first of the ``held`` rows that it holds, of ``nbytes`` bytes; but: not to there.
    """

    session: Session
    rows: list[int]
    held: Annotated[int, Meta(ge=0)]
    nbytes: Bytes
    but: int = NOWHERE


class Leg(Struct, frozen=True):
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

    home, ticket, partial, tokens, tags: see ``MovedRows``; outputs: most bytes of each column that is written later.
    """

    home: int
    ticket: int
    rows: list[int]
    header: BatchHeader
    partial: list[str]
    tokens: list[int]
    tags: list[dict[str, Tag]]
    outputs: dict[str, Bytes]
    wait_s: Seconds
    producer: str = ""
