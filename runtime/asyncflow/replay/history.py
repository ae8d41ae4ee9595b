"""The steps of a run as its trainer recorded them, and the starting point for the replay of a step.

A trainer that resumes repeats later steps, so a step may exist several times. The valid one is the step of the newest
attempt that started before it: it is part of the surviving weights. The other ones are ignored, except for digests of
their weights.

Invariants: this module reads no files. A plan contains only completely recorded steps, and starts at a checkpoint from
which every version that generated one of their samples is available, or is replayed before it is needed.
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
    """A valid step.

    attempt, ranks: attempt and size of the trainer's gang; slots: samples of all ranks, in order; decided: as in
    ``StepRecord``.
    """

    attempt: int
    ranks: int
    slots: list[list[SampleRecord]]
    decided: str

    @property
    def samples(self) -> list[SampleRecord]:
        """All samples, in the order of accumulation."""
        return [sample for slot in self.slots for sample in slot]

    @property
    def versions(self) -> set[int]:
        """Steps of the versions that generated their tokens."""
        return {run.step for sample in self.samples for run in sample.runs}


@dataclass(kw_only=True)
class RunHistory:
    """The valid steps of a run.

    steps: by number; digests: of published weights, for a gang of one rank; begins: the step after which each attempt
    of the trainer started.
    """

    steps: dict[int, RecordedStep] = field(default_factory=dict)
    begins: dict[int, int] = field(default_factory=dict)
    digests: dict[Version, str] = field(default_factory=dict)

    @classmethod
    def of(cls, ranks: Iterable[Iterable[Record]]) -> RunHistory:
        """Return the history in the records of all ranks. ranks: in order of their numbers."""
        one, parts = cls(), [_Rank.of(records) for records in ranks]
        for number in sorted({step for part in parts for step in part.steps}):
            own = [part for part in parts if number in part.steps]
            newest = max(part.steps[number].attempt for part in own)
            current = [part for part in own if part.steps[number].attempt == newest]
            slots = zip_longest(*(part.steps[number].slots for part in current), fillvalue=())
            if len(current) == (world := current[0].worlds.get(newest, 1)):
                joined = [[sample for rank in slot for sample in rank] for slot in slots]
                decided = current[0].steps[number].decided
                one.steps[number] = RecordedStep(attempt=newest, ranks=world, slots=joined, decided=decided)
        if parts:
            one.begins = parts[0].begins
        if len(parts) == 1:
            one.digests = parts[0].digests
        return one

    def lost(self, version: Version) -> bool:
        """Return whether weights are lost: a later attempt started before them, and did not reproduce them."""
        if not any(attempt > version.attempt and step < version.step for attempt, step in self.begins.items()):
            return False
        valid = self.steps.get(version.step)
        repeated = None if valid is None else self.digests.get(Version(valid.attempt, version.step))
        return repeated is None or repeated != self.digests.get(version)

    def step(self, number: int) -> RecordedStep:
        """Return a step. Raises ManifestError if it is not recorded."""
        if (found := self.steps.get(number)) is None:
            known = (
                f"Recorded are steps {min(self.steps)} to {max(self.steps)}" if self.steps else "No step is recorded"
            )
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
    """base: step of the initial checkpoint, 0 for the initial model; steps: the steps to replay, in order."""

    base: int
    steps: Sequence[int]

    def after(self, step: int, history: RunHistory) -> set[int]:
        """Return the versions that steps after ``step`` need."""
        return {version for later in self.steps if later > step for version in history.step(later).versions}


def plan_replay(history: RunHistory, *, step: int, checkpoints: Mapping[int, Collection[int]]) -> ReplayPlan:
    """Return the plan to replay step ``step``, from the newest possible checkpoint.

    checkpoints: by step, the older versions that each carries in addition to its own. Raises ManifestError if a
    required step is not recorded.
    """
    for base in sorted((each for each in checkpoints if each < step), reverse=True):
        steps = range(base + 1, step + 1)
        available = {base, *checkpoints[base]}
        if all(number in history.steps for number in steps) and all(
            version >= base or version in available for number in steps for version in history.step(number).versions
        ):
            return ReplayPlan(base, steps)
    for number in range(1, step + 1):
        history.step(number)
    return ReplayPlan(0, range(1, step + 1))


class Obstacles(NamedTuple):
    """refused: reasons why a step cannot be replayed; inexact: reasons why its bits may differ."""

    refused: list[str]
    inexact: list[str]


def obstacles(spec: RLJobSpec, history: RunHistory, plan: ReplayPlan) -> Obstacles:
    """Return the obstacles to the replay of a plan."""
    steps = [history.step(number) for number in plan.steps]
    engine, columns = spec.rollout.engine.name, trained_columns(spec)
    devices = {PROFILES[worker.accelerator.profile].device for worker in (spec.trainer, spec.rollout)}
    refused, inexact = [], []
    if spec.trainer.external:
        refused.append("the trainer was a user's process, whose loop is not part of the run")
    if spec.critic is not None and spec.critic.role is not None:
        refused.append("the critic was a process of its own, which a replay does not start")
    if spec.environment is not None:
        refused.append("responses have several turns, and the answers of the environment are not recorded")
    elif columns:
        refused.append(f"the columns {', '.join(columns)}, which other tasks wrote, are not recorded")
    if any(sample.decided is None for step in steps for sample in step.samples):
        refused.append("advantages of single tokens are not recorded")
    if engine == "vllm" and not spec.schedule.deterministic:
        refused.append("samples of vLLM depend on the rest of their batch, unless schedule.deterministic is set")
    if spec.schedule.prefix == "keep":
        inexact.append(
            "tokens followed a prefix cached under older weights (schedule.prefix: keep), which is not stored"
        )
    versions = {run.version for step in steps for sample in step.samples for run in sample.runs}
    if lost := sorted(version for version in versions if history.lost(version)):
        inexact.append(
            f"{', '.join(map(str, lost))} generated samples, but was lost when the trainer restarted before it"
        )
    if ranks := {step.ranks for step in steps} - {1}:
        inexact.append(
            f"the gradient was summed over {max(ranks)} ranks, the replay uses one: equal except for rounding"
        )
    if devices - {"cpu"} and not spec.schedule.deterministic:
        inexact.append(f"on {'/'.join(sorted(devices - {'cpu'}))} results are exact only with schedule.deterministic")
    return Obstacles(refused, inexact)


def reasons(spec: RLJobSpec, step: int, recorded: RecordedStep) -> list[str]:
    """Return a sentence for each version, or sequence of versions, of samples: their number, and the reason for it."""
    schedule, window = spec.schedule, Schedule.of(spec).window(step)
    counts = Counter(tuple(run.version for run in sample.runs) for sample in recorded.samples)
    sentences = []
    for versions, count in sorted(counts.items()):
        names = ", then ".join(map(str, versions)) or "no version"
        what = f"{count} sample{'s' * (count != 1)} generated by {names}"
        if schedule.swap_at == "quota":
            rule = f"update: {schedule.update}, swapAt: quota"
            sentences.append(f"{what}: D_{step} is generated by θ{window.oldest} alone ({rule})")
            continue
        lag = step - 1 - min((version.step for version in versions), default=step - 1)
        when = "started" if len(versions) < 2 else "started, and while it ran (swapAt: token)"
        sentences.append(
            f"{what}: the weights of its rollout when it {when}; {lag} behind, of at most {schedule.lag} (maxStaleness)"
        )
    return sentences
