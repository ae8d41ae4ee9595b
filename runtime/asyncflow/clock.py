"""Monotonic Unix time, for timestamps whose differences are used as durations.

The system clock may be set while a process runs. ``now`` therefore reads the system clock once, when this module is
imported (a forked process keeps its parent's reading), and adds the time elapsed since then on CLOCK_BOOTTIME. That
clock cannot be set, and it also counts while the machine sleeps.
"""

from __future__ import annotations

import time


def _elapsed() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


_EPOCH = time.time() - _elapsed()


def now() -> float:
    """Return the current Unix time in seconds; it never decreases."""
    return _EPOCH + _elapsed()


def offset() -> float:
    """Return by how many seconds the system clock is ahead of ``now``; negative if it is behind."""
    return time.time() - now()
