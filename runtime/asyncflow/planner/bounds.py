"""Lower bounds of a step's time in closed form, for a division of the devices.

T_gen is the time in which the engines can generate the tokens of a step, T_train the time in which the trainer can
train on them. A synchronous step takes at least their sum and the update of the weights; a periodic one at least the
longer of them, and the update (Periodic Asynchrony §3); an asynchronous one at least the longer of them, and, as D_k
starts under θ_{k-1-η} or newer, a (η + 1)th part of the time from a version to the version trained on its samples.

Invariant: each is a lower bound of the simulated time, for lengths as long as expected, reduced by the amount by which
random lengths may be shorter (``slack``), so a search may skip every split with a bound above the best simulated time.
"""

from __future__ import annotations

import math
from typing import Final, Literal

import msgspec

from asyncflow.api.schedule import ScheduleSpec
from asyncflow.planner.layouts import EnginePlan, TrainerPlan
from asyncflow.planner.work import StepWork

_MODEL: Final = 0.03
_DEVIATIONS: Final = 3
_STEPS: Final = 3
_LEAST: Final = 0.5
"""Constants of ``slack``: 3 % for the rounding of the formulas, and three standard deviations of the mean length over
three steps, limited to a half."""

Limit = Literal["training", "generation", "longest response", "both in turn", "lag"]
"""The bottleneck of a step: the trainer, the engines' throughput, the last response of a step, generation and training
in sequence, or the time from a version to the next one under the schedule's lag."""


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """A division of the devices: ``instances`` engines, and a trainer."""

    engine: EnginePlan
    instances: int
    trainer: TrainerPlan

    @property
    def generating(self) -> int:
        """Devices that generate."""
        return self.instances * self.engine.layout.devices

    @property
    def devices(self) -> int:
        """All devices."""
        return self.generating + self.trainer.devices

    @property
    def name(self) -> str:
        """The split in one line: ``40 (10 x TP4) + 24 (DP3 TP8)``."""
        return f"{self.generates} + {self.trainer.devices} ({self.trainer.layout})"

    @property
    def generates(self) -> str:
        """The generating side: ``192 (3 x TP2 DP32 EP64)``."""
        return f"{self.generating} ({self.instances} x {self.engine.layout})"


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """Minimum seconds of a step, and its bottleneck.

    generation_s: of the engines for a step's tokens; tail_s: additional seconds of its longest response; training_s: of
    the trainer; update_s: seconds in which an update of the weights stops all work.
    """

    step_s: float
    generation_s: float
    tail_s: float
    training_s: float
    update_s: float
    limit: Limit

    @property
    def generation_idle(self) -> float:
        """Share of a step in which the engines are idle."""
        return max(0.0, 1 - self.generation_s / self.step_s)

    @property
    def training_idle(self) -> float:
        """Share of a step in which the trainer is idle."""
        return max(0.0, 1 - self.training_s / self.step_s)


def slack(work: StepWork) -> float:
    """Return the factor by which the lengths of a few steps may be shorter than expected."""
    deviation = work.responses.variation / math.sqrt(_STEPS * work.samples)
    return max(_LEAST, 1 - _MODEL - _DEVIATIONS * deviation)


def generation_s(work: StepWork, engine: EnginePlan, *, instances: int, out: float) -> tuple[float, float]:
    """Return the engines' seconds for a step's tokens, and the additional seconds of the longest response.

    An instance has its share n of the samples. With c of them running a token takes token_s + share_s (c - 1), so all
    tokens take (token_s - share_s) K + share_s T. T is the number of tokens, and K the number of decoding steps: at
    least T divided by the number of sequences that run concurrently, and at least the length of the longest sample.
    out: number of steps whose prompts are in flight at the same time.
    """
    share = max(1.0, work.samples / instances)
    longest, prefill = work.responses.longest(work.samples), engine.prefill_s / engine.token_s
    total = share * (work.responses.mean + prefill)
    running = max(1.0, min(engine.slots, share * out))
    fixed = engine.token_s - engine.share_s
    passes = total / running
    through = fixed * passes + engine.share_s * total
    return through, fixed * max(0.0, longest + prefill - passes)


def bound_of(work: StepWork, schedule: ScheduleSpec, split: Split) -> Bound:
    """Return the minimum time of a step under a schedule."""
    engine, cost = split.engine, split.trainer.cost
    exposed = (cost.publish_s + engine.pull_s + engine.swap_s) / schedule.sync_every
    waits = schedule.update == "sync"
    out = 1.0 if waits else schedule.ahead
    through, tail = generation_s(work, engine, instances=split.instances, out=out)
    generates = through + engine.swap_s / schedule.sync_every
    if schedule.mode == "sync":
        limit: Limit = "both in turn"
        seconds = through + tail + cost.step_s + exposed
    elif schedule.mode == "periodic":
        limit = "training" if cost.step_s >= through + tail else "generation" if tail < through else "longest response"
        seconds = max(through + tail, cost.step_s) + exposed
    else:
        last = cost.compute_s / max(1.0, work.samples)
        alone = engine.token_s * work.responses.longest(work.samples) + engine.prefill_s
        version_s = (alone + last + cost.optimizer_s + engine.swap_s) / (schedule.lag + 1)
        carried = schedule.swap_at == "token"
        limits: tuple[tuple[float, Limit], ...] = (
            (cost.step_s, "training"),
            (generates, "generation"),
            (0.0 if carried else version_s, "lag"),
        )
        seconds, limit = max(limits, key=lambda pair: pair[0])
        tail = 0.0
    return Bound(
        step_s=slack(work) * seconds,
        generation_s=through,
        tail_s=tail,
        training_s=cost.step_s,
        update_s=exposed if waits else engine.swap_s / schedule.sync_every,
        limit=limit,
    )
