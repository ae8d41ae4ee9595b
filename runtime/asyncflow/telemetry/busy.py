"""Measurement of how long something was busy, and with what.

Sections of one cause may overlap (many sequences run at once) and nest (a forward inside a step), in one thread or in
many. Time is counted as the union of the sections: of each cause, and of all together.

Invariants: no cause is ever longer than ``total()``, ``total()`` never longer than the time that passed, and never
shorter than any one section; a section that still runs counts up to now.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Union:
    """Length of a union of intervals that begin and end in the order of one clock."""

    __slots__ = ("depth", "passed", "since")

    def __init__(self) -> None:
        self.depth = 0
        self.passed = 0.0
        self.since = 0.0

    def begin(self, now: float) -> None:
        if self.depth == 0:
            self.since = now
        self.depth += 1

    def end(self, now: float) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.passed += now - self.since

    def until(self, now: float) -> float:
        return self.passed + (now - self.since if self.depth else 0.0)


class BusyClock:
    """Counts busy seconds per cause: ``busy = BusyClock()``, then ``with busy("forward"): ...``. Thread-safe.

    clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._all = _Union()
        self._causes: dict[str, _Union] = {}

    @contextmanager
    def __call__(self, cause: str) -> Iterator[None]:
        """Count the body as time spent on ``cause``."""
        self.begin(cause)
        try:
            yield
        finally:
            self.end(cause)

    def begin(self, cause: str) -> None:
        """Begin a section that is no ``with`` block; each needs its ``end``."""
        with self._lock:
            now = self._clock()
            self._all.begin(now)
            self._causes.setdefault(cause, _Union()).begin(now)

    def end(self, cause: str) -> None:
        """End a section that ``begin`` began; ValueError where there is none."""
        with self._lock:
            union = self._causes.get(cause)
            if union is None or union.depth == 0:
                raise ValueError(f"no section {cause!r} is running")
            now = self._clock()
            union.end(now)
            self._all.end(now)

    def total(self) -> float:
        """Return the seconds so far in which at least one section of any cause ran."""
        with self._lock:
            return self._all.until(self._clock())

    def seconds(self) -> dict[str, float]:
        """Return the seconds so far of each cause; causes that overlap both count."""
        with self._lock:
            now = self._clock()
            return {cause: union.until(now) for cause, union in self._causes.items()}
