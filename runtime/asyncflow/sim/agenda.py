"""The order of a simulated run: events by their time, and objects that look again once something has changed.

Invariants: time never goes back; events of the same moment happen in the order in which they were planned, and all of
them before anybody looks; who is to look does so once, in the order in which it was told to.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Protocol


class Looking(Protocol):
    """An object whose decisions depend on what others do."""

    def look(self) -> None:
        """Do what may be done now."""


class Agenda:
    """Events to come. now: the present virtual second."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._planned = 0
        self._told: dict[Looking, None] = {}

    def at(self, when: float, action: Callable[..., None], *given: Any) -> None:
        """Plan ``action(*given)`` for a moment, at the earliest for the present one."""
        self._planned += 1
        heapq.heappush(self._events, (max(when, self.now), self._planned, action, given))

    def after(self, seconds: float, action: Callable[..., None], *given: Any) -> None:
        """Plan ``action(*given)`` for so many seconds later."""
        self.at(self.now + seconds, action, *given)

    def tell(self, whom: Looking) -> None:
        """Wake ``whom`` before time goes on."""
        self._told[whom] = None

    def run(self, *, over: Callable[[], bool]) -> bool:
        """Go on until the run is ``over``, or nothing happens any more; return which."""
        events, told = self._events, self._told
        while True:
            while told:
                whom = next(iter(told))
                del told[whom]
                whom.look()
            if over():
                return True
            if not events:
                return False
            self.now = events[0][0]
            while events and events[0][0] == self.now:
                _, _, action, given = heapq.heappop(events)
                action(*given)
