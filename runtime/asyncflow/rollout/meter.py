"""Counters that a rollout keeps of itself.

Invariant: ``generate`` counts the time with at least one running sequence; ``receive`` the time in which there was none
although there was work, which waited for other weights (on their way, or here and not loaded yet); ``swap`` the time in
which weights were loaded. The three never overlap. ``occupied`` counts the time with at least one row on lease: what a
rollout has to do, waiting for weights and rewards included.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncflow.rollout.engines.base import Completion
from asyncflow.rollout.job import Outcome
from asyncflow.telemetry.busy import BusyClock
from asyncflow.telemetry.metrics import RolloutMetrics


class Lap(NamedTuple):
    """The seconds from one swap to the next: all; stalled by weights; without a sequence, for whatever reason."""

    wall_s: float
    stall_s: float
    idle_s: float

    def __str__(self) -> str:
        return f"in {self.wall_s:.3f} s since the last: stalled {self.stall_s:.3f} s, idle {self.idle_s:.3f} s"


class Meter:
    """Counts for heartbeats and for ``metrics``. fenced: results that came too late."""

    def __init__(self, metrics: RolloutMetrics) -> None:
        self.busy = BusyClock()
        self.occupied = BusyClock()
        self.fenced = 0
        self.delivered = 0
        self.swaps = 0
        self._metrics = metrics
        self._generating = False
        self._waiting = False
        self._holding = False
        self._lap = (time.monotonic(), 0.0, 0.0)

    def running(self, sequences: int, *, waiting: bool) -> None:
        """Take in how many sequences run now, and whether work waits for other weights."""
        self._metrics.inflight.set(sequences)
        waiting = waiting and not sequences
        if bool(sequences) != self._generating:
            self._generating = not self._generating
            (self.busy.begin if self._generating else self.busy.end)("generate")
        if waiting != self._waiting:
            self._waiting = waiting
            (self.busy.begin if waiting else self.busy.end)("receive")

    def holding(self, rows: int) -> None:
        """Take in how many rows there are on lease."""
        if bool(rows) != self._holding:
            self._holding = not self._holding
            (self.occupied.begin if self._holding else self.occupied.end)("rows")

    def lap(self) -> Lap:
        """Return the seconds since it was asked last, or since the start."""
        before, self._lap = self._lap, (time.monotonic(), self.stall_s, self.generate_s)
        wall_s, stall_s, generate_s = (new - old for new, old in zip(self._lap, before, strict=True))
        return Lap(wall_s, stall_s, wall_s - generate_s)

    def generated(self, completion: Completion) -> None:
        """Take in a sequence that ended."""
        self._metrics.sequences.labels(completion.finish).inc()
        self._metrics.tokens.inc(len(completion.ids))

    def swapped(self, step: int, seconds: float) -> None:
        """Take in a swap to ``step``."""
        self.swaps += 1
        self._metrics.swaps.inc()
        self._metrics.swap_seconds.observe(seconds)
        self._metrics.version_step.set(step)

    def probed(self, gaps: NDArray[np.float32]) -> float:
        """Take in by how much the engine's log-probs differ after a swap; return the mean."""
        self._metrics.probe_gap.set(float(gaps.max(initial=0.0)))
        return float(gaps.mean()) if len(gaps) else 0.0

    def scored(self, outcome: Outcome, seconds: float) -> None:
        """Take in a sample that got its reward."""
        self._metrics.reward_seconds.observe(seconds)
        if outcome.reward.failure:
            self._metrics.rewards_failed.labels(outcome.reward.failure).inc()

    def settled(self, *, taken: bool) -> None:
        """Take in what became of a result at the queue."""
        if taken:
            self.delivered += 1
        else:
            self.fenced += 1

    @property
    def generate_s(self) -> float:
        """Seconds with a running sequence."""
        return self.busy.seconds().get("generate", 0.0)

    @property
    def stall_s(self) -> float:
        """Seconds without one because weights were received or loaded, the very first apart."""
        seconds = self.busy.seconds()
        return seconds.get("receive", 0.0) + seconds.get("swap", 0.0)
