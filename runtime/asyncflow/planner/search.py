"""The search for the best division of the devices: bounds leave out what cannot win, the simulator ranks the rest.

A split is a number of engines of some size, and a trainer of some layout. Of the trainers on as many devices the
fastest is taken, whoever generates. Splits are simulated in the order of their expected time, which is the bound times
what the simulator found above the bounds so far; the search ends when every bound that is left is above the best time
found, or after ``most`` simulations. The best few are tried with other trainers at last.

Invariant: a choice's time is the simulator's, the same as for every other choice: same seed, same lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import gcd
from statistics import fmean
from typing import Final

from msgspec.structs import replace

from asyncflow.api.job import RLJobSpec
from asyncflow.api.schedule import ScheduleSpec
from asyncflow.errors import ManifestError
from asyncflow.planner.bounds import Bound, Split, bound_of
from asyncflow.planner.costs import TrainerLayout
from asyncflow.planner.devices import Device
from asyncflow.planner.layouts import (
    EnginePlan,
    TrainerPlan,
    engine,
    engines,
    refusal_of_engine,
    refusal_of_trainer,
    trainer,
    trainers,
)
from asyncflow.planner.measured import COMPUTED, Factors
from asyncflow.planner.shapes import Shape
from asyncflow.planner.work import StepWork

_FINE: Final = 64
"""Up to so many devices each division is tried; of more, those in steps of a 64th."""
_REFINED: Final = 3
"""Splits whose trainer is exchanged in the end, and trainers, the fastest first, from which it is chosen."""
_TRIED: Final = 4
"""Least number of choices that are simulated, so that a table has rows to compare."""


@dataclass(frozen=True, kw_only=True)
class SplitProblem:
    """A model, the work of a step, and devices of one kind. factors: what a probe measured."""

    shape: Shape
    device: Device
    work: StepWork
    devices: int
    factors: Factors = COMPUTED

    def engines(self, *, most: int) -> list[EnginePlan]:
        """Return the engines of each size, up to ``most`` devices. Raises ManifestError where none fits."""
        return [self.factors.engine(each) for each in engines(self.shape, self.device, self.work, most=most)]

    def trainers(self, devices: int) -> list[TrainerPlan]:
        """Return the trainers on so many devices that fit, the fastest first."""
        found = trainers(self.shape, self.device, self.work, devices=devices)
        return [self.factors.trainer(each) for each in found]

    def split(self, *, tp: int, instances: int, layout: TrainerLayout) -> Split:
        """Return one split. Raises ManifestError, with the arithmetic, where it does not fit."""
        engine_ = engine(self.shape, self.device, self.work, tp=tp)
        trainer_ = trainer(self.shape, self.device, self.work, layout)
        if engine_ is None:
            raise _refused(refusal_of_engine(self.shape, self.device, self.work, tp=tp))
        if trainer_ is None:
            raise _refused(refusal_of_trainer(self.shape, self.device, self.work, devices=layout.devices, only=layout))
        return Split(engine=self.factors.engine(engine_), instances=instances, trainer=self.factors.trainer(trainer_))


def _refused(why: str) -> ManifestError:
    return ManifestError(why, where="asyncflow plan", hint="Give other devices, or another division")


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Simulated seconds of a step, and the share of them in which each side was idle."""

    step_s: float
    generation_idle: float
    training_idle: float


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A split under a schedule: its bound, and what the simulator says."""

    split: Split
    schedule: ScheduleSpec
    bound: Bound
    outcome: Predicted

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.outcome.step_s


Simulate = Callable[[Split, ScheduleSpec], Predicted]
"""Simulates a split under a schedule."""


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """Choices, the best first. tried: simulations; possible: splits that fit; proven: no other can be better."""

    choices: Sequence[Candidate]
    tried: int
    possible: int
    proven: bool

    @property
    def best(self) -> Candidate:
        """The best of them."""
        return self.choices[0]


def training_devices(devices: int) -> list[int]:
    """Return the numbers of devices that the trainer may have of ``devices``: each, or in even steps where many."""
    step = max(1, devices // _FINE)
    step -= step % 2 if step > 1 else 0
    return sorted({*range(step, devices, step), *(n for n in range(1, 9) if n < devices)})


def splits(problem: SplitProblem, *, all_trainers: bool = False) -> Iterator[Split]:
    """Yield the divisions of the devices that fit; all_trainers: with each trainer, not with the fastest alone.

    Raises ManifestError, with the arithmetic, where none fits.
    """
    found = False
    engines_ = problem.engines(most=problem.devices - 1)
    for count in training_devices(problem.devices):
        fitting = problem.trainers(count)
        for each in fitting if all_trainers else fitting[:1]:
            for engine_ in engines_:
                if instances := min((problem.devices - count) // engine_.tp, problem.work.samples):
                    found = True
                    yield Split(engine=engine_, instances=instances, trainer=each)
    if not found:
        least = min(each.tp for each in engines_)
        raise _refused(
            f"{least} of {problem.devices} devices generate at the least, and "
            + refusal_of_trainer(problem.shape, problem.device, problem.work, devices=problem.devices - least)
        )


@dataclass
class _Search:
    problem: SplitProblem
    simulate: Simulate
    most: int
    done: list[Candidate] = field(default_factory=list)

    def expected(self, split: Split, bound: Bound) -> float:
        """Return a bound, times what was found above the bounds of the most similar splits."""
        kind = split.engine.tp, bound.limit
        near = [each for each in self.done if (each.split.engine.tp, each.bound.limit) == kind]
        ratios = [each.step_s / each.bound.step_s for each in near or self.done]
        return bound.step_s * (fmean(ratios) if ratios else 1.0)

    def run(self, schedule: ScheduleSpec) -> Ranked:
        fitting = list(splits(self.problem))
        known = {each.split for each in self.done}
        left = [(split, bound_of(self.problem.work, schedule, split)) for split in fitting if split not in known]
        while left and len(self.done) < self.most:
            best = min((each.step_s for each in self.done), default=float("inf"))
            if len(self.done) >= _TRIED and min(bound.step_s for _, bound in left) >= best:
                break
            index = min(range(len(left)), key=lambda at: self.expected(*left[at]))
            split, bound = left.pop(index)
            outcome = self.simulate(split, schedule)
            self.done.append(Candidate(split=split, schedule=schedule, bound=bound, outcome=outcome))
        proven = not left or min(bound.step_s for _, bound in left) >= min(each.step_s for each in self.done)
        self.refine(schedule)
        choices = sorted(self.done, key=lambda each: (each.step_s, each.split.devices))
        return Ranked(choices=choices, tried=len(choices), possible=len(fitting), proven=proven)

    def refine(self, schedule: ScheduleSpec) -> None:
        """Simulate the best splits with slower trainers: who trains later may find samples of newer weights."""
        best = sorted(self.done, key=lambda each: each.step_s)
        for near in best[:_REFINED]:
            for other in self.problem.trainers(near.split.trainer.devices)[1:_REFINED]:
                split = replace(near.split, trainer=other)
                bound = bound_of(self.problem.work, schedule, split)
                if bound.step_s < best[0].step_s:
                    outcome = self.simulate(split, schedule)
                    self.done.append(Candidate(split=split, schedule=schedule, bound=bound, outcome=outcome))


def search(
    problem: SplitProblem,
    schedule: ScheduleSpec,
    *,
    simulate: Simulate,
    most: int = 24,
    known: Sequence[Candidate] = (),
) -> Ranked:
    """Return the best splits under a schedule. Raises ManifestError where none fits.

    most: simulations, without the last few; known: choices under this schedule that were simulated already.
    """
    return _Search(problem, simulate, most, [each for each in known if each.split.devices <= problem.devices]).run(
        schedule
    )


def split_of(problem: SplitProblem, spec: RLJobSpec) -> Split:
    """Return the split that a job asks for itself. Raises ManifestError, with the arithmetic, where it does not fit."""
    options = spec.trainer.backend.options
    tp, pp = (int(str(options.get(f"{kind}_parallel", 1))) for kind in ("tensor", "pipeline"))
    ranks = spec.trainer.ranks
    if ranks % (tp * pp):
        raise _refused(f"{ranks} devices of the trainer cannot be divided into TP{tp} x PP{pp}")
    fitting = [
        layout
        for recompute in ((False, True) if problem.work.recompute is None else (problem.work.recompute,))
        if trainer(
            problem.shape,
            problem.device,
            problem.work,
            layout := TrainerLayout(dp=ranks // (tp * pp), tp=tp, pp=pp, recompute=recompute),
        )
    ]
    return problem.split(
        tp=max(1, spec.rollout.accelerator.count),
        instances=max(1, spec.rollout.replicas),
        layout=fitting[0] if fitting else layout,
    )


def choice(problem: SplitProblem, schedule: ScheduleSpec, split: Split, *, simulate: Simulate) -> Candidate:
    """Return one split with its bound and what the simulator says."""
    bound = bound_of(problem.work, schedule, split)
    return Candidate(split=split, schedule=schedule, bound=bound, outcome=simulate(split, schedule))


def processes_of(devices: int, *, device: Device, legal: Sequence[int]) -> tuple[int, int]:
    """Return how a manifest says ``devices`` devices of a trainer: replicas, and devices of each, of a legal number."""
    per_node = gcd(devices, device.node)
    count = max((each for each in legal if each and devices % each == 0 and each <= device.node), default=per_node)
    return devices // count, count
