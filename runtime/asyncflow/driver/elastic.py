"""The number of rollouts that the built-in policy recommends: ``flow.scaling`` with the measurements of the driver.

The supervisor of one machine and the operator follow this number if the manifest says so; an autoscaler follows the
gauge that shows it. The driver does not depend on which of them scales: it uses the rollouts that are present.

Invariants: the number is the result of the last decision, and None before the first; it is not limited to the job's
bounds, which change on a cluster while the driver runs. It is at least 1: without a rollout the job makes no steps, so
there would be nothing to decide from. If the policy is enabled, a job that starts without rollouts requests one.
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
    """The elastic policy of one job. desired: the recommended number of rollouts."""

    def __init__(self, spec: RLJobSpec, *, lives: Lives) -> None:
        self.desired: int | None = None
        self._lives = lives
        self._laps = Laps(lives)
        self._window: SignalWindow | None = None
        self._starts_empty = spec.elasticity.enabled and not spec.rollout.replicas
        self._samples = spec.algorithm.samples_per_step
        self._policy = Elasticity(
            least=1,
            most=MOST_REPLICAS,
            wait_share=spec.elasticity.target_trainer_wait_share,
            queued_steps=spec.elasticity.max_queued_steps,
            lag=spec.schedule.max_staleness,
            stabilization_s=spec.elasticity.stabilization_seconds,
        )

    @property
    def recent(self) -> RecentFigures | None:
        """The figures that the policy uses, None before there were enough steps."""
        return self._laps.recent()

    def step(self, line: Mapping[str, Any]) -> None:
        """Record an optimizer step, a line of ``metrics.jsonl``."""
        self._laps.step(line)

    def update(
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
        """Record the current load, and update ``desired`` if a decision is possible now.

        running, slots: running sequences of all rollouts, and the most that could run; queued: finished samples that
        wait for the trainer; step, lag: number and lag of the last optimizer step; now: seconds of ``clock.now``.
        """
        if slots:
            self._laps.record_slots(running / slots)
        recent = self._laps.recent()
        if recent is None:
            if self._starts_empty and not self._lives.occupied("rollout")[0]:
                self.desired = 1
            return
        present = [each for each in rollouts if each.state != "draining"]
        ready = sum(each.state != "starting" for each in present)
        signals = Signals(
            rollouts=len(present),
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
