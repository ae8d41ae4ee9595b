"""Sessions with storage units, on the controller's side: the units, their fill, and the rows that each must still free.

Invariants: orders are kept until the unit has confirmed them, so a lost answer loses none. A unit is ordered to free a
row only when the ledger contains the reason. A unit counts as lost only after a silence of ``lost_s`` while the
controller itself ran.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from asyncflow.errors import Fenced
from asyncflow.identity import epoch_of, location_of, unit_at
from asyncflow.queue.protocol.calls import Drain
from asyncflow.queue.protocol.messages import UnitState, UnitView
from asyncflow.queue.protocol.unit_calls import AskMove, Hello, MoveOrder, Orders, Session, Watch, Welcome
from asyncflow.queue.table.moves import Room
from asyncflow.queue.table.state import Row
from asyncflow.queue.table.table import Table

log = logging.getLogger(__name__)

_WATCH_S = 1.0
_REMOVED_S = 2.0
"""Seconds to wait for a unit of the ledger that the queue no longer has, in case it still drains."""
_SILENT = 3
"""A unit counts as silent after this multiple of the time that it may be idle without a call."""
_ORDERS = 10_000


@dataclass(slots=True)
class _Unit:
    """A storage unit. held: number of rows that it reported.

    to_free: rows that it must free; ``first`` is the number of the first one.
    """

    epoch: int
    seen: float
    used: int = 0
    limit: int = 0
    held: int = 0
    synced: bool = False
    address: str = ""
    first: int = 1
    to_free: list[int] = field(default_factory=list)
    watching: tuple[asyncio.Future[Orders], asyncio.TimerHandle] | None = None

    def orders(self, *, leave: bool) -> Orders:
        """Return the first of the rows that it must free."""
        rows = self.to_free[:_ORDERS]
        return Orders(self.first + len(rows) - 1, rows, leave)

    def confirm(self, number: int) -> None:
        """Note that the unit has freed the rows up to this number."""
        if 0 < (rows := number + 1 - self.first) <= len(self.to_free):
            del self.to_free[:rows]
            self.first += rows


def _answer(future: asyncio.Future[Orders], orders: Orders) -> None:
    if not future.done():
        future.set_result(orders)


class Sessions:
    """All units.

    lost_s: seconds of silence after which a unit's rows are given up; units: number of units, if known.

    next_deadline: no unit is lost before this time, which may be too early; infinite without units.
    """

    def __init__(self, table: Table, *, lost_s: float, units: int | None = None) -> None:
        self._table = table
        self._lost_s = lost_s
        self._expected = units
        self._units: dict[int, _Unit] = {}
        self._watch_s = min(_WATCH_S, lost_s / 4)
        self.next_deadline = math.inf

    def start(self, now: float) -> None:
        """Wait for the units in the ledger to come back, but only briefly for units that the queue no longer has."""
        since = now - max(0.0, self._lost_s - _REMOVED_S)
        self._units = {
            index: _Unit(unit.epoch, now if self._expected is None or index < self._expected else since)
            for index, unit in self._table.state.units.items()
        }
        self.next_deadline = self._first_deadline()

    def __len__(self) -> int:
        return sum(unit.synced for unit in self._units.values())

    def greet(self, hello: Hello, now: float) -> Welcome:
        """Start a session with a unit; the rows of an earlier incarnation of it are lost.

        Raises Fenced for an incarnation that was itself replaced: it must not take over from its successor.
        """
        joined = self._table.state.units.get(hello.unit)
        if joined is not None and joined.incarnation != hello.incarnation and 0 < hello.epoch < joined.epoch:
            hint = "This process must end: another one has replaced it"
            raise Fenced("another incarnation has replaced this one", where=f"storage unit {hello.unit}", hint=hint)
        epoch = self._table.join_unit(hello.unit, hello.incarnation)
        known = self._units.get(hello.unit)
        if known is None or known.epoch != epoch:
            self._units[hello.unit] = known = _Unit(epoch, now)
        known.seen, known.limit, known.address = now, hello.limit, hello.address
        self.next_deadline = min(self.next_deadline, now + self._lost_s)
        return Welcome(self._table.controller, epoch, self._watch_s, self._table.controllers)

    def check(self, session: Session, now: float) -> _Unit:
        """Return the unit of a session. Raises Fenced for a session of another controller, or one that is over."""
        unit = self._units.get(session.unit)
        if session.controller != self._table.controller or unit is None or unit.epoch != session.epoch:
            raise Fenced("this session is over", where=f"storage unit {session.unit}", hint="The unit starts a new one")
        unit.seen = now
        return unit

    def synced(self, session: Session) -> None:
        """Note that a unit has reported all of its rows; rows that it did not name are lost."""
        missing = self._table.miss(session.location)
        self._units[session.unit].synced = True
        if missing:
            log.warning("storage unit %d came back without %d rows", session.unit, missing)

    def order(self, rows: Iterable[Row], *, after: asyncio.Future[None] | None = None) -> None:
        """Order the units to free ``rows``; rows of lost units are ignored.

        after: send the orders when this future succeeds, but one loop iteration later: results that wait for it are
        sent first, because a unit ignores orders for rows whose result it has not received.
        """
        if after is not None:
            loop = asyncio.get_running_loop()
            after.add_done_callback(lambda done: None if done.exception() else loop.call_soon(self.order, rows))
            return
        by_location: dict[int, list[int]] = {}
        for row in rows:
            by_location.setdefault(row.moved or location_of(row.row), []).append(row.row)
        for location, numbers in by_location.items():
            unit = self._units.get(unit_at(location))
            if unit is not None and unit.epoch == epoch_of(location):
                unit.to_free += numbers
                self._send_orders(unit)

    def orders(self, watch: Watch, now: float) -> Orders | asyncio.Future[Orders]:
        """Return the rows that a unit must free, as soon as there are any, or after ``wait_s``."""
        unit = self.check(watch.session, now)
        unit.used, unit.held = watch.used, watch.held
        unit.confirm(watch.done)
        if unit.to_free:
            return unit.orders(leave=self._leaving(unit))
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Orders] = loop.create_future()
        timer = loop.call_later(watch.wait_s, _answer, future, Orders(watch.done, [], self._leaving(unit)))
        unit.watching = (future, timer)
        return future

    def _send_orders(self, unit: _Unit) -> None:
        if unit.watching is not None:
            future, timer = unit.watching
            unit.watching = None
            timer.cancel()
            _answer(future, unit.orders(leave=self._leaving(unit)))

    def _leaving(self, unit: _Unit) -> bool:
        return unit.epoch in self._table.state.leaving

    def views(self, now: float) -> list[UnitView]:
        """Describe all units."""
        return [
            UnitView(
                unit=index,
                state=self._state(unit, now),
                rows=unit.held,
                bytes=unit.used,
                limit=unit.limit,
                epoch=unit.epoch,
                address=unit.address,
            )
            for index, unit in sorted(self._units.items())
        ]

    def _state(self, unit: _Unit, now: float) -> UnitState:
        if self._leaving(unit):
            return "leaving"
        if not unit.synced:
            return "away"
        return "silent" if now - unit.seen > _SILENT * self._watch_s else "serving"

    def drain(self, drain: Drain) -> None:
        """Drain a unit."""
        if self._table.moves.drain(drain.unit, drain.incarnation):
            log.info("storage unit %d drains: its rows move to other units", drain.unit)
            self._send_orders(self._units[drain.unit])

    def next_order(self, ask: AskMove, now: float) -> MoveOrder:
        """Return the next move of a draining unit; its session ends when no row is left."""
        self.check(ask.session, now)
        rooms = {
            index: Room(unit.held, unit.limit - unit.used)
            for index, unit in self._units.items()
            if index != ask.session.unit and unit.synced and not self._leaving(unit)
        }
        order = self._table.moves.next_order(ask, rooms)
        if order.over:
            log.info("storage unit %d has left; no row was lost", ask.session.unit)
            del self._units[ask.session.unit]
            self._table.lose_unit(ask.session.unit)
        elif order.rows:
            self._units[order.unit].held += len(order.rows)
        return order

    def lose_silent(self, now: float) -> None:
        """End the sessions of the units that have been silent for too long."""
        for index, unit in list(self._units.items()):
            if now - unit.seen >= self._lost_s:
                log.warning("storage unit %d was silent for %g s: its rows are given up", index, self._lost_s)
                del self._units[index]
                self._table.lose_unit(index)
        self.next_deadline = self._first_deadline()

    def excuse(self, now: float) -> None:
        """Restart the silence of all units, because the controller itself did not run."""
        for unit in self._units.values():
            unit.seen = now

    def _first_deadline(self) -> float:
        return min([unit.seen for unit in self._units.values()], default=math.inf) + self._lost_s
