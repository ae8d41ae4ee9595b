"""Rows that move from a unit that leaves to others: which go where, and when they lie there.

A row moves in one step: when the unit that took it over has told of it, and if its *ticket* still holds. Tickets are
those of the last leg that the unit which leaves was given; so once it asks again, whatever it sent before comes too
late, and it may let the rows that did not move be written to.

Invariants: a row lies at one home at any time, and changes it only here; the rows of a group go together; no ticket
outlives its controller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncflow.errors import Refused
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.protocol.moving_calls import NOWHERE, Leg
from asyncflow.queue.table.books import Books
from asyncflow.queue.table.state import Row

_TICKET_BITS = 40


@dataclass(frozen=True, slots=True)
class Room:
    """A unit to which rows may go. rows: that it holds; free: bytes."""

    rows: int
    free: int


class Moves:
    """The commands that move rows."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._tickets: dict[int, int] = {}
        self._given = 0

    def start(self) -> None:
        """Begin to give tickets, in the present epoch, which no other controller has."""
        self._given = self._books.epoch << _TICKET_BITS

    def drain(self, unit: int, incarnation: str = "") -> bool:
        """Have a unit leave; False where it does so already. Refused where there is no such (incarnation of a) unit."""
        known = self._books.units.get(unit)
        if known is None or incarnation not in ("", known.incarnation):
            hint = f"There are {', '.join(map(str, sorted(self._books.units))) or 'none'}"
            raise Refused(f"there is no storage unit {unit}", where="controller", hint=hint)
        if known.epoch in self._books.leaving:
            return False
        self._books.record(ev.UnitLeaving(known.epoch, unit))
        return True

    def where(self, numbers: Sequence[int]) -> list[int]:
        """Return the unit of each row, NOWHERE for one that is not there."""
        rows = self._books.rows
        return [row.unit if (row := rows.get(number)) is not None else NOWHERE for number in numbers]

    def leg(
        self,
        home: int,
        asked: Sequence[int],
        *,
        held: int,
        nbytes: int,
        rooms: Mapping[int, Room],
        but: int = NOWHERE,
    ) -> Leg:
        """Say what the unit at ``home`` moves next; what it was told before is void.

        asked: the first of the ``held`` rows that it holds, of ``nbytes`` bytes; rooms: the units that take rows; but:
        not to there, if there is another. No unit gets more rows than it has when all have the same.
        """
        self._tickets.pop(home, None)
        known = [self._books.rows.get(number) for number in asked]
        mine = [row for row in known if row is not None and row.home == home]
        gone = [number for number, row in zip(asked, known, strict=True) if row is None or row.home != home]
        alone = not any(unit.epoch not in self._books.leaving for unit in self._books.units.values())
        unit = choose(rooms, nbytes=nbytes, but=but)
        if not mine or unit == NOWHERE:
            over = not asked and not any(row.home == home for row in self._books.rows.values())
            return Leg(0, unit, [], gone, over=over, alone=alone)
        self._given += 1
        self._tickets[home] = self._given
        level = -(-(held + sum(room.rows for room in rooms.values())) // len(rooms))
        most = max(1, level - rooms[unit].rows)
        return Leg(self._given, unit, list(self._together(mine[:most])), gone, alone=alone)

    def _together(self, rows: Sequence[Row]) -> dict[int, Row]:
        """Return ``rows`` by id with what there is of their groups."""
        there = self._books.rows
        whole = (each for row in rows for each in row.group.rows)
        return {each.row: each for each in whole if there.get(each.row) is each}

    def take(self, to: int, numbers: Sequence[int], *, source: int, ticket: int) -> list[bool]:
        """Let rows that lie at home ``source`` lie at ``to``, if the ticket holds; tell which lie there now."""
        rows = [self._books.rows.get(number) for number in numbers]
        if ticket == self._tickets.get(source):
            moving = [row.row for row in rows if row is not None and row.home == source]
            if moving:
                self._books.record(ev.Moved(to, moving))
        return [row is not None and row.home == to for row in rows]


def choose(rooms: Mapping[int, Room], *, nbytes: int, but: int = NOWHERE) -> int:
    """Return the unit with the fewest rows, of those with room for ``nbytes`` if there are such; NOWHERE for none."""
    others = {unit: room for unit, room in rooms.items() if unit != but} or rooms
    fitting = {unit: room for unit, room in others.items() if room.free >= nbytes} or others
    return min(fitting, key=lambda unit: (fitting[unit].rows, unit), default=NOWHERE)
