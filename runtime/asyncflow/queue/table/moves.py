"""Where rows and tasks go: rows that move from a unit that drains to others, and the controller of a new task.

A row moves in one step: when the unit that took it over has told of it, and if its *ticket* still holds. Tickets are
those of the last order that the unit which drains was given; so once it asks again, whatever it sent before comes too
late, and it may let the rows that did not move be written to.

Invariants: a row lies at one place at any time, and changes it only here; the rows of a group go together; no ticket
outlives its controller; tasks that end rows, by training or clearing them, are the first controller's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncflow.errors import Refused
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.protocol.calls import NOWHERE
from asyncflow.queue.protocol.messages import TaskSpec
from asyncflow.queue.protocol.unit_calls import AskMove, MovedRows, MoveOrder
from asyncflow.queue.table.apply import QueueState

_TICKET_BITS = 40


@dataclass(frozen=True, slots=True)
class Room:
    """A unit to which rows may go. rows: that it holds; free: bytes."""

    rows: int
    free: int


class RowMoves:
    """The commands that move rows."""

    def __init__(self, state: QueueState) -> None:
        self._state = state
        self._tickets: dict[int, int] = {}
        self._given = 0

    def start(self) -> None:
        """Begin to give tickets, in the present epoch, which no other controller has."""
        self._given = self._state.epoch << _TICKET_BITS

    def drain(self, unit: int, incarnation: str = "") -> bool:
        """Drain a unit; False where it drains already. Refused where there is no such (incarnation of a) unit."""
        known = self._state.units.get(unit)
        if known is None or incarnation not in ("", known.incarnation):
            hint = f"There are {', '.join(map(str, sorted(self._state.units))) or 'none'}"
            raise Refused(f"there is no storage unit {unit}", where="controller", hint=hint)
        if known.epoch in self._state.leaving:
            return False
        self._state.record(ev.UnitLeaving(known.epoch, unit))
        return True

    def where(self, numbers: Sequence[int]) -> list[int]:
        """Return the unit of each row, NOWHERE for one that is not there."""
        rows = self._state.rows
        return [row.unit if (row := rows.get(number)) is not None else NOWHERE for number in numbers]

    def next_order(self, ask: AskMove, rooms: Mapping[int, Room]) -> MoveOrder:
        """Return what the unit that asks moves next, with groups whole; what it was told before is void.

        rooms: the units that take rows, none of which gets more than it has when all have the same.
        """
        location, there = ask.session.location, self._state.rows
        self._tickets.pop(location, None)
        known = [there.get(number) for number in ask.rows]
        mine = [row for row in known if row is not None and row.location == location]
        gone = [number for number, row in zip(ask.rows, known, strict=True) if row is None or row.location != location]
        alone = not any(unit.epoch not in self._state.leaving for unit in self._state.units.values())
        unit = choose(rooms, nbytes=ask.nbytes, but=ask.but)
        if not mine or unit == NOWHERE:
            over = not ask.rows and not any(row.location == location for row in there.values())
            return MoveOrder(0, unit, [], gone, over=over, alone=alone)
        self._given += 1
        self._tickets[location] = self._given
        level = -(-(ask.held + sum(room.rows for room in rooms.values())) // len(rooms))
        most = max(1, level - rooms[unit].rows)
        whole = (each for row in mine[:most] for each in row.group.rows)
        rows = dict.fromkeys(each.row for each in whole if there.get(each.row) is each)
        return MoveOrder(self._given, unit, list(rows), gone, alone=alone)

    def take(self, to: int, entry: MovedRows) -> list[bool]:
        """Move rows to location ``to``, if the ticket holds; return which lie there now."""
        rows = [self._state.rows.get(number) for number in entry.rows]
        if entry.ticket == self._tickets.get(entry.source):
            moving = [row.row for row in rows if row is not None and row.location == entry.source]
            if moving:
                self._state.record(ev.Moved(to, moving))
        return [row is not None and row.location == to for row in rows]


def choose(rooms: Mapping[int, Room], *, nbytes: int, but: int = NOWHERE) -> int:
    """Return the unit with the fewest rows, of those with room for ``nbytes`` if there are such; NOWHERE for none."""
    others = {unit: room for unit, room in rooms.items() if unit != but} or rooms
    fitting = {unit: room for unit, room in others.items() if room.free >= nbytes} or others
    return min(fitting, key=lambda unit: (fitting[unit].rows, unit), default=NOWHERE)


def ends_rows(spec: TaskSpec) -> bool:
    """Tell whether the task ends rows."""
    return spec.kind == "gang" or spec.clears


def place(state: QueueState, spec: TaskSpec, controllers: int) -> int:
    """Return the controller for a new task; the primary only where it has fewer tasks than all others."""
    if controllers == 1 or ends_rows(spec):
        return 0
    tasks: Counter[int] = Counter()
    for partition in state.partitions.values():
        tasks[0] += len(partition.queues)
        tasks.update(there.controller for there in partition.elsewhere.values())
    return min(range(controllers), key=lambda index: (tasks[index], index == 0, index))
