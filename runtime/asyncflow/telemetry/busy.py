"""The clock of busy time: how long a process worked, for each cause and for all causes together.

Busy time is the union of sections. Sections of one cause may overlap (many concurrent sequences) and nest (a forward
inside a step), in one thread or in many.

Invariants: no cause is ever busy for longer than ``total()``. ``total()`` is never longer than the elapsed time, and
never shorter than any one section. A running section counts up to now.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Union:
    """Length of a union of intervals whose starts and ends are reported in chronological order."""

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
    """Counter of busy seconds per cause: ``busy = BusyClock()``, then ``with busy("forward"): ...``. Thread-safe.

    clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._all = _Union()
        self._causes: dict[str, _Union] = {}

    @contextmanager
    def __call__(self, cause: str) -> Iterator[None]:
        """Count the body as busy time of ``cause``."""
        self.begin(cause)
        try:
            yield
        finally:
            self.end(cause)

    def begin(self, cause: str, *, since: float | None = None) -> None:
        """Begin a section outside a ``with`` block; each needs a matching ``end``.

        since: start of the section if before now; all other sections must have ended before that time.
        """
        with self._lock:
            now = self._clock() if since is None else since
            self._all.begin(now)
            self._causes.setdefault(cause, _Union()).begin(now)

    def end(self, cause: str) -> None:
        """End a section. Raises ValueError if no section of ``cause`` is running."""
        with self._lock:
            union = self._causes.get(cause)
            if union is None or union.depth == 0:
                raise ValueError(f"no section {cause!r} is running")
            now = self._clock()
            union.end(now)
            self._all.end(now)

    def total(self) -> float:
        """Return the seconds in which at least one section of any cause ran."""
        with self._lock:
            return self._all.until(self._clock())

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each cause; time in which several causes ran counts for each of them."""
        with self._lock:
            now = self._clock()
            return {cause: union.until(now) for cause, union in self._causes.items()}
