"""How many rollouts should there be? The elastic policy, pure.

Rollouts are added while the trainer waits for samples and taken away while finished samples pile up or grow old in the
queue. With r rollouts and a trainer that waits for a share w of its time, generation keeps up with a share 1 - w of
what training could take, so (1 - t) / (1 - w) * r rollouts would leave it waiting for the share t.

Invariant: the answer lies within ``least`` and ``most``, moves only in a direction that was wished for without a break
for ``stabilization_s`` seconds, at most doubles, and shrinks by one at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Direction = Literal["more", "fewer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """What the policy looks at.

    rollouts: how many are wanted now; ready: how many of them generate; wait_share: share of its time that the trainer
    waited for samples; queued_steps: finished samples in the queue, in optimizer steps; lag: that of the last step.
    """

    rollouts: int
    ready: int
    wait_share: float
    queued_steps: float
    lag: float


@dataclass(frozen=True, slots=True)
class Wish:
    """A direction that is wished for since ``since`` (unix seconds)."""

    direction: Direction
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Elasticity:
    """The policy. wait_share, queued_steps, lag: above which it acts; stabilization_s: how long a wish must last."""

    least: int
    most: int
    wait_share: float
    queued_steps: float
    lag: float
    stabilization_s: float

    def wanted(self, signals: Signals) -> int:
        """Give the rollouts that would suit ``signals``, were they to stay as they are."""
        now = self._within(signals.rollouts)
        if signals.wait_share > self.wait_share and signals.queued_steps < 1:
            return self._within(_enough(now, signals, self.wait_share)) if signals.ready >= now else now
        old = signals.lag > self.lag and signals.queued_steps >= 1
        if signals.queued_steps > self.queued_steps or old:
            return self._within(now - 1)
        return now

    def follow(self, signals: Signals, *, wish: Wish | None, now: float) -> tuple[int, Wish | None]:
        """Give the rollouts to have from ``now`` on, and the wish to bring along next time."""
        current, wanted = self._within(signals.rollouts), self.wanted(signals)
        if wanted == current:
            return current, None
        direction: Direction = "more" if wanted > current else "fewer"
        if wish is None or wish.direction != direction:
            wish = Wish(direction, now)
        if now - wish.since < self.stabilization_s:
            return current, wish
        return wanted, None

    def _within(self, rollouts: int) -> int:
        return max(self.least, min(rollouts, self.most))


def _enough(rollouts: int, signals: Signals, target: float) -> int:
    waited = min(signals.wait_share, 1.0)
    factor = (1.0 - target) / (1.0 - waited) if waited < 1.0 else math.inf
    return max(rollouts + 1, math.ceil(max(rollouts, 1) * min(factor, 2.0)))
