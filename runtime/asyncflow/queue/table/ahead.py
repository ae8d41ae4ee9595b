"""Rows that are sent ahead: by the unit that has just told of them, to who waited for them and did not ask it yet.

Invariant: a unit is told to send only rows that it holds, and of which the controller knows by the time it is told.
"""

from __future__ import annotations

from asyncflow.identity import home_of
from asyncflow.queue.protocol.runs import shrink
from asyncflow.queue.protocol.unit_calls import FetchRows, SendAhead
from asyncflow.queue.table.claims import Grant


class SentAhead:
    """What the unit at ``home`` is to send, which waits for an answer. orders: so far; they go with that answer."""

    def __init__(self, home: int) -> None:
        self.orders: list[SendAhead] = []
        self._home = home

    def take(self, grant: Grant) -> bool:
        """Have the rows of a claim sent to who made it, if that one takes them so and all of them lie there."""
        ahead, lot = grant.claim.ahead, grant.lot
        if ahead is None or lot.units or not home_of(min(lot.rows)) == home_of(max(lot.rows)) == self._home:
            return False
        self.orders.append(SendAhead(ahead.seat, ahead.call, FetchRows(shrink(lot.rows), ahead.columns)))
        return True
