"""The steps of a run as its trainer recorded them, and from where a step can be made again.

A trainer that resumes makes later steps again, so a step may have been made several times: what counts is the step of
the newest attempt that began before it, which is part of the weights that survive. Everything that is known of the
others is left out, but for digests of weights.

Invariants: nothing here reads a file; a plan names only steps that are recorded whole, and begins where every version
that made one of their samples is at hand, or will be made on the way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from asyncflow.api.graph import trained_columns
from asyncflow.api.job import RLJobSpec
from asyncflow.api.placement import PROFILES
from asyncflow.errors import ManifestError
from asyncflow.flow.schedule import Schedule
from asyncflow.identity import Version
from asyncflow.training.recording import BeginRecord, Record, SampleRecord, StepRecord, WeightsRecord


@dataclass(kw_only=True)
class RecordedStep:
    """A step as it counts. attempt: who made it, of ``ranks`` ranks; slots: samples of all ranks, in their order."""

    attempt: int
    ranks: int
    slots: list[list[SampleRecord]]

    @property
    def samples(self) -> list[SampleRecord]:
        """All samples, as they were accumulated."""
        return [sample for slot in self.slots for sample in slot]

    @property
    def versions(self) -> set[int]:
        """Steps of the versions that made their tokens."""
        return {run.step for sample in self.samples for run in sample.runs}


@dataclass(kw_only=True)
class RunHistory:
    """Steps that count, by number, and digests of weights as they were published by a gang of one rank. begins: the
    step at which each attempt of the trainer began.
    """

    steps: dict[int, RecordedStep] = field(default_factory=dict)
    begins: dict[int, int] = field(default_factory=dict)
    digests: dict[Version, str] = field(default_factory=dict)

    @classmethod
    def of(cls, ranks: Iterable[Iterable[Record]]) -> RunHistory:
        """Return the history that the records of all ranks, in the order of their numbers, make together."""
        one, parts = cls(), [_Rank.of(records) for records in ranks]
        for number in sorted({step for part in parts for step in part.steps}):
            own = [part for part in parts if number in part.steps]
            newest = max(part.steps[number].attempt for part in own)
            told = [part for part in own if part.steps[number].attempt == newest]
            slots = zip_longest(*(part.steps[number].slots for part in told), fillvalue=())
            if len(told) == (world := told[0].worlds.get(newest, 1)):
                joined = [[sample for rank in slot for sample in rank] for slot in slots]
                one.steps[number] = RecordedStep(attempt=newest, ranks=world, slots=joined)
        if parts:
            one.begins = parts[0].begins
        if len(parts) == 1:
            one.digests = parts[0].digests
        return one

    def lost(self, version: Version) -> bool:
        """Return whether weights are gone: a later attempt began before them, and did not make the same ones again."""
        if not any(attempt > version.attempt and step < version.step for attempt, step in self.begins.items()):
            return False
        again = self.steps.get(version.step)
        made = None if again is None else self.digests.get(Version(again.attempt, version.step))
        return made is None or made != self.digests.get(version)

    def step(self, number: int) -> RecordedStep:
        """Return a step. Raises ManifestError where it is not recorded."""
        if (found := self.steps.get(number)) is None:
            known = f"Steps {min(self.steps)} to {max(self.steps)} have one" if self.steps else "No step has one"
            raise ManifestError(f"step {number} has no record, or not of all ranks", where="steps/", hint=known)
        return found


class _Rank(NamedTuple):
    steps: dict[int, StepRecord]
    worlds: dict[int, int]
    begins: dict[int, int]
    digests: dict[Version, str]

    @classmethod
    def of(cls, records: Iterable[Record]) -> _Rank:
        one, newest = cls({}, {}, {}, {}), -1
        for record in records:
            match record:
                case BeginRecord(attempt=attempt, step=step, ranks=ranks) if attempt > newest:
                    newest = attempt
                    one.worlds[attempt], one.begins[attempt] = ranks, step
                    for later in [number for number in one.steps if number > step]:
                        del one.steps[later]
                case StepRecord() if record.attempt == newest:
                    one.steps[record.step] = record
                case WeightsRecord():
                    one.digests.setdefault(Version(record.attempt, record.step), record.digest)
        return one


class ReplayPlan(NamedTuple):
    """base: the step of the checkpoint to begin with, 0 for the initial model; steps: to be made, in their order."""

    base: int
    steps: Sequence[int]

    def after(self, step: int, history: RunHistory) -> set[int]:
        """Return the versions that steps behind ``step`` need."""
        return {version for later in self.steps if later > step for version in history.step(later).versions}


def plan_replay(history: RunHistory, *, step: int, checkpoints: Mapping[int, Collection[int]]) -> ReplayPlan:
    """Return how step ``step`` is made again, from as late a checkpoint as can be.

    checkpoints: by step the versions that each carries beside its own. Raises ManifestError where a step that is needed
    is not recorded.
    """
    for base in sorted((each for each in checkpoints if each < step), reverse=True):
        steps = range(base + 1, step + 1)
        there = {base, *checkpoints[base]}
        if all(number in history.steps for number in steps) and all(
            version >= base or version in there for number in steps for version in history.step(number).versions
        ):
            return ReplayPlan(base, steps)
    for number in range(1, step + 1):
        history.step(number)
    return ReplayPlan(0, range(1, step + 1))


class Obstacles(NamedTuple):
    """refused: why a step cannot be made again at all; inexact: why it can, but perhaps not to the bit."""

    refused: list[str]
    inexact: list[str]


def obstacles(spec: RLJobSpec, history: RunHistory, plan: ReplayPlan) -> Obstacles:
    """Return what stands in the way of making the steps of a plan again."""
    steps = [history.step(number) for number in plan.steps]
    engine, columns = spec.rollout.engine.name, trained_columns(spec)
    devices = {PROFILES[worker.accelerator.profile].device for worker in (spec.trainer, spec.rollout)}
    refused, inexact = [], []
    if spec.trainer.external:
        refused.append("the trainer was a process of yours, whose loop is not part of the run")
    if spec.critic is not None and spec.critic.role is not None:
        refused.append("the critic was a process of its own, which is not started again")
    if spec.environment is not None:
        refused.append("responses have several turns, and what the environment answered is not recorded")
    elif columns:
        refused.append(f"the columns {', '.join(columns)}, which other tasks wrote, are not recorded")
    if any(sample.decided is None for step in steps for sample in step.samples):
        refused.append("advantages of single tokens are not recorded")
    if engine == "vllm" and not spec.schedule.deterministic:
        refused.append("what vLLM samples depends on what else is in its batch, unless schedule.deterministic is set")
    if spec.schedule.prefix == "keep":
        inexact.append("tokens were drawn behind keys and values of older weights (schedule.prefix: keep), not kept")
    made_by = {run.version for step in steps for sample in step.samples for run in sample.runs}
    if lost := sorted(version for version in made_by if history.lost(version)):
        inexact.append(f"{', '.join(map(str, lost))} made samples, and was lost when the trainer began again before it")
    if ranks := {step.ranks for step in steps} - {1}:
        inexact.append(f"the gradient was summed over {max(ranks)} ranks, here by one: equal up to rounding")
    if devices - {"cpu"} and not spec.schedule.deterministic:
        inexact.append(f"on {'/'.join(sorted(devices - {'cpu'}))} bits repeat only with schedule.deterministic")
    return Obstacles(refused, inexact)


def reasons(spec: RLJobSpec, step: int, recorded: RecordedStep) -> list[str]:
    """Return a sentence for each version, or sequence of versions, that made samples: how many, and why that one."""
    schedule, window = spec.schedule, Schedule.of(spec).window(step)
    counts = Counter(tuple(run.version for run in sample.runs) for sample in recorded.samples)
    told = []
    for versions, count in sorted(counts.items()):
        names = ", then ".join(map(str, versions)) or "no version"
        what = f"{count} sample{'s' * (count != 1)} made by {names}"
        if schedule.swap_at == "quota":
            rule = f"update: {schedule.update}, swapAt: quota"
            told.append(f"{what}: D_{step} is made by θ{window.oldest} alone ({rule})")
            continue
        lag = step - 1 - min((version.step for version in versions), default=step - 1)
        when = "began" if len(versions) < 2 else "began, and while it ran (swapAt: token)"
        told.append(
            f"{what}: the weights of its rollout when it {when}; {lag} behind, of at most {schedule.lag} (maxStaleness)"
        )
    return told
