"""The search for the best division of the devices: bounds exclude splits that cannot win, the simulator ranks the rest.

A split is a number of engine instances with one layout, and a trainer with one layout. For each number of training
devices only the fastest trainer is used. Splits are simulated in the order of their expected time: their bound times
the mean ratio of simulated time to bound so far. The search ends when every remaining bound is above the best simulated
time, or after ``most`` simulations. Finally the best few are tried with other trainers.

Invariant: the time of every choice is its simulated time, with the same seed and the same lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from statistics import fmean
from typing import Final

from msgspec.structs import replace

from asyncflow.api.job import RLJobSpec
from asyncflow.api.schedule import ScheduleSpec
from asyncflow.errors import ManifestError
from asyncflow.planner.bounds import Bound, Split, bound_of
from asyncflow.planner.costs import EngineLayout, TrainerLayout
from asyncflow.planner.devices import Device
from asyncflow.planner.layouts import (
    EnginePlan,
    TrainerPlan,
    divides,
    engine,
    engines,
    refusal_of_engine,
    refusal_of_trainer,
    trainer,
    trainers,
)
from asyncflow.planner.measured import COMPUTED, Factors
from asyncflow.planner.shapes import Shape
from asyncflow.planner.work import StepWork, engine_arguments

_FINE: Final = 64
"""Up to this number of devices every division is tried; above it, divisions in steps of a 64th."""
_REFINED: Final = 3
"""Number of best splits that are tried with other trainers, and number of fastest trainers among which they choose."""
_TRIED: Final = 4
"""Minimum number of simulated choices, so that a table has rows to compare."""


@dataclass(frozen=True, kw_only=True)
class SplitProblem:
    """A model, the work of a step, and devices of one kind. factors: the result of a probe."""

    shape: Shape
    device: Device
    work: StepWork
    devices: int
    factors: Factors = COMPUTED

    def engines(self, *, most: int) -> list[EnginePlan]:
        """Return an engine for each layout on up to ``most`` devices. Raises ManifestError if none fits."""
        return [self.factors.engine(each) for each in engines(self.shape, self.device, self.work, most=most)]

    def trainers(self, devices: int) -> list[TrainerPlan]:
        """Return the trainers on ``devices`` devices that fit, the fastest first."""
        found = trainers(self.shape, self.device, self.work, devices=devices)
        return [self.factors.trainer(each) for each in found]

    def split(self, *, instance: EngineLayout, instances: int, layout: TrainerLayout) -> Split:
        """Return one split. Raises ManifestError, with the arithmetic, if it does not fit."""
        engine_ = engine(self.shape, self.device, self.work, instance)
        trainer_ = trainer(self.shape, self.device, self.work, layout)
        if engine_ is None:
            raise _refused(refusal_of_engine(self.shape, self.device, self.work, instance))
        if trainer_ is None:
            raise _refused(refusal_of_trainer(self.shape, self.device, self.work, devices=layout.devices, only=layout))
        return Split(engine=self.factors.engine(engine_), instances=instances, trainer=self.factors.trainer(trainer_))


def _refused(why: str) -> ManifestError:
    return ManifestError(why, where="asyncflow plan", hint="Use other devices, or another division")


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Simulated seconds of a step, and the share of them in which each side was idle."""

    step_s: float
    generation_idle: float
    training_idle: float


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A split under a schedule, with its bound and its simulated result."""

    split: Split
    schedule: ScheduleSpec
    bound: Bound
    outcome: Predicted

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.outcome.step_s


Simulate = Callable[[Split, ScheduleSpec], Predicted]
"""Function that simulates a split under a schedule."""


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """Choices, the best first.

    tried: number of simulations; possible: number of splits that fit; proven: whether no other split can be better.
    """

    choices: Sequence[Candidate]
    tried: int
    possible: int
    proven: bool

    @property
    def best(self) -> Candidate:
        """The best choice."""
        return self.choices[0]


def training_devices(devices: int, *, node: int = 0) -> list[int]:
    """Return the numbers of devices that are tried for the trainer: all, or even steps if there are many.

    node: number of devices of one node, to include whole nodes; 0 if irrelevant.
    """
    step = max(1, devices // _FINE)
    step -= step % 2 if step > 1 else 0
    whole = range(node, devices, node) if node else ()
    return sorted({*range(step, devices, step), *whole, *(n for n in range(1, 9) if n < devices)})


def splits(problem: SplitProblem) -> Iterator[Split]:
    """Yield the splits that fit, with the fastest trainer of each number of devices.

    Raises ManifestError, with the arithmetic, if none fits.
    """
    found = False
    engines_ = problem.engines(most=problem.devices - 1)
    for count in training_devices(problem.devices, node=problem.device.node if problem.shape.experts else 0):
        if not (fitting := problem.trainers(count)):
            continue
        for engine_ in engines_:
            if instances := min((problem.devices - count) // engine_.layout.devices, problem.work.samples):
                found = True
                yield Split(engine=engine_, instances=instances, trainer=fitting[0])
    if not found:
        least = min(each.layout.devices for each in engines_)
        raise _refused(
            f"at least {least} of {problem.devices} devices must generate, and "
            + refusal_of_trainer(problem.shape, problem.device, problem.work, devices=problem.devices - least)
        )


@dataclass
class _Search:
    problem: SplitProblem
    simulate: Simulate
    most: int
    done: list[Candidate] = field(default_factory=list)

    def expected(self, split: Split, bound: Bound) -> float:
        """Return a bound, times the mean ratio of simulated time to bound of the most similar splits."""
        kind = split.engine.layout, bound.limit
        near = [each for each in self.done if (each.split.engine.layout, each.bound.limit) == kind]
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
        """Simulate the best splits with slower trainers: a later training may use samples of newer weights."""
        best = sorted(self.done, key=lambda each: each.step_s)
        for near in best[:_REFINED]:
            for other in _distinct(self.problem.trainers(near.split.trainer.devices))[1:_REFINED]:
                split = replace(near.split, trainer=other)
                bound = bound_of(self.problem.work, schedule, split)
                if bound.step_s < best[0].step_s:
                    outcome = self.simulate(split, schedule)
                    self.done.append(Candidate(split=split, schedule=schedule, bound=bound, outcome=outcome))


def _distinct(fastest_first: Sequence[TrainerPlan]) -> list[TrainerPlan]:
    """Return the trainers without those that differ from a faster one only in the division of experts."""
    found: dict[TrainerLayout, TrainerPlan] = {}
    for each in fastest_first:
        found.setdefault(replace(each.layout, ep=1), each)
    return list(found.values())


def search(
    problem: SplitProblem,
    schedule: ScheduleSpec,
    *,
    simulate: Simulate,
    most: int = 24,
    known: Sequence[Candidate] = (),
) -> Ranked:
    """Return the best splits under a schedule. Raises ManifestError if none fits.

    most: maximum number of simulations, without the final few; known: choices under this schedule simulated before.
    """
    return _Search(problem, simulate, most, [each for each in known if each.split.devices <= problem.devices]).run(
        schedule
    )


def split_of(problem: SplitProblem, spec: RLJobSpec) -> Split:
    """Return the split in a job's manifest. Raises ManifestError, with the arithmetic, if it does not fit."""
    where, options = "trainer.backend.options", spec.trainer.backend.options
    tp, pp, ep = (_count(options, f"{kind}_parallel", where=where) for kind in ("tensor", "pipeline", "expert"))
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
            layout := TrainerLayout(dp=ranks // (tp * pp), tp=tp, pp=pp, ep=ep, recompute=recompute),
        )
    ]
    instance, instances = _instances_of(problem, spec)
    return problem.split(instance=instance, instances=instances, layout=fitting[0] if fitting else layout)


