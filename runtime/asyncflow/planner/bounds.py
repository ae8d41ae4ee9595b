"""Bounds of a step's time in closed form: what no schedule can beat on a division of the devices.

T_gen is the time in which the engines can make the tokens of a step, T_train that of the trainer. A synchronous step
takes their sum and the update of the weights; a periodic one at least the longer of them, and the update (Periodic
Asynchrony §3); an asynchronous one at least the longer, and, as D_k begins under θ_{k-1-η} or newer, a (η + 1)th part
of the way from a version to the version that its samples make.

Invariant: each is a lower bound of what the simulator finds, for lengths as long as expected, less what those that are
drawn may be shorter (``slack``), so that a search may leave out what is above the best that was simulated.
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
"""Slack: 3 % for what the formulas round, and three standard deviations of the mean length over three steps."""

Limit = Literal["training", "generation", "longest response", "both in turn", "lag"]
"""What a step's time comes from: the trainer, the engines' throughput, the last response of a step, generation and
training one after the other, or the way from a version to the next under the schedule's lag."""


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
        """Devices in all."""
        return self.generating + self.trainer.devices

    @property
    def name(self) -> str:
        """The split in one line: ``40 (10 x TP4) + 24 (DP3 TP8)``."""
        return f"{self.generates} + {self.trainer.devices} ({self.trainer.layout})"

    @property
    def generates(self) -> str:
        """The side that generates: ``192 (3 x TP2 DP32 EP64)``."""
        return f"{self.generating} ({self.instances} x {self.engine.layout})"


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """Least seconds of a step, and what they come from.

    generation_s: of the engines for a step's tokens; tail_s: how much longer its longest response takes; training_s: of
    the trainer; update_s: in which new weights let nobody work.
    """

    step_s: float
    generation_s: float
    tail_s: float
    training_s: float
    update_s: float
    limit: Limit

    @property
    def generation_idle(self) -> float:
        """Share of a step in which the engines have nothing to do."""
        return max(0.0, 1 - self.generation_s / self.step_s)

    @property
    def training_idle(self) -> float:
        """Share of a step in which the trainer has nothing to do."""
        return max(0.0, 1 - self.training_s / self.step_s)


def slack(work: StepWork) -> float:
    """Return by which factor the lengths of a few steps may be shorter than expected."""
    deviation = work.responses.variation / math.sqrt(_STEPS * work.samples)
    return max(_LEAST, 1 - _MODEL - _DEVIATIONS * deviation)


def generation_s(work: StepWork, engine: EnginePlan, *, instances: int, out: float) -> tuple[float, float]:
    """Return the seconds of the engines for a step's tokens, and how much longer the longest response takes.

    An instance has its share n of the samples. With c of them running a token takes token_s + share_s (c - 1), so over
    all tokens it takes (token_s - share_s) K + share_s T: T tokens in all, and K passes over all that run, at least T
    by the number that run at once, and at least the length of the longest. out: steps whose prompts are out at once.
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
    """Return the least time of a step under a schedule."""
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
        way = (alone + last + cost.optimizer_s + engine.swap_s) / (schedule.lag + 1)
        carried = schedule.swap_at == "token"
        ways: tuple[tuple[float, Limit], ...] = (
            (cost.step_s, "training"),
            (generates, "generation"),
            (0.0 if carried else way, "lag"),
        )
        seconds, limit = max(ways, key=lambda pair: pair[0])
        tail = 0.0
    return Bound(
        step_s=slack(work) * seconds,
        generation_s=through,
        tail_s=tail,
        training_s=cost.step_s,
        update_s=exposed if waits else engine.swap_s / schedule.sync_every,
        limit=limit,
    )
