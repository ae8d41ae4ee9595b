"""``plan(job)``: which roles a job has, and what flows between them.

Invariants: a pure function of the job, the same on every substrate; roles stand in the order in which they start, each
after those it waits for. There is no list of endpoints in a plan: a role is told the driver's address and dials in. Of
the flow only what the schedule fixes is said; the policies that do it are ``asyncflow.flow``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from asyncflow.api.durability import RestartSpec
from asyncflow.api.job import RLJob, RLJobSpec
from asyncflow.api.names import CONTROL_PORT, HTTP_PORT, RPC_PORT, RoleName
from asyncflow.api.placement import PROFILES, AcceleratorSpec, ResourcesSpec, TemplateSpec
from asyncflow.api.schedule import ScheduleSpec
from asyncflow.plan.queue import holding_roles, unit_after, unit_bytes
from asyncflow.plan.roles import Edge, JobPlan, Port, Readiness, Resources, RestartPolicy, Role

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_CPU_ONLY = AcceleratorSpec()


def plan(job: RLJob) -> JobPlan:
    """Return the roles of ``job`` and the flow between them."""
    spec = job.spec
    holding = holding_roles(spec.transfer_queue, "driver", lambda *given: _holding(spec, *given))
    roles = (_driver(spec), _controller(spec), *holding, _storage(spec), _trainer(spec), _rollout(spec))
    return JobPlan(job=job.name, roles=roles, edges=edges(spec))


def _driver(spec: RLJobSpec) -> Role:
    return Role(
        name="driver",
        replicas=1,
        core=1,
        most=1,
        leader=True,
        resources=_resources(spec.driver.resources, threads=1),
        restart=_restart(spec.failure_policy.driver),
        env=_env(spec.template, threads=1),
        **_listening(spec, Port(name="control", number=CONTROL_PORT)),
    )


def _controller(spec: RLJobSpec) -> Role:
    queue = spec.transfer_queue
    return Role(
        name="controller",
        replicas=queue.controllers,
        core=queue.controllers,
        most=queue.controllers,
        after=("driver",),
        durable=("ledger",),
        resources=_resources(ResourcesSpec(cpu=queue.resources.cpu), threads=1),
        restart=_restart(spec.failure_policy.controller),
        env=_env(spec.template, threads=1),
        **_listening(spec),
    )


def _storage(spec: RLJobSpec) -> Role:
    queue = spec.transfer_queue
    return Role(
        name="storage",
        replicas=queue.storage_units,
        core=queue.storage_units,
        most=queue.storage_units,
        after=unit_after(queue, "driver"),
        resources=_resources(queue.resources, threads=1, least_memory=unit_bytes(queue)),
        restart=_restart(spec.failure_policy.storage),
        env=_env(spec.template, threads=1),
        **_listening(spec),
    )


def _holding(spec: RLJobSpec, name: RoleName, replicas: int, resources: Resources, after: tuple[RoleName, ...]) -> Role:
    return Role(
        name=name,
        replicas=replicas,
        core=replicas,
        most=replicas,
        after=after,
        resources=resources,
        restart=_restart(spec.failure_policy.storage),
        env=_env(spec.template, threads=1),
        **_listening(spec),
    )


def _trainer(spec: RLJobSpec) -> Role:
    trainer = spec.trainer
    return Role(
        name="trainer",
        replicas=trainer.replicas,
        core=trainer.replicas,
        most=trainer.replicas,
        gang=True,
        ranks=trainer.local_ranks,
        after=("controller", "storage"),
        durable=("checkpoints",),
        resources=_resources(
            trainer.resources, threads=trainer.threads * trainer.local_ranks, accelerator=trainer.accelerator
        ),
        restart=_restart(spec.failure_policy.trainer),
        env=_env(spec.template, trainer.template, threads=trainer.threads, accelerator=trainer.accelerator),
        **_listening(spec),
    )


def _rollout(spec: RLJobSpec) -> Role:
    rollout = spec.rollout
    return Role(
        name="rollout",
        replicas=rollout.replicas,
        core=rollout.min_replicas,
        most=rollout.max_replicas,
        after=("controller", "storage"),
        resources=_resources(rollout.resources, threads=rollout.threads, accelerator=rollout.accelerator),
        restart=_restart(spec.failure_policy.rollout),
        env=_env(spec.template, rollout.template, threads=rollout.threads, accelerator=rollout.accelerator),
        **_listening(spec),
    )


def _listening(spec: RLJobSpec, *more: Port) -> dict[str, Any]:
    return {
        "ports": (Port(name="rpc", number=RPC_PORT), Port(name="http", number=HTTP_PORT), *more),
        "readiness": Readiness(path="/readyz", port="http", within_s=spec.limits.start_seconds),
    }


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


def _restart(spec: RestartSpec) -> RestartPolicy:
    return RestartPolicy(max_restarts=spec.max_restarts, window_s=spec.window_seconds, backoff_s=spec.backoff_seconds)


def _env(*templates: TemplateSpec, threads: int, accelerator: AcceleratorSpec = _CPU_ONLY) -> Mapping[str, str]:
    """Return the environment; what the user's templates say, later ones first, wins over the facts and ``threads``."""
    return MappingProxyType(
        dict.fromkeys(_THREAD_VARIABLES, str(threads))
        | {"TOKENIZERS_PARALLELISM": "false"}
        | dict(PROFILES[accelerator.profile].env)
        | {variable.name: variable.value for template in templates for variable in template.env}
    )


_SWAPS = {
    "quota": "when its share of the step is done",
    "sequence": "between sequences",
    "token": "between tokens",
}


def edges(spec: RLJobSpec) -> tuple[Edge, ...]:
    """Return the data flow in the order in which a sample meets it."""
    schedule = spec.schedule
    judged = f"responses, log-probs, versions, reward ({spec.reward.function})"
    return (
        Edge(source="driver", target="storage", what="prompts", when=f"{spec.algorithm.prompts_per_step} a step"),
        Edge(source="storage", target="rollout", what="prompts, leased", when=generated_by(schedule)),
        Edge(source="rollout", target="storage", what=judged, when="as each sample is finished"),
        Edge(source="driver", target="storage", what="advantages", when="as each group is finished"),
        Edge(source="storage", target="trainer", what="groups, in equal slots for all ranks", when=_trained(schedule)),
        Edge(source="trainer", target="rollout", what="weights, pulled", when=_swapped(schedule)),
    )


def generated_by(schedule: ScheduleSpec) -> str:
    """Return in words which version generates D_k."""
    if schedule.update == "sync" and schedule.swap_at == "quota":
        return "D_k by θ_{k-1}"
    if schedule.swap_at == "quota":
        return "D_1, D_2 by θ_0, D_k by θ_{k-2}"
    return f"D_k by θ_{{k-{1 + schedule.max_staleness}}} or newer"


def _trained(schedule: ScheduleSpec) -> str:
    return "when D_k is complete" if schedule.whole_steps else "as groups are finished"


def _swapped(schedule: ScheduleSpec) -> str:
    often = "every step" if schedule.sync_every == 1 else f"every {schedule.sync_every} steps"
    return f"{often}; a rollout swaps {_SWAPS[schedule.swap_at]}"
