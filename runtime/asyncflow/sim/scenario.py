"""Scenarios: the schedule and the sizes of a job, models of durations, and events of its processes.

Invariant: a simulated run depends only on its scenario and its seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from asyncflow.algorithms.base import algorithm_of
from asyncflow.api.job import RLJob
from asyncflow.api.schedule import ScheduleSpec
from asyncflow.errors import ManifestError
from asyncflow.flow.admission import Admission, admission_by
from asyncflow.flow.schedule import Schedule
from asyncflow.flow.slots import SLOT_TOKENS
from asyncflow.rollout.lengths import Lengths
from asyncflow.sim.models import Colocation, EngineModel, Models, TrainerModel


@dataclass(frozen=True, kw_only=True)
class EvaluationLoad:
    """Evaluations: every ``every`` steps, ``prompts`` held-out prompts with ``group_size`` samples each."""

    every: int
    prompts: int
    group_size: int


@dataclass(frozen=True, kw_only=True)
class RolloutEvent:
    """Event of a rollout at a virtual second: it is killed, it leaves, or another one joins.

    index: of the rollout, -1 for one that joins.
    """

    at: float
    what: Literal["kill", "leave", "join"]
    index: int = -1


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A job and models of the durations in it.

    max_tokens: of a response; rollouts, ranks: their numbers; slot_tokens: maximum tokens of one rank's part of a slot;
    shared_prompt: whether the rows of a group in it share their prompt; whole_groups: whether it keeps groups whole;
    whole_steps: whether the algorithm needs the whole of D_k before it starts, whatever the schedule; passes: of the
    trainer over D_k; checkpoint_every: steps, 0 for the last one only; keep: number of newest versions that are always
    available; stagger: maximum number of rollouts that change weights concurrently; colocated: one set of devices
    generates and then trains, None for two sets.
    """

    schedule: ScheduleSpec
    steps: int
    prompts_per_step: int
    group_size: int
    max_tokens: int
    rollouts: int
    models: Models
    ranks: int = 1
    slot_tokens: int = 1 << 24
    shared_prompt: bool = False
    whole_groups: bool = False
    whole_steps: bool = False
    passes: int = 1
    checkpoint_every: int = 0
    keep: int = 2
    stagger: int | None = None
    evaluation: EvaluationLoad | None = None
    colocated: Colocation | None = None
    events: tuple[RolloutEvent, ...] = ()

    def __post_init__(self) -> None:
        """Raise ManifestError for a colocated scenario with an asynchronous schedule."""
        if self.colocated is not None and self.schedule.mode != "sync":
            hint = "Set schedule.mode to sync, or use separate devices"
            raise ManifestError(
                "one set of devices cannot generate while it trains", where="spec.schedule.mode", hint=hint
            )

    @property
    def plan(self) -> Schedule:
        """The schedule of steps, versions and evaluations."""
        every = self.evaluation.every if self.evaluation is not None else 0
        return Schedule.by(self.schedule, steps=self.steps, eval_every=every)

    @property
    def admission(self) -> list[Admission]:
        """The rules for the admission of prompts."""
        return admission_by(self.schedule, prompts_per_step=self.prompts_per_step, steps=self.steps)


def scenario_of(job: RLJob, *, models: Models | None = None, colocated: Colocation | None = None) -> Scenario:
    """Return the scenario of a manifest. models: None to take them from the manifest (``models_of``)."""
    spec = job.spec
    evaluation = None
    if spec.evaluation is not None:
        evaluation = EvaluationLoad(
            every=spec.evaluation.every,
            prompts=sum(each.size for each in spec.data.held_out.values()),
            group_size=spec.evaluation.group_size,
        )
    algorithm, kind = spec.algorithm, algorithm_of(spec)
    return Scenario(
        schedule=spec.schedule,
        steps=algorithm.steps,
        prompts_per_step=algorithm.prompts_per_step,
        group_size=algorithm.group_size,
        max_tokens=spec.sampling.max_tokens,
        rollouts=spec.rollout.replicas,
        models=models_of(job) if models is None else models,
        ranks=spec.trainer.ranks,
        slot_tokens=spec.trainer.backend.tokens_per_micro_batch or max(SLOT_TOKENS, spec.longest),
        shared_prompt=spec.trainer.backend.packing == "shared-prompt",
        whole_groups=kind.pairs,
        whole_steps=kind.whole_step or algorithm.epochs * algorithm.mini_batches > 1,
        passes=algorithm.epochs,
        checkpoint_every=spec.storage.checkpoints.every,
        keep=spec.weight_sync.keep,
        stagger=spec.weight_sync.stagger,
        evaluation=evaluation,
        colocated=colocated,
    )


def not_simulated(job: RLJob) -> list[str]:
    """Return descriptions of the features of a job that are not simulated."""
    spec = job.spec
    found = {
        "the reference as a role": spec.reference is not None,
        **{f"the task {task.name}": True for task in spec.tasks},
        "turns of the environment": spec.environment is not None,
        "groups without variance, which are dropped": spec.algorithm.filter_zero_variance == "drop",
        "elastic scaling": spec.elasticity.acts,
    }
    return [what for what, present in found.items() if present]


def models_of(job: RLJob) -> Models:
    """Return the models of a job whose manifest contains all durations: a simulated engine and a counting trainer.

    Raises ManifestError for other jobs, whose models must be fitted to a run.
    """
    spec = job.spec
    engine, backend = spec.rollout.engine, spec.trainer.backend
    for what, name, known in (
        ("rollout.engine", engine.name, "simulated"),
        ("trainer.backend", backend.name, "counting"),
    ):
        if name != known:
            raise ManifestError(
                f"the durations of {name} are not known",
                where=f"spec.{what}",
                hint=f"Use models that asyncflow sim fit made from a run of it, or use {known}",
            )
    return Models(
        engine=engine_model(engine.options, slots=engine.slots),
        trainer=trainer_model(backend.options),
    )


def engine_model(options: Mapping[str, Any], *, slots: int) -> EngineModel:
    """Return the model of a simulated engine with these options."""
    values = {name: float(value) for name, value in options.items() if name != "vocab"}
    scale = values.pop("time_scale", 1.0)
    tokens, sigma, rho = (values.pop(name, 0.0) for name in ("tokens", "sigma", "rho"))
    seconds = {name: value * scale for name, value in values.items()}
    return EngineModel(slots=slots, lengths=Lengths(tokens=tokens, sigma=sigma, rho=rho), **seconds)


def trainer_model(options: Mapping[str, Any]) -> TrainerModel:
    """Return the model of a counting trainer with these options."""
    names = {"slot_s": "sleep_s", "sample_s": "sample_s", "token_s": "token_s", "optimizer_s": "step_s"}
    return TrainerModel(**{field: float(options.get(option, 0.0)) for field, option in names.items()})
