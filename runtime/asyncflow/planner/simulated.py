"""Simulation of splits: a division of the devices as a scenario, and its predicted result.

Invariant: a scenario has the policies, the schedule and the sizes of the job itself; only its models vary.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from asyncflow.api.job import RLJob
from asyncflow.api.schedule import ScheduleSpec
from asyncflow.planner.bounds import Split
from asyncflow.planner.measured import models_of_split
from asyncflow.planner.search import Predicted, Simulate
from asyncflow.planner.work import StepWork
from asyncflow.sim import Models, Scenario, scenario_of, simulate
from asyncflow.timeline.tracks import Timeline

_COUNTED: Final = 3
_MOST: Final = 16
_SAMPLES: Final = 512
"""Bounds of the number of measured steps, and the minimum number of samples in them."""
_BUSY: Final = frozenset(("generate", "prefill", "compute", "forward", "backward", "optimizer"))
"""Kinds of spans in which a role computes tokens or gradients."""


def simulator_of(job: RLJob, work: StepWork, *, like: Models | None = None) -> Simulate:
    """Return a function that simulates splits of a job. like: models of a probe, for the other components."""

    def outcome(split: Split, schedule: ScheduleSpec) -> Predicted:
        return simulated(scenario(job, work, split, schedule, like=like), seed=job.spec.algorithm.seed)

    return outcome


def scenario(
    job: RLJob, work: StepWork, split: Split, schedule: ScheduleSpec, *, like: Models | None = None
) -> Scenario:
    """Return a scenario of a few steps of a job on a split, without its evaluations and checkpoints."""
    models = models_of_split(work, split.engine, split.trainer, like=like)
    window = counted(schedule, samples=work.samples)
    return replace(
        scenario_of(job, models=models),
        schedule=schedule,
        steps=window.stop + running_out(schedule),
        rollouts=split.instances,
        ranks=split.trainer.layout.dp,
        slot_tokens=work.pack,
        checkpoint_every=0,
        evaluation=None,
    )


def simulated(scenario: Scenario, *, seed: int) -> Predicted:
    """Return the time per step and the idle shares over the measured steps of a simulated run."""
    run = simulate(scenario, seed=seed)
    window = counted(scenario.schedule, samples=scenario.prompts_per_step * scenario.group_size)
    begin, end = run.steps[window.start - 1].ended, run.steps[window.stop - 1].ended
    assert run.timeline is not None
    idle = {role: idle_share(run.timeline, role, begin=begin, end=end) for role in ("rollout", "trainer")}
    return Predicted(step_s=(end - begin) / len(window), generation_idle=idle["rollout"], training_idle=idle["trainer"])


def idle_share(timeline: Timeline, role: str, *, begin: float, end: float) -> float:
    """Return the share of the time from begin to end in which the processes of a role computed nothing."""
    tracks = [track for track in timeline.tracks if track.role == role]
    busy = sum(
        max(0.0, min(span.end, end) - max(span.begin, begin))
        for track in tracks
        for span in track.main
        if span.kind in _BUSY
    )
    return 1 - busy / (end - begin) / len(tracks)


def counted(schedule: ScheduleSpec, *, samples: int) -> range:
    """Return the measured steps: whole cycles between publications, after the steps in which the pipeline fills.

    samples: per step. Fewer samples require more steps, because lengths are random.
    """
    filling = 1 if schedule.update == "sync" else max(2, schedule.sync_every)
    steps = min(_MOST, max(_COUNTED, math.ceil(_SAMPLES / samples)))
    cycles = math.ceil(steps / schedule.sync_every)
    return range(filling, filling + cycles * schedule.sync_every)


def running_out(schedule: ScheduleSpec) -> int:
    """Return the number of steps at the end of a run in which fewer prompts are left than may be in flight."""
    return math.ceil(schedule.ahead) - 1
