"""Order of reconciliation: a set of keys, each with the time from which it is due.

Invariants: a key is in work at most once at a time, and waits at most once however often it is marked. The key that has
been due longest is taken first, so that none starves. A key that failed is not taken before its backoff has passed,
even if it is marked in between, unless it is passed to ``renew`` because its object has changed.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import time
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)

FIRST_BACKOFF_S: Final = 1.0
LONGEST_BACKOFF_S: Final = 60.0
COOLDOWN_S: Final = 0.1
"""Seconds between the end of a reconcile and the start of the next of the same key, which merge a burst of changes."""
_SPARE: Final = 64
"""Entries of the order, in addition to two for each waiting key, above which outdated entries are dropped."""


def backoff(
    failures: int,
    *,
    first_s: float = FIRST_BACKOFF_S,
    longest_s: float = LONGEST_BACKOFF_S,
    uniform: Callable[[float, float], float] = random.uniform,
) -> float:
    """Return the seconds to wait before the next attempt, after this number of failures in a row (at least one).

    It doubles from ``first_s`` up to ``longest_s``. ``uniform`` draws the jitter, which shortens it by up to a quarter.
    """
    return min(longest_s, first_s * 2.0 ** min(failures - 1, 16)) * uniform(0.75, 1.0)


class Worklist(Generic[K]):
    """Keys to work on. clock: returns seconds; waited: called with a due key's waiting time; rng: for the jitter."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        waited: Callable[[float], None] = lambda _: None,
        rng: random.Random | None = None,
        cooldown_s: float = COOLDOWN_S,
    ) -> None:
        self._clock = clock
        self._waited = waited
        self._rng = rng or random.Random()
        self._cooldown_s = cooldown_s
        self._due: dict[K, float] = {}
        self._order: list[tuple[float, int, K]] = []
        self._count = 0
        self._moved = clock()
        self._working: set[K] = set()
        self._not_before: dict[K, float] = {}
        self._failures: dict[K, int] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._due)

    def mark(self, key: K, *, after_s: float = 0.0) -> None:
        """Make ``key`` due in at most ``after_s`` seconds, but not before the end of its backoff or cooldown."""
        due = max(self._clock() + after_s, self._not_before.get(key, 0.0))
        if due < self._due.get(key, float("inf")):
            self._due[key] = due
            self._count += 1
            heapq.heappush(self._order, (due, self._count, key))
            if len(self._order) > _SPARE + 2 * len(self._due):
                self._order = [entry for entry in self._order if self._due.get(entry[2]) == entry[0]]
                heapq.heapify(self._order)
            self._changed.set()

    def renew(self, key: K) -> None:
        """Make ``key`` due now and reset its backoff, because its object has changed."""
        self._failures.pop(key, None)
        self._not_before.pop(key, None)
        self.mark(key)

    def forget(self, key: K) -> None:
        """Drop all records of a key whose object was deleted."""
        for known in (self._due, self._not_before, self._failures):
            known.pop(key, None)

    async def take(self) -> K:
        """Wait for the next due key and return it. The caller must call ``finish`` with it."""
        while True:
            key = self.next()
            if key is not None:
                return key
            self._changed.clear()
            wake = self._order[0][0] - self._clock() if self._order else None
            try:
                async with asyncio.timeout(wake):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def next(self) -> K | None:
        """Return the key that has been due longest, None if none is due."""
        now = self._clock()
        while self._order and self._order[0][0] <= now:
            due, _, key = heapq.heappop(self._order)
            if self._due.get(key) != due or key in self._working:
                continue
            del self._due[key]
            self._working.add(key)
            self._moved = now
            self._waited(now - due)
            return key
        return None

    def finish(self, key: K, *, again_in_s: float | None = None, failed: bool = False) -> float:
        """End the work on ``key``, and return the backoff in seconds, 0 if it did not fail."""
        self._working.discard(key)
        self._moved = self._clock()
        pause_s = 0.0
        if failed:
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            again_in_s = pause_s = backoff(failures, uniform=self._rng.uniform)
        else:
            self._failures.pop(key, None)
        self._not_before[key] = self._clock() + max(self._cooldown_s, pause_s)
        marked = self._due.pop(key, None)
        if marked is not None:
            self.mark(key, after_s=max(0.0, marked - self._clock()))
        if again_in_s is not None:
            self.mark(key, after_s=again_in_s)
        return pause_s

    def oldest_s(self) -> float:
        """Return the seconds for which the key that has been due longest has waited."""
        while self._order and self._due.get(self._order[0][2]) != self._order[0][0]:
            heapq.heappop(self._order)
        return max(0.0, self._clock() - self._order[0][0]) if self._order else 0.0

    def stuck_s(self) -> float:
        """Return the seconds for which a key has been due while the work on no key was started or finished."""
        return min(self.oldest_s(), self._clock() - self._moved)
