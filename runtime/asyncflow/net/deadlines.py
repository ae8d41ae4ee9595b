"""Many deadlines with one timer of the loop, as nearly all of them are dropped long before they come.

Invariants: a deadline that was not dropped is called once, never before its time; memory is that of those which are
still to come, within a factor of two.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import Callable
from typing import Any, TypeAlias

log = logging.getLogger(__name__)

_SLACK = 64

Deadline: TypeAlias = list[Any]
"""[time, number, what is called; None when it was dropped or called]"""


class Deadlines:
    """The deadlines of one owner, on the clock of the running loop."""

    def __init__(self) -> None:
        self._heap: list[Deadline] = []
        self._numbers = itertools.count()
        self._dropped = 0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, when: float, call: Callable[[], object]) -> Deadline:
        """Have ``call`` called at ``when``."""
        deadline: Deadline = [when, next(self._numbers), call]
        heapq.heappush(self._heap, deadline)
        if self._heap[0] is deadline:
            self._wind()
        return deadline

    def drop(self, deadline: Deadline) -> None:
        """Do not call it, unless it was called already."""
        if deadline[2] is None:
            return
        deadline[2] = None
        self._dropped += 1
        if 2 * self._dropped > len(self._heap) + _SLACK:
            self._heap = [kept for kept in self._heap if kept[2] is not None]
            heapq.heapify(self._heap)
            self._dropped = 0

    def close(self) -> None:
        """Call none of them any more."""
        self._heap, self._dropped = [], 0
        if self._timer is not None:
            self._timer.cancel()

    def _wind(self) -> None:
        """Have the timer ring no later than the first deadline; it may ring for nothing."""
        when = self._heap[0][0]
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when, self._ring)

    def _ring(self) -> None:
        self._timer, now = None, asyncio.get_running_loop().time()
        while self._heap and (self._heap[0][2] is None or self._heap[0][0] <= now):
            _, _, call = deadline = heapq.heappop(self._heap)
            deadline[2] = None
            if call is None:
                self._dropped -= 1
                continue
            try:
                call()
            except Exception:
                log.exception("%r failed at its deadline", call)
        if self._heap:
            self._wind()
