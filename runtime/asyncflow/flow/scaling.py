"""Elastic policy, pure: how many rollouts there should be.

Rollouts are added while the trainer waits for samples. With r rollouts that make g tokens a second and a trainer that
waits for a share w of its time, training could take g / (1 - w); to leave it waiting for the share t there are
g * ((1 - t) / (1 - w) - 1) tokens a second *missing*, and each further rollout makes g / r of them.

Rollouts are taken away while they have too little to do, which shows in two ways. If they have something to do for a
share b of their time, b * r rollouts would have work all the time, and the trainer would not wait. Where a schedule
keeps a fixed number of samples on their way, every rollout has something to do, and *slots stay free*: if at the
busiest moment the share s of all slots was in use, s * r rollouts hold as many sequences. How fast they are then is not
known, so half of the way is gone at a time, and never again to a number that was too few for as many tokens a second.
Between not waiting and waiting for the share t lies what figures vary by, so that what was taken away is not asked for
again. Where finished samples pile up or grow old in the queue, rollouts are taken away one by one.

To take one away has a price in tokens: prefixes of the sequences that it hands on, which are computed again, and what
it would make while it starts, should it be asked for again. It is paid when that many tokens could have been made by
those that have nothing to do (the rule of the ski rental, which never costs more than twice the best).

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

    rollouts: how many there are now; ready: how many of them generate; step: the last one made; since: the step after
    which the shares begin; wait_share: share of its time that the trainer waited for samples; busy_share: share of
    their time in which rollouts had work; slot_share: share of their slots in use at the busiest moment;
    tokens_per_second: of all rollouts; handed_tokens: those of the sequences that one of them would hand on; start_s:
    seconds until a new one generates; queued_steps: finished samples in the queue, in optimizer steps; lag: that of the
    last step.
    """

    rollouts: int
    ready: int
    step: int
    since: int
    wait_share: float
    busy_share: float
    slot_share: float
    tokens_per_second: float
    handed_tokens: float
    start_s: float
    queued_steps: float
    lag: float

    @property
    def pace(self) -> float:
        """Tokens a second of one rollout that has something to do, 0 where none has."""
        working = self.busy_share * self.ready
        return self.tokens_per_second / working if working > _ROUNDING else 0.0

    @property
    def demand(self) -> float:
        """Tokens a second that training could take."""
        return self.tokens_per_second / (1.0 - min(self.wait_share, _ALWAYS))


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A direction that is wished for since ``since`` (unix seconds)."""

    direction: Direction
    since: float


@dataclass(frozen=True, slots=True)
class Shortage:
    """``rollouts`` were too few for a trainer that could take ``demand`` tokens a second."""

    rollouts: int
    demand: float

    def least(self, demand: float) -> int:
        """Return the fewest rollouts that may be enough for ``demand`` tokens a second."""
        if self.demand <= 0:
            return 0
        return math.floor(self.rollouts * demand / self.demand * _VARIES) + 1


@dataclass(frozen=True, slots=True)
class SignalWindow:
    """State kept between two decisions: ``rollouts`` have been there since ``step``, and all were ready then."""

    rollouts: int
    step: int
    recommended: Recommendation | None = None
    shortage: Shortage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Elasticity:
    """The policy. wait_share, queued_steps, lag: above which it acts; stabilization_s: how long it only recommends."""

    least: int
    most: int
    wait_share: float
    queued_steps: float
    lag: float
    stabilization_s: float

    def wanted(self, signals: Signals, *, shortage: Shortage | None = None) -> int:
        """Return the rollouts that would suit ``signals``, were they to stay as they are."""
        now = self.within(signals.rollouts)
        if signals.wait_share > self.wait_share:
            return self.within(self._enough(now, signals)) if signals.queued_steps < 1 else now
        spare = min(self._occupied(now, signals), self._fitting(now, signals, shortage))
        old = signals.lag > self.lag and signals.queued_steps >= 1
        if signals.queued_steps > self.queued_steps or old:
            spare = min(spare, now - 1)
        return self.within(min(now, spare))

    def follow(self, signals: Signals, *, window: SignalWindow | None, now: float) -> tuple[int | None, SignalWindow]:
        """Return the rollouts to have from ``now`` (unix seconds) on, None while that is not decided, and the window to
        bring along next time.
        """
        current, shortage = self.within(signals.rollouts), window.shortage if window is not None else None
        wanted = self.wanted(signals, shortage=shortage)
        fresh = SignalWindow(current, signals.step, shortage=shortage)
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
        lasted = now - recommended.since
        if lasted < self.stabilization_s or (direction == "fewer" and not self._pays(signals, lasted)):
            return None, replace(window, recommended=recommended)
        if direction == "more":
            shortage = Shortage(current, signals.demand)
        return wanted, SignalWindow(wanted, signals.step, shortage=shortage)

    def within(self, rollouts: int) -> int:
        """Return the number nearest to ``rollouts`` that is allowed."""
        return max(self.least, min(rollouts, self.most))

    def _enough(self, rollouts: int, signals: Signals) -> int:
        """Return the rollouts that make the missing tokens too, at most twice as many."""
        each = signals.tokens_per_second / max(rollouts, 1)
        missing = signals.demand * (1.0 - self.wait_share) - signals.tokens_per_second
        more = missing / each if each > 0 else math.inf
        return max(rollouts + 1, math.ceil(min(rollouts + more, 2.0 * max(rollouts, 1)) - _ROUNDING))

    def _occupied(self, rollouts: int, signals: Signals) -> int:
        """Return the rollouts that would have something to do all the time, at least half as many."""
        needed = signals.busy_share * min(signals.ready, rollouts)
        return max(math.ceil(needed - _ROUNDING), math.ceil(rollouts / 2))

    def _fitting(self, rollouts: int, signals: Signals, shortage: Shortage | None) -> int:
        """Return the rollouts half way to those whose slots hold what runs; all while the trainer waits a little."""
        holding = math.ceil(signals.slot_share * min(signals.ready, rollouts) - _ROUNDING)
        if holding >= rollouts or signals.wait_share > self.wait_share / 2:
            return rollouts
        enough = shortage.least(signals.demand) if shortage is not None else 0
        return max(rollouts - max(1, (rollouts - holding) // 2), min(enough, rollouts))

    def _pays(self, signals: Signals, seconds: float) -> bool:
        """Return whether one rollout could have made the tokens that its drain costs in so many seconds."""
        return signals.pace * (seconds - signals.start_s) >= signals.handed_tokens or not signals.pace


_ROUNDING = 1e-6
"""Error that a share of seconds may have, so that it does not ask for one rollout more."""
_VARIES = 1.05
"""By how much a demand varies that has not changed."""
_ALWAYS = 0.999
"""Share of its time above which a trainer waits always, whatever it could take."""
