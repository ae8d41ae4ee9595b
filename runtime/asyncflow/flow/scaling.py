"""Elastic policy, pure: how many rollouts there should be.

Rollouts are added while the trainer waits for samples. With r rollouts that make g tokens a second and a trainer that
waits for a share w of its time, training could take g / (1 - w); to leave it waiting for the share t there are
g * ((1 - t) / (1 - w) - 1) tokens a second *missing*, and each further rollout makes g / r of them. Those that were
added in vain are given back: where the longest sequence of a step, or the number of samples that may be on their way,
holds up the trainer, more rollouts make no more tokens. No more are tried then as long as figures stay as they are.

Rollouts are taken away while they have too little to do, which shows in two ways. If they have something to do for a
share b of their time, b * r rollouts would have work all the time, and the trainer would not wait. Where a schedule
keeps a fixed number of samples on their way, every rollout has something to do, and *slots stay free*: if the share s
of all slots is in use, s * r rollouts hold as many sequences. How fast they are then is not known, so half of the way
is gone at a time, and never again to a number that was too few for as many tokens a second. Between not waiting and
waiting for the share t lies what figures vary by, so that what was taken away is not asked for again. Where finished
samples pile up or grow old in the queue, rollouts are taken away one by one.

To take one away has a price in tokens: prefixes of the sequences that it hands on, which are computed again, and what
it would make while it starts, should it be asked for again. It is paid when that many tokens could have been made by
those that have nothing to do (the rule of the ski rental, which never costs more than twice the best).

Every decision rests on figures of steps that were made with the present number of rollouts, and begins a new window of
steps: what a change does is seen before the next one.

Invariant: the answer lies within ``least`` and ``most``, moves only in a direction that was wanted without a break
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
    their time in which rollouts had work; slot_share: share of their slots in use on average;
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
        return _demand(self.tokens_per_second, self.wait_share)


def _demand(made: float, wait_share: float) -> float:
    return made / (1.0 - min(wait_share, _ALWAYS))


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A direction that is wanted since ``since`` (unix seconds)."""

    direction: Direction
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """``rollouts`` were too few, so ``tried`` were asked for.

    made: tokens a second that they made, and ``pace`` that each of them made while it had something to do; wait_share:
    of the trainer; missing: tokens a second that were missing; in_vain: whether ``tried`` made hardly more.
    """

    rollouts: int
    tried: int
    made: float
    pace: float
    wait_share: float
    missing: float
    in_vain: bool = False

    @property
    def demand(self) -> float:
        """Tokens a second that training could take."""
        return _demand(self.made, self.wait_share)

    def least(self, demand: float) -> int:
        """Return the fewest rollouts that may be enough for ``demand`` tokens a second."""
        if self.demand <= 0:
            return 0
        return math.floor(self.rollouts * demand / self.demand * _VARIES) + 1

    def was_in_vain(self, made: float) -> bool:
        """Return whether those that were tried, which make ``made`` tokens a second, make hardly more."""
        could = self.made * (self.tried / max(self.rollouts, 1) - 1.0)
        return made - self.made < max(_HELPS * min(self.missing, could), _NOISE * self.made)

    def still(self, signals: Signals) -> bool:
        """Return whether figures are about those of that time."""
        similar = self.made / _SIMILAR <= signals.tokens_per_second <= self.made * _SIMILAR
        return similar and abs(signals.wait_share - self.wait_share) < _SIMILAR_WAIT


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
            return now if signals.queued_steps >= 1 else self.within(self._more(now, signals, shortage))
        fewer = self._fitting(now, signals)
        if signals.queued_steps > self.queued_steps or (signals.lag > self.lag and signals.queued_steps >= 1):
            fewer = min(fewer, now - 1)
        if shortage is not None:
            fewer = max(fewer, shortage.least(signals.demand))
        return self.within(min(now, fewer, self._occupied(now, signals, shortage)))

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
            shortage = Shortage(
                rollouts=current,
                tried=wanted,
                made=signals.tokens_per_second,
                pace=signals.pace,
                wait_share=signals.wait_share,
                missing=self._missing(signals),
            )
        elif shortage is not None and signals.wait_share > self.wait_share:
            shortage = replace(shortage, in_vain=True)
        return wanted, SignalWindow(wanted, signals.step, shortage=shortage)

    def within(self, rollouts: int) -> int:
        """Return the number nearest to ``rollouts`` that is allowed."""
        return max(self.least, min(rollouts, self.most))

    def _missing(self, signals: Signals) -> float:
        """Return the tokens a second that are missing."""
        return max(0.0, signals.demand * (1.0 - self.wait_share) - signals.tokens_per_second)

    def _more(self, rollouts: int, signals: Signals, shortage: Shortage | None) -> int:
        """Return the rollouts that make the missing tokens too, at most twice as many; those that there were where more
        make no more.
        """
        if shortage is not None and shortage.rollouts <= rollouts <= signals.ready:
            judged = rollouts == shortage.tried and shortage.was_in_vain(signals.tokens_per_second)
            if shortage.still(signals) if shortage.in_vain else judged:
                return max(shortage.rollouts, math.ceil(rollouts / 2))
        twice = 2 * max(rollouts, 1)
        if signals.tokens_per_second <= 0:
            return twice
        waits, busy = signals.wait_share, signals.busy_share
        return min(twice, balanced(signals.rollouts, wait_share=waits, busy_share=busy, target=self.wait_share))

    def _occupied(self, rollouts: int, signals: Signals, shortage: Shortage | None) -> int:
        """Return the rollouts that would have something to do all the time, at least half as many."""
        needed = math.ceil(signals.busy_share * min(signals.ready, rollouts) - _ROUNDING)
        if shortage is not None and signals.pace:
            needed = max(needed, min(shortage.least(signals.demand * shortage.pace / signals.pace), rollouts))
        return max(needed, math.ceil(rollouts / 2))

    def _fitting(self, rollouts: int, signals: Signals) -> int:
        """Return the rollouts half way to those whose slots hold what runs; all while the trainer waits a little."""
        holding = math.ceil(signals.slot_share * min(signals.ready, rollouts) - _ROUNDING)
        if holding >= rollouts or signals.wait_share > self.wait_share / 2:
            return rollouts
        return rollouts - max(1, (rollouts - holding) // 2)

    def _pays(self, signals: Signals, seconds: float) -> bool:
        """Return whether one rollout could have made the tokens that its drain costs in so many seconds."""
        return signals.pace * (seconds - signals.start_s) >= signals.handed_tokens or not signals.pace


def balanced(rollouts: int, *, wait_share: float, busy_share: float, target: float) -> int:
    """Return the rollouts that would balance, without bounds, were each to make as many tokens as now.

    wait_share, busy_share: as in ``Signals``; target: the share of its time that the trainer is to wait.
    """
    if wait_share <= target:
        return max(1, math.ceil(busy_share * rollouts - _ROUNDING))
    more = (1.0 - target) / (1.0 - min(wait_share, _ALWAYS)) - 1.0
    return max(rollouts + 1, math.ceil(rollouts + more * max(rollouts, 1) - _ROUNDING))


_ROUNDING = 1e-6
"""Error that a share of seconds may have, so that it does not ask for one rollout more."""
_VARIES = 1.1
"""By how much a demand varies that has not changed."""
_NOISE = 0.025
"""Part of the tokens made a second below which a difference is none."""
_HELPS = 0.25
"""Least part of the tokens that were expected of further rollouts for them not to be in vain."""
_SIMILAR, _SIMILAR_WAIT = 1.25, 0.1
"""By how much tokens a second, and the share that the trainer waits, differ where nothing has changed."""
_ALWAYS = 0.999
"""Share of its time above which a trainer waits always, whatever it could take."""
