"""Elastic policy: computes, from measurements of a run, the number of rollouts that it should have. Pure.

The policy adds rollouts while the trainer waits for samples. Let r rollouts generate g tokens per second, and let the
trainer wait for a share w of its time: training could take g / (1 - w). To reduce its wait to the share t,
g * ((1 - t) / (1 - w) - 1) tokens per second are *missing*, and each further rollout generates g / r of them. More
rollouts do not help if the trainer is limited by the longest sequence of a step or by the number of samples that may be
in flight. The policy then removes the useless rollouts, and adds none as long as the measurements stay the same.

The policy removes rollouts while they have too little work, of which there are two signs. If the rollouts have work for
a share b of their time, b * r rollouts would be busy all the time, and the trainer would not wait. If the schedule
keeps a fixed number of samples in flight, every rollout has some work but *slots stay free*: if the share s of all
slots is in use, s * r rollouts can hold the running sequences. Their speed with fuller slots is unknown, so the policy
goes half of the way at a time, and never again to a number that was too small for the same demand of tokens per second.
It removes rollouts for free slots only if the trainer waits for at most half of t, so that a removed rollout is not
added again because of noise. If finished samples accumulate or grow old in the queue, it removes rollouts one by one.

The removal of a rollout costs tokens: the prefixes of the sequences that it hands on are computed again, and a rollout
that is added again generates nothing while it starts. The policy removes it when one idle rollout could have generated
that many tokens (ski-rental rule: at most twice the optimal cost).

Every decision uses measurements of steps with the current number of rollouts, and starts a new window of steps, so the
effect of a change is measured before the next one.

Invariant: the result is between ``least`` and ``most``, changes only in a direction that was recommended without a
break for ``stabilization_s`` seconds, at most doubles or halves, and changes once per window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

Direction = Literal["more", "fewer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """Input of the elastic policy.

    rollouts: current number of rollouts; ready: number of them that generate; step: last finished step; since: step
    after which the measurement of the shares started; wait_share: share of its time that the trainer waited for
    samples; busy_share: share of their time in which the rollouts had work; slot_share: mean share of their slots in
    use; tokens_per_second: total of all rollouts; handed_tokens: tokens of the sequences that one rollout would hand
    on; start_s: seconds from the start of a rollout until it generates; queued_steps: finished samples in the queue, in
    optimizer steps; lag: lag of the last step.
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
        """Tokens per second of one busy rollout, 0 if none is busy."""
        working = self.busy_share * self.ready
        return self.tokens_per_second / working if working > _ROUNDING else 0.0

    @property
    def demand(self) -> float:
        """Tokens per second that training could take."""
        return _demand(self.tokens_per_second, self.wait_share)


def _demand(made: float, wait_share: float) -> float:
    return made / (1.0 - min(wait_share, _ALWAYS))


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A recommended direction, and the unix time in seconds since which it has been recommended."""

    direction: Direction
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """An increase of the number of rollouts from ``rollouts``, which were too few, to ``tried``.

    The other fields describe the state before the increase. made: tokens per second of all rollouts; pace: tokens per
    second of one busy rollout; wait_share: share of its time that the trainer waited; missing: missing tokens per
    second. in_vain: whether ``tried`` rollouts generated hardly more.
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
        """Tokens per second that training could take."""
        return _demand(self.made, self.wait_share)

    def least(self, demand: float) -> int:
        """Return the least number of rollouts that may be enough for ``demand`` tokens per second."""
        if self.demand <= 0:
            return 0
        return math.floor(self.rollouts * demand / self.demand * _VARIES) + 1

    def was_in_vain(self, made: float) -> bool:
        """Return whether the increase helped too little; made: tokens per second of ``tried`` rollouts."""
        possible = self.made * (self.tried / max(self.rollouts, 1) - 1.0)
        return made - self.made < max(_HELPS * min(self.missing, possible), _NOISE * self.made)

    def still(self, signals: Signals) -> bool:
        """Return whether the measurements are similar to the ones before the increase."""
        similar = self.made / _SIMILAR <= signals.tokens_per_second <= self.made * _SIMILAR
        return similar and abs(signals.wait_share - self.wait_share) < _SIMILAR_WAIT