def _instances_of(problem: SplitProblem, spec: RLJobSpec) -> tuple[EngineLayout, int]:
    """Return the layout of a job's engine instances, and their number.

    An instance is one process with all its devices, unless vLLM's arguments give it data-parallel parts: then several
    processes form an instance. Raises ManifestError if they cannot be divided evenly.
    """
    processes, count = max(1, spec.rollout.replicas), max(1, spec.rollout.accelerator.count)
    arguments, where = engine_arguments(spec), "rollout.engine.options.args"
    dp = _count(arguments, "data_parallel_size", where=where) if problem.work.wide and problem.shape.experts else 1
    if dp == 1:
        whole = problem.work.wide and divides(problem.shape, count)
        return EngineLayout(tp=count, ep=count if whole else 1), processes
    tp = _count(arguments, "tensor_parallel_size", where=where)
    if processes * count % (tp * dp):
        raise _refused(f"{processes * count} devices of rollouts cannot be divided into instances of TP{tp} x DP{dp}")
    return EngineLayout(tp=tp, dp=dp, ep=tp * dp), processes * count // (tp * dp)


def _count(options: Mapping[str, object], name: str, *, where: str) -> int:
    """Return a number of devices from options, 1 by default. Raises ManifestError if it is invalid."""
    value = options.get(name, 1)
    if isinstance(value, int) and value > 0:
        return value
    hint = "Use a whole number of devices, at least 1"
    raise ManifestError(f"{value!r} is not a number of devices", where=f"{where}.{name}", hint=hint)


def choice(problem: SplitProblem, schedule: ScheduleSpec, split: Split, *, simulate: Simulate) -> Candidate:
    """Return one split with its bound and its simulated result."""
    bound = bound_of(problem.work, schedule, split)
    return Candidate(split=split, schedule=schedule, bound=bound, outcome=simulate(split, schedule))


def processes_of(devices: int, *, device: Device, legal: Sequence[int]) -> tuple[int, int]:
    """Return the manifest's values for ``devices`` trainer devices: replicas, and devices of each (a legal number)."""
    per_node = gcd(devices, device.node)
    count = max((each for each in legal if each and devices % each == 0 and each <= device.node), default=per_node)
    return devices // count, count
