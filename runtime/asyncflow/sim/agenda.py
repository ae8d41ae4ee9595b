"""The event queue of a simulated run: timed events, and objects that react to changes.

Invariants: time never goes back. Events of the same time happen in the order in which they were scheduled, all of them
before any object reacts. A woken object reacts once, in the order of waking.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Protocol


class Reactive(Protocol):
    """An object whose decisions depend on other objects."""

    def react(self) -> None:
        """Do everything that is possible now."""


class Agenda:
    """Scheduled events. now: the current virtual second."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0
        self._woken: dict[Reactive, None] = {}

    def at(self, when: float, action: Callable[..., None], *arguments: Any) -> None:
        """Schedule ``action(*arguments)`` for a time, at the earliest for the current time."""
        self._scheduled += 1
        heapq.heappush(self._events, (max(when, self.now), self._scheduled, action, arguments))

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Schedule ``action(*arguments)`` in ``seconds``."""
        self.at(self.now + seconds, action, *arguments)

    def wake(self, process: Reactive) -> None:
        """Schedule a reaction of ``process`` at the current time, before time advances."""
        self._woken[process] = None

    def run(self, *, over: Callable[[], bool]) -> bool:
        """Run until the run is ``over`` or no event is left; return whether it is over."""
        events, woken = self._events, self._woken
        while True:
            while woken:
                process = next(iter(woken))
                del woken[process]
                process.react()
            if over():
                return True
            if not events:
                return False
            self.now = events[0][0]
            while events and events[0][0] == self.now:
                _, _, action, arguments = heapq.heappop(events)
                action(*arguments)
