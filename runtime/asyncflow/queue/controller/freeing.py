"""Answers that wait until storage units have freed what they were told to free.

Who clears rows and has the answer may so put as much at once: the room is there, and so are the pages in shared memory
that it has used before.

Invariant: none waits for longer than ``_WAIT_S``, so a unit that does nothing holds up nobody for more than a moment.
"""

from __future__ import annotations

from typing import Any, TypeVar

from asyncflow.net.deadlines import Deadlines
from asyncflow.net.later import Later

T = TypeVar("T")
_WAIT_S = 0.2


class Freeing:
    """The answers of one controller that wait. A unit is named by its epoch."""

    def __init__(self) -> None:
        self._waiting: dict[Later[Any], tuple[dict[int, int], Any]] = {}
        self._deadlines = Deadlines()

    def give(self, answer: T, orders: dict[int, int], *, now: float) -> Later[T]:
        """Return ``answer`` when each of these units has carried out its order of this number."""
        later: Later[T] = Later()
        deadline = self._deadlines.add(now + _WAIT_S, lambda: later.set_result(answer))
        self._waiting[later] = orders, answer

        def forget(_: object) -> None:
            self._deadlines.drop(deadline)
            del self._waiting[later]

        later.add_done_callback(forget)
        return later

    def carried_out(self, unit: int, number: int) -> None:
        """Note that a unit has carried out its orders up to this number."""
        for later, (orders, answer) in list(self._waiting.items()):
            if orders.get(unit, number + 1) <= number:
                del orders[unit]
                if not orders:
                    later.set_result(answer)

    def close(self) -> None:
        """Let those that wait wait."""
        self._deadlines.close()
