"""Elastic policy, pure: how many rollouts there should be.

Rollouts are added while the trainer waits for samples. With r rollouts and a trainer that waits for a share w of its
time, generation keeps up with a share 1 - w of what training could take, so (1 - t) / (1 - w) * r rollouts would leave
it waiting for the share t. Rollouts are taken away while they have too little to do: if they have work for a share b of
their time, b * r rollouts would have work all the time, and the trainer would not wait. Between not waiting and waiting
for the share t lies what figures vary by, so that what was taken away is not asked for again. Where a schedule lets
finished samples pile up or grow old in the queue, rollouts are taken away one by one.

Every decision rests on figures of steps that were made with the present number of rollouts, and begins a new window of
steps: what a change does is seen before the next one.

Invariant: the answer lies within ``least`` and ``most``, moves only in a direction that was wished for without a break
for ``stabilization_s`` seconds, at most doubles and at most halves, and moves once a window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

Direction = Literal["more", "fewer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """Measurements by which the elastic policy decides.

    rollouts: how many are wanted now; ready: how many of them generate; step: the last one made; since: the step after
    which the shares begin; wait_share: share of its time that the trainer waited for samples; busy_share: share of
    their time in which rollouts had work; queued_steps: finished samples in the queue, in optimizer steps; lag: that of
    the last step.
    """

    rollouts: int
    ready: int
    step: int
    since: int
    wait_share: float
    busy_share: float
    queued_steps: float
    lag: float


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A direction that is wished for since ``since`` (unix seconds)."""

    direction: Direction
    since: float


@dataclass(frozen=True, slots=True)
class SignalWindow:
    """State kept between two decisions: ``rollouts`` have been wanted since ``step``, and all were there then."""

    rollouts: int
    step: int
    recommended: Recommendation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Elasticity:
    """The policy. wait_share, queued_steps, lag: above which it acts; stabilization_s: how long it only recommends."""

    least: int
    most: int
    wait_share: float
    queued_steps: float
    lag: float
    stabilization_s: float

    def wanted(self, signals: Signals) -> int:
        """Return the rollouts that would suit ``signals``, were they to stay as they are."""
        now = self.within(signals.rollouts)
        if signals.wait_share > self.wait_share:
            return self.within(self._enough(now, signals)) if signals.queued_steps < 1 else now
        spare = self._spare(now, signals)
        old = signals.lag > self.lag and signals.queued_steps >= 1
        if signals.queued_steps > self.queued_steps or old:
            spare = min(spare, now - 1)
        return self.within(min(now, spare))

    def follow(self, signals: Signals, *, window: SignalWindow | None, now: float) -> tuple[int | None, SignalWindow]:
        """Return the rollouts to have from ``now`` (unix seconds) on, None while that is not decided, and the window to
        bring along next time.
        """
        current, wanted = self.within(signals.rollouts), self.wanted(signals)
        fresh = SignalWindow(current, signals.step)
        if window is None or window.rollouts != current or signals.step < window.step:
            return None, fresh
        if wanted > current and signals.ready < current:
            return None, fresh
        if signals.since < window.step:
            return None, replace(window, recommended=None)
        if wanted == current:
            return current, replace(window, recommended=None)
        direction: Direction = "more" if wanted > current else "fewer"
        recommended = window.recommended
        if recommended is None or recommended.direction != direction:
            recommended = Recommendation(direction, now)
        if now - recommended.since < self.stabilization_s:
            return None, replace(window, recommended=recommended)
        return wanted, SignalWindow(wanted, signals.step)

    def within(self, rollouts: int) -> int:
        """Return the number nearest to ``rollouts`` that is allowed."""
        return max(self.least, min(rollouts, self.most))

    def _enough(self, rollouts: int, signals: Signals) -> int:
        waited = min(signals.wait_share, 1.0)
        factor = (1.0 - self.wait_share) / (1.0 - waited) if waited < 1.0 else math.inf
        return max(rollouts + 1, math.ceil(max(rollouts, 1) * min(factor, 2.0) - _ROUNDING))

    def _spare(self, rollouts: int, signals: Signals) -> int:
        needed = signals.busy_share * min(signals.ready, rollouts)
        return max(math.ceil(needed - _ROUNDING), math.ceil(rollouts / 2))


_ROUNDING = 1e-6
"""Error that a share of seconds may have, so that it does not ask for one rollout more."""
