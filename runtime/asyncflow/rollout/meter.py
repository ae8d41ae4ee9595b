"""What a rollout counts of itself.

Invariant: ``generate`` counts the time with at least one running sequence; ``receive`` and ``swap`` the time in which
there was none while newer weights were on their way, and while weights were loaded. The three never overlap.
"""

from __future__ import annotations

from asyncflow.rollout.engines.base import Completion
from asyncflow.rollout.job import Outcome
from asyncflow.telemetry.busy import BusyClock
from asyncflow.telemetry.metrics import RolloutMetrics


class Meter:
    """Counts for heartbeats and for ``metrics``. fenced: results that came too late."""

    def __init__(self, metrics: RolloutMetrics) -> None:
        self.busy = BusyClock()
        self.fenced = 0
        self.delivered = 0
        self.swaps = 0
        self._metrics = metrics
        self._generating = False
        self._receiving = False

    def running(self, sequences: int, *, receiving: bool) -> None:
        """Take in how many sequences run now, and whether newer weights are on their way."""
        self._metrics.inflight.set(sequences)
        receiving = receiving and not sequences
        if bool(sequences) != self._generating:
            self._generating = not self._generating
            (self.busy.begin if self._generating else self.busy.end)("generate")
        if receiving != self._receiving:
            self._receiving = receiving
            (self.busy.begin if receiving else self.busy.end)("receive")

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

    def scored(self, outcome: Outcome, seconds: float) -> None:
        """Take in a sample that got its reward."""
        self._metrics.reward_seconds.observe(seconds)
        if outcome.reward.flag:
            self._metrics.reward_flags.labels(outcome.reward.flag).inc()

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
        """Seconds without one because of receiving or loading weights, the very first apart."""
        seconds = self.busy.seconds()
        return seconds.get("receive", 0.0) + seconds.get("swap", 0.0)
