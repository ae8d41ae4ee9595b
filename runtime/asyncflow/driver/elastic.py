"""The number of rollouts that the built-in policy would have: ``flow.scaling`` fed with what the driver sees.

The supervisor of one machine and the operator follow this number where the manifest says so, an autoscaler the gauge
that shows it. So the driver neither knows nor asks who scales: it goes by the rollouts that are there.

Invariant: the number is that of the last decision, and None before the first; bounds are not known here, since on a
cluster they change while the driver runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncflow.api.base import MOST_REPLICAS
from asyncflow.api.job import RLJobSpec
from asyncflow.api.status import RecentFigures, RolloutState
from asyncflow.driver.lives import Laps, Lives
from asyncflow.flow.scaling import Elasticity, Signals, SignalWindow


class DesiredRollouts:
    """The policy of one job. desired: the rollouts that it would have."""

    def __init__(self, spec: RLJobSpec, *, lives: Lives) -> None:
        self.desired: int | None = None
        self._lives = lives
        self._laps = Laps(lives)
        self._window: SignalWindow | None = None
        self._samples = spec.algorithm.prompts_per_step * spec.algorithm.group_size
        self._policy = Elasticity(
            least=min(1, spec.rollout.min_replicas),
            most=MOST_REPLICAS,
            wait_share=spec.elasticity.target_trainer_wait_share,
            queued_steps=spec.elasticity.max_queued_steps,
            lag=spec.schedule.max_staleness,
            stabilization_s=spec.elasticity.stabilization_seconds,
        )

    @property
    def recent(self) -> RecentFigures | None:
        """The figures that it goes by, None before there were enough steps."""
        return self._laps.recent()

    def step(self, line: Mapping[str, Any]) -> None:
        """Take in an optimizer step, a line of ``metrics.jsonl``."""
        self._laps.step(line)

    def look(
        self,
        rollouts: Sequence[RolloutState],
        *,
        running: int,
        slots: int,
        queued: int,
        step: int,
        lag: float,
        now: float,
    ) -> None:
        """Decide, where it can be decided now.

        running, slots: sequences in all rollouts, and how many there could be; queued: finished samples that wait for
        the trainer; step, lag: of the last optimizer step; now: seconds of ``clock.now``.
        """
        if slots:
            self._laps.look(running / slots)
        recent = self._laps.recent()
        if recent is None:
            return
        there = [each for each in rollouts if each.state != "draining"]
        ready = sum(each.state != "starting" for each in there)
        signals = Signals(
            rollouts=len(there),
            ready=ready,
            step=step,
            since=recent.since,
            wait_share=recent.wait_share,
            busy_share=recent.busy_share,
            slot_share=recent.slot_share,
            tokens_per_second=recent.tokens_per_second,
            handed_tokens=running / max(ready, 1) * recent.tokens_per_sample,
            start_s=self._lives.start_seconds("rollout"),
            queued_steps=queued / self._samples,
            lag=lag,
        )
        decided, self._window = self._policy.follow(signals, window=self._window, now=now)
        self.desired = self.desired if decided is None else decided