@dataclass(frozen=True, slots=True)
class SignalWindow:
    """State kept between two decisions: the number of rollouts has been ``rollouts`` since ``step``."""

    rollouts: int
    step: int
    recommended: Recommendation | None = None
    shortage: Shortage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Elasticity:
    """The policy. wait_share, queued_steps, lag: limits above which it acts; stabilization_s: seconds for which a
    direction must be recommended before the number changes.
    """

    least: int
    most: int
    wait_share: float
    queued_steps: float
    lag: float
    stabilization_s: float

    def wanted(self, signals: Signals, *, shortage: Shortage | None = None) -> int:
        """Return the number of rollouts that fits ``signals``, if these do not change."""
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
        """Return the number of rollouts from ``now`` (unix seconds) on, None while undecided, and the next window."""
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
        """Return the allowed number nearest to ``rollouts``."""
        return max(self.least, min(rollouts, self.most))

    def _missing(self, signals: Signals) -> float:
        """Return the missing tokens per second."""
        return max(0.0, signals.demand * (1.0 - self.wait_share) - signals.tokens_per_second)

    def _more(self, rollouts: int, signals: Signals, shortage: Shortage | None) -> int:
        """Return the number of rollouts that also generate the missing tokens, at most twice as many; the number before
        the last increase (at least half of ``rollouts``) if the increase was in vain.
        """
        if shortage is not None and shortage.rollouts <= rollouts <= signals.ready:
            failed = rollouts == shortage.tried and shortage.was_in_vain(signals.tokens_per_second)
            if shortage.still(signals) if shortage.in_vain else failed:
                return max(shortage.rollouts, math.ceil(rollouts / 2))
        twice = 2 * max(rollouts, 1)
        if signals.tokens_per_second <= 0:
            return twice
        waits, busy = signals.wait_share, signals.busy_share
        return min(twice, balanced(signals.rollouts, wait_share=waits, busy_share=busy, target=self.wait_share))

    def _occupied(self, rollouts: int, signals: Signals, shortage: Shortage | None) -> int:
        """Return the number of rollouts that would be busy all the time, at least half as many as now."""
        needed = math.ceil(signals.busy_share * min(signals.ready, rollouts) - _ROUNDING)
        if shortage is not None and signals.pace:
            needed = max(needed, min(shortage.least(signals.demand * shortage.pace / signals.pace), rollouts))
        return max(needed, math.ceil(rollouts / 2))

    def _fitting(self, rollouts: int, signals: Signals) -> int:
        """Return the number half way to the rollouts whose slots hold all running sequences.

        Return ``rollouts`` if the trainer waits for more than half of the allowed share.
        """
        holding = math.ceil(signals.slot_share * min(signals.ready, rollouts) - _ROUNDING)
        if holding >= rollouts or signals.wait_share > self.wait_share / 2:
            return rollouts
        return rollouts - max(1, (rollouts - holding) // 2)

    def _pays(self, signals: Signals, seconds: float) -> bool:
        """Return whether one rollout could have generated, in ``seconds``, the tokens that its removal costs."""
        return signals.pace * (seconds - signals.start_s) >= signals.handed_tokens or not signals.pace


def balanced(rollouts: int, *, wait_share: float, busy_share: float, target: float) -> int:
    """Return the number of rollouts that balances generation and training, if each stays as fast as now; not bounded.

    wait_share, busy_share: as in ``Signals``; target: share of its time that the trainer may wait.
    """
    if wait_share <= target:
        return max(1, math.ceil(busy_share * rollouts - _ROUNDING))
    more = (1.0 - target) / (1.0 - min(wait_share, _ALWAYS)) - 1.0
    return max(rollouts + 1, math.ceil(rollouts + more * max(rollouts, 1) - _ROUNDING))


_ROUNDING = 1e-6
"""Rounding error of a share that must not increase the number of rollouts by one."""
_VARIES = 1.1
"""Factor by which an unchanged demand varies."""
_NOISE = 0.025
"""Part of the tokens per second below which a difference counts as noise."""
_HELPS = 0.25
"""Least part of the expected further tokens for an increase not to be in vain."""
_SIMILAR, _SIMILAR_WAIT = 1.25, 0.1
"""Ratio of the tokens per second, and difference of the wait share, within which measurements are similar."""
_ALWAYS = 0.999
"""Upper bound of the wait share in a demand, which would be infinite for a trainer that waits all the time."""
