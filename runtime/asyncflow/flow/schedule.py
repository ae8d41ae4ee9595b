"""Choice of the weight version that may generate the samples of step k.

One number, the *lag* η, determines the asynchrony: D_k may start under θ_{k-1-η} or newer. ``sync`` and ``periodic``
have η = 0; ``delayed`` with ``swapAt: quota`` has η = 1 and allows that one version only (AsyncFlow §4.2.1: D_1 and D_2
come from θ_0, D_k from θ_{k-2}); ``sequence`` and ``token`` have η = maxStaleness and allow every newer version too.

Invariant: a sample of step k never starts under a version whose lag at its gradient, (k-1) - v, exceeds η.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from asyncflow.identity import NEWEST

if TYPE_CHECKING:
    from asyncflow.api.job import RLJobSpec
    from asyncflow.api.schedule import ScheduleSpec


class VersionWindow(NamedTuple):
    """The range of the versions that may generate a row, by step, both ends included."""

    oldest: int
    newest: int


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Steps, versions and evaluations of one job.

    steps: number of optimizer steps of the job. lag: η, in optimizer steps. exact: only the oldest version of the
    window may generate. sync_every: steps between two published versions. require_batches: number of consecutive steps
    that must all be complete before the first of them is trained. eval_every: steps between two evaluations; 0: only
    the first and the last version are evaluated.
    """

    steps: int
    lag: int
    exact: bool
    sync_every: int = 1
    require_batches: int = 1
    eval_every: int = 0

    @classmethod
    def of(cls, spec: RLJobSpec) -> Schedule:
        """Return the schedule of a manifest."""
        every = spec.evaluation.every if spec.evaluation else 0
        return cls.by(spec.schedule, steps=spec.algorithm.steps, eval_every=every)

    @classmethod
    def by(cls, spec: ScheduleSpec, *, steps: int, eval_every: int) -> Schedule:
        """Return the schedule of a job of ``steps`` steps that is evaluated every ``eval_every`` steps."""
        return cls(
            steps=steps,
            lag=spec.lag,
            exact=spec.swap_at == "quota",
            sync_every=spec.sync_every,
            require_batches=max(1, spec.require_batches),
            eval_every=eval_every,
        )

    def window(self, step: int) -> VersionWindow:
        """Return the versions that may generate D_step; the oldest is the first published one within the lag."""
        oldest = -(-max(0, step - 1 - self.lag) // self.sync_every) * self.sync_every
        return VersionWindow(oldest, oldest if self.exact else NEWEST)

    def together(self, step: int) -> range:
        """Return the steps, including ``step``, that must all be complete before the first of them is trained."""
        first = step - (step - 1) % self.require_batches
        return range(first, min(first + self.require_batches, self.steps + 1))

    def publishes(self, step: int) -> bool:
        """Return whether θ_step is published."""
        return step % self.sync_every == 0 or step == self.steps

    def evaluates(self, step: int) -> bool:
        """Return whether θ_step is evaluated: the first, the last, and each ``eval_every``-th that is published."""
        regular = self.eval_every > 0 and step % self.eval_every == 0
        return step in (0, self.steps) or (regular and self.publishes(step))

    def evaluations(self) -> list[int]:
        """Return the steps whose weights are evaluated, in order."""
        regular = range(0, self.steps, math.lcm(self.eval_every, self.sync_every)) if self.eval_every else ()
        return sorted({0, *regular, self.steps})

    def required(self, unfinished: set[int]) -> set[int]:
        """Return the versions that unfinished steps need exactly; empty if newer versions will do."""
        return {self.window(step).oldest for step in unfinished} if self.exact else set()
