"""Unix time that goes on evenly, for times between which durations are measured.

The system clock may be set while a process runs. ``now`` is what it said when the process, or the one that it was
forked from, began, counted on by a clock that nobody sets, and that goes on while the machine sleeps.
"""

from __future__ import annotations

import time


def _elapsed() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


_EPOCH = time.time() - _elapsed()


def now() -> float:
    """Return the unix seconds now; they only grow."""
    return _EPOCH + _elapsed()


def ahead() -> float:
    """Return by how many seconds the system clock has been set ahead of ``now`` (less than 0: behind it)."""
    return time.time() - now()
