"""Rows that are sent ahead: by the unit that has just told of them, to who waited for them, before it asks.

Invariant: a unit is only told to send rows of which it has told the controller, and which have not moved.
"""

from __future__ import annotations

from asyncflow.identity import home_of
from asyncflow.queue.controller.claims import Grant
from asyncflow.queue.protocol.runs import shrink
from asyncflow.queue.protocol.unit_calls import SendAhead


class SentAhead:
    """What the unit at ``home`` sends, which is being answered. orders: so far."""

    def __init__(self, home: int) -> None:
        self.orders: list[SendAhead] = []
        self._home = home

    def take(self, grant: Grant) -> bool:
        """Have the rows of a claim that was met sent ahead, if they lie there and it takes them; tell whether."""
        ahead, rows = grant.claim.ahead, grant.lot.rows
        if ahead is None or grant.lot.units or home_of(min(rows)) != self._home or home_of(max(rows)) != self._home:
            return False
        self.orders.append(SendAhead(ahead.seat, ahead.call, shrink(rows), ahead.columns))
        return True
