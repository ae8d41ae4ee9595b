"""Function ``plan(job)``: the roles of a job, and the tasks that they run.

``asyncflow.api.graph`` describes the flow of samples; ``asyncflow.flow`` contains the policies that control it.

Invariants: the plan is a pure function of the job, the same on every substrate. The roles are in the order in which
they start, each after the roles that it waits for. A plan contains no list of endpoints: each role gets the address of
the driver and connects to it. A trainer that is the user's own process (``trainer.external``) connects in the same way
and is not a role of the plan.
"""

from __future__ import annotations

from typing import Any

from asyncflow.api.durability import RestartSpec
from asyncflow.api.graph import ADVANTAGE, CRITIC, REFERENCE, REWARD, Task, graph_of
from asyncflow.api.job import RLJob, RLJobSpec
from asyncflow.api.names import CONTROL_PORT, TRAIN, RoleName
from asyncflow.api.placement import PROFILES, AcceleratorSpec, ResourcesSpec, TemplateSpec
from asyncflow.api.schedule import ScheduleSpec
from asyncflow.api.tasks import CriticRoleSpec, ProcessSpec, WorkerSpec
from asyncflow.api.workers import RolloutSpec, TrainerSpec
from asyncflow.plan.queue import holding_roles, serving_role, unit_after, unit_bytes
from asyncflow.plan.roles import JobPlan, Port, Resources, Role

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_TOKENIZERS = "TOKENIZERS_PARALLELISM"
READ_LATE = frozenset((*_THREAD_VARIABLES, _TOKENIZERS))
"""Variables that may be set after the Python interpreter has started: the libraries read them at their first use."""
_CPU_ONLY = AcceleratorSpec()
_IMPORTS = {
    "torch": ("asyncflow.training.torch.backend",),
    "transformers": ("asyncflow.rollout.engines.transformers",),
    REFERENCE: ("asyncflow.training.torch.reference",),
    CRITIC: ("asyncflow.training.torch.critic_role",),
}
"""Modules whose import takes seconds, by backend, engine or role."""


def plan(job: RLJob, *, decided: str = ADVANTAGE, critic: bool = False) -> JobPlan:
    """Return the roles of ``job`` and its tasks. decided, critic: see ``graph_of``."""
    spec = job.spec
    holding = holding_roles(spec.transfer_queue, "driver", lambda *arguments: _holding(spec, *arguments))
    critics = () if (own := critic_role(spec)) is None else (_critic(spec, own),)
    trainer = () if spec.trainer.external else (_trainer(spec),)
    workers = [_working(spec, name, worker) for name, worker in working_roles(spec).items()]
    roles = (
        *(_driver(spec), _controller(spec), *holding, _storage(spec)),
        *(*critics, *trainer, *workers, _rollout(spec)),
    )
    return JobPlan(job=job.name, roles=roles, graph=graph_of(spec, decided=decided, critic=critic))


def _driver(spec: RLJobSpec) -> Role:
    resources = _resources(spec.driver.resources, threads=1)
    control = (Port(name="control", number=CONTROL_PORT),)
    restart = spec.failure_policy.driver
    return _role(spec, "driver", 1, restart, resources=resources, leader=True, ports=control, durable=("driver",))


def _controller(spec: RLJobSpec) -> Role:
    queue, restart = spec.transfer_queue, spec.failure_policy.controller
    resources = _resources(ResourcesSpec(cpu=queue.resources.cpu), threads=1)
    return _role(
        spec, "controller", queue.controllers, restart, resources=resources, after=("driver",), durable=("ledger",)
    )


def _storage(spec: RLJobSpec) -> Role:
    queue = spec.transfer_queue
    resources = _resources(queue.resources, threads=1, least_memory=unit_bytes(queue))
    return _holding(spec, "storage", queue.storage_units, resources, unit_after(queue, "driver"))


def _holding(spec: RLJobSpec, name: RoleName, replicas: int, resources: Resources, after: tuple[RoleName, ...]) -> Role:
    return _role(spec, name, replicas, spec.failure_policy.storage, resources=resources, after=after)


def _trainer(spec: RLJobSpec) -> Role:
    trainer = spec.trainer
    return _role(
        spec,
        "trainer",
        trainer.replicas,
        spec.failure_policy.trainer,
        worker=trainer,
        resources=_resources(
            trainer.resources, threads=trainer.threads * trainer.local_ranks, accelerator=trainer.accelerator
        ),
        gang=True,
        ranks=trainer.local_ranks,
        after=("controller", "storage"),
        durable=("checkpoints",),
        imports=_IMPORTS.get(trainer.backend.name, ()),
    )


def critic_role(spec: RLJobSpec) -> CriticRoleSpec | None:
    """Return the settings of the critic's role; None if the critic is not a role of its own."""
    return None if spec.critic is None else spec.critic.role


