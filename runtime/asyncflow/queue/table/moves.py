"""Placement of rows and tasks: rows that move away from a draining unit, and the controller of a new task.

A row moves in one step: when the unit that took it over reports it, if its *ticket* is still valid. Only the ticket of
the last order given to the draining unit is valid. So once that unit has requested the next order, no earlier order
takes effect, and it may accept writes to the rows that did not move.

Invariants: a row is at one location at any time, and only this module changes it. The rows of a group move together. No
ticket outlives its controller. Tasks that end rows, by training or clearing them, belong to the first controller.
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
    """A unit that can take rows. rows: number of rows that it holds; free: its free bytes."""

    rows: int
    free: int


class RowMoves:
    """The commands that move rows."""

    def __init__(self, state: QueueState) -> None:
        self._state = state
        self._tickets: dict[int, int] = {}
        self._last_ticket = 0

    def start(self) -> None:
        """Start to issue tickets in the current epoch, which no other controller has."""
        self._last_ticket = self._state.epoch << _TICKET_BITS

    def drain(self, unit: int, incarnation: str = "") -> bool:
        """Drain a unit; return False if it already drains. Raises Refused if no such unit, or incarnation, exists."""
        known = self._state.units.get(unit)
        if known is None or incarnation not in ("", known.incarnation):
            hint = f"There are {', '.join(map(str, sorted(self._state.units))) or 'none'}"
            raise Refused(f"there is no storage unit {unit}", where="controller", hint=hint)
        if known.epoch in self._state.leaving:
            return False
        self._state.record(ev.UnitLeaving(known.epoch, unit))
        return True

    def where(self, numbers: Sequence[int]) -> list[int]:
        """Return the unit of each row, NOWHERE for a row that does not exist."""
        rows = self._state.rows
        return [row.unit if (row := rows.get(number)) is not None else NOWHERE for number in numbers]

    def next_order(self, ask: AskMove, rooms: Mapping[int, Room]) -> MoveOrder:
        """Return the next rows that the requesting unit moves, in whole groups; this voids its previous order.

        rooms: the units that take rows. A unit gets at least one group, but otherwise not more than an equal share.
        """
        location, rows_by_id = ask.session.location, self._state.rows
        self._tickets.pop(location, None)
        known = [rows_by_id.get(number) for number in ask.rows]
        own = [row for row in known if row is not None and row.location == location]
        gone = [number for number, row in zip(ask.rows, known, strict=True) if row is None or row.location != location]
        alone = not any(unit.epoch not in self._state.leaving for unit in self._state.units.values())
        unit = choose(rooms, nbytes=ask.nbytes, but=ask.but)
        if not own or unit == NOWHERE:
            over = not ask.rows and not any(row.location == location for row in rows_by_id.values())
            return MoveOrder(0, unit, [], gone, over=over, alone=alone)
        self._last_ticket += 1
        self._tickets[location] = self._last_ticket
        level = -(-(ask.held + sum(room.rows for room in rooms.values())) // len(rooms))
        most = max(1, level - rooms[unit].rows)
        whole = (each for row in own[:most] for each in row.group.rows)
        rows = dict.fromkeys(each.row for each in whole if rows_by_id.get(each.row) is each)
        return MoveOrder(self._last_ticket, unit, list(rows), gone, alone=alone)

    def take(self, to: int, entry: MovedRows) -> list[bool]:
        """Move rows to location ``to`` if the ticket is valid; return which of them are now there."""
        rows = [self._state.rows.get(number) for number in entry.rows]
        if entry.ticket == self._tickets.get(entry.source):
            moving = [row.row for row in rows if row is not None and row.location == entry.source]
            if moving:
                self._state.record(ev.Moved(to, moving))
        return [row is not None and row.location == to for row in rows]


def choose(rooms: Mapping[int, Room], *, nbytes: int, but: int = NOWHERE) -> int:
    """Return the unit with the fewest rows, preferring units with ``nbytes`` free; NOWHERE if ``rooms`` is empty."""
    others = {unit: room for unit, room in rooms.items() if unit != but} or rooms
    fitting = {unit: room for unit, room in others.items() if room.free >= nbytes} or others
    return min(fitting, key=lambda unit: (fitting[unit].rows, unit), default=NOWHERE)


def ends_rows(spec: TaskSpec) -> bool:
    """Return whether the task ends rows."""
    return spec.kind == "gang" or spec.clears


def place(state: QueueState, spec: TaskSpec, controllers: int) -> int:
    """Return the controller for a new task; the primary only if it has fewer tasks than each other controller."""
    if controllers == 1 or ends_rows(spec):
        return 0
    tasks: Counter[int] = Counter()
    for partition in state.partitions.values():
        tasks[0] += len(partition.queues)
        tasks.update(remote.controller for remote in partition.elsewhere.values())
    return min(range(controllers), key=lambda index: (tasks[index], index == 0, index))