def _critic(spec: RLJobSpec, own: CriticRoleSpec) -> Role:
    return _role(
        spec,
        CRITIC,
        own.replicas,
        spec.failure_policy.trainer,
        worker=own,
        exchanges=True,
        resources=_resources(own.resources, threads=own.threads, accelerator=own.accelerator),
        after=("driver",),
        durable=("checkpoints",),
        imports=_IMPORTS[CRITIC],
    )


def _rollout(spec: RLJobSpec) -> Role:
    rollout = spec.rollout
    return _role(
        spec,
        "rollout",
        rollout.replicas,
        spec.failure_policy.rollout,
        worker=rollout,
        resources=_resources(rollout.resources, threads=rollout.threads, accelerator=rollout.accelerator),
        core=rollout.min_replicas,
        most=rollout.max_replicas,
        after=("controller", "storage"),
        imports=_IMPORTS.get(rollout.engine.name, ()),
    )


def working_roles(spec: RLJobSpec) -> dict[RoleName, WorkerSpec]:
    """Return the optional roles that work on rows: reward, reference model, and one for each task with a function."""
    own: dict[RoleName, WorkerSpec | None] = {REWARD: spec.reward.role, REFERENCE: spec.reference}
    found = {name: worker for name, worker in own.items() if worker is not None}
    return found | spec.task_roles


def added_roles(spec: RLJobSpec) -> dict[RoleName, WorkerSpec | CriticRoleSpec]:
    """Return all optional roles: the roles of ``working_roles``, and the critic."""
    critic = critic_role(spec)
    return {**({} if critic is None else {CRITIC: critic}), **working_roles(spec)}


def _working(spec: RLJobSpec, name: RoleName, worker: WorkerSpec) -> Role:
    return _role(
        spec,
        name,
        worker.replicas,
        spec.failure_policy.rollout,
        worker=worker,
        resources=_resources(worker.resources, threads=worker.threads, accelerator=worker.accelerator),
        after=("controller", "storage"),
        imports=_IMPORTS.get(name, ()),
    )


def _role(
    spec: RLJobSpec,
    name: RoleName,
    replicas: int,
    restart: RestartSpec,
    *,
    worker: TrainerSpec | RolloutSpec | ProcessSpec | None = None,
    **more: Any,
) -> Role:
    """Return a role of the job. worker: its settings if it computes with a model; more: see ``serving_role``."""
    env = _env(spec.template)
    if worker is not None:
        env = _env(spec.template, worker.template, threads=worker.threads, accelerator=worker.accelerator)
    return serving_role(name, replicas, restart=restart, limits=spec.limits, env=env, **more)


def _resources(
    stated: ResourcesSpec, *, threads: int, least_memory: int | None = None, accelerator: AcceleratorSpec = _CPU_ONLY
) -> Resources:
    return Resources(
        cpu=float(stated.cpu.amount) if stated.cpu is not None else float(threads),
        memory=stated.memory.bytes if stated.memory is not None else least_memory,
        shared_memory=stated.shared_memory.bytes if stated.shared_memory is not None else None,
        profile=accelerator.profile,
        resource=PROFILES[accelerator.profile].resource,
        accelerators=accelerator.count,
        share=accelerator.share,
    )


def _env(*templates: TemplateSpec, threads: int = 1, accelerator: AcceleratorSpec = _CPU_ONLY) -> dict[str, str]:
    """Return the environment. The user's templates override the profile and ``threads``; a later template wins."""
    return (
        dict.fromkeys(_THREAD_VARIABLES, str(threads))
        | {_TOKENIZERS: "false"}
        | dict(PROFILES[accelerator.profile].env)
        | {variable.name: variable.value for template in templates for variable in template.env}
    )


_SWAPS = {
    "quota": "when its share of the step is done",
    "sequence": "between sequences",
    "token": "between tokens",
}


def generated_by(schedule: ScheduleSpec) -> str:
    """Return the version that generates D_k, as text."""
    if schedule.update == "sync" and schedule.swap_at == "quota":
        return "D_k by θ_{k-1}"
    if schedule.swap_at == "quota":
        return "D_1, D_2 by θ_0, D_k by θ_{k-2}"
    return f"D_k by θ_{{k-{1 + schedule.max_staleness}}} or newer"


def begins(spec: RLJobSpec, task: Task) -> str:
    """Return the condition under which a task claims its rows, as text."""
    if task.name == "rollout":
        return generated_by(spec.schedule) if task.partition == TRAIN else "when a version is to be evaluated"
    if task.gang:
        return "when D_k is complete" if spec.schedule.whole_steps else "as groups are finished"
    return "when a group is finished" if task.groups else "when a sample is finished"


def swapped(schedule: ScheduleSpec) -> str:
    """Return the points at which rollouts get new weights, as text."""
    often = "every step" if schedule.sync_every == 1 else f"every {schedule.sync_every} steps"
    return f"{often}; a rollout swaps {_SWAPS[schedule.swap_at]}"
