"""Blueprint of the pods of one role: a role of the plan, completed with the properties that only a cluster has.

The image of a role is the user's, otherwise the pinned one of a started job, otherwise that of the operator's version.

Invariants: two pods of one role differ by index and attempt only. The user's settings of a role (``requested``) are
stored separately from the pod that this operator builds from them, so that an operator of another version finds them
unchanged. Another version of the operator does not change the images of a started job, except that a pinned image is
dropped if it is not the one that the devices need.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from asyncflow.api.base import Spec
from asyncflow.api.durability import LimitsSpec
from asyncflow.api.graph import CRITIC, REWARD
from asyncflow.api.job import RLJob, RLJobSpec
from asyncflow.api.names import LABEL_QUEUE, PUBLISHER, QUEUE_ROLES, REWARD_CONTAINER, RPC_PORT, RoleName, service
from asyncflow.api.placement import PROFILES, SchedulingSpec, TemplateSpec
from asyncflow.api.queue import DRAIN_S, StoreSpec, TransferQueue
from asyncflow.api.rewards import RewardSpec
from asyncflow.api.weights import PublisherSpec, WeightSync
from asyncflow.plan import plan
from asyncflow.plan.job import added_roles, working_roles
from asyncflow.plan.publisher import publisher_role
from asyncflow.plan.queue import queue_role, queue_roles
from asyncflow.plan.roles import Role
from asyncflow_operator.desired.objects import Family
from asyncflow_operator.desired.secrets import OwnerSecrets
from asyncflow_operator.desired.storage import Mounted, job_mounts, model_mounts, queue_mounts

_GRACE_S: Final = 10.0
_DRAIN_MARGIN_S: Final = 5.0
_SHAPE: Final = {"accelerator", "ranks_per_replica", "threads", "resources", "template"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """Location of the operator's own images: ``prefix/runtime-cpu:tag``."""

    prefix: str
    tag: str

    def image(self, name: str) -> str:
        """Return the full name of an image."""
        return f"{self.prefix}/{name}:{self.tag}" if self.prefix else f"{name}:{self.tag}"


def image_of(role: Role, *, templates: Sequence[TemplateSpec], pinned: Mapping[str, str], registry: Registry) -> str:
    """Return the image of a role. templates: a later one overrides an earlier one; pinned: images by role."""
    images = [template.image for template in templates if template.image is not None]
    if images:
        return images[-1]
    needed = PROFILES[role.resources.profile].image
    pin = pinned.get(role.name, "")
    return pin if re.fullmatch(rf"(.*/)?{re.escape(needed)}([:@].*)?", pin) else registry.image(needed)


@dataclass(frozen=True, slots=True, kw_only=True)
class GangMembership:
    """Fields of a pod that a gang scheduler reads or assigns.

    spec: fields of the pod's spec that a template may change; place: fields that no template can change.
    """

    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    annotations: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    spec: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    place: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """Properties of the pods of a role.

    templates: the user's templates, of which a later one overrides an earlier one.
    requested: the user's settings of the role, as JSON values.
    leader: the address to which other processes connect; process 0 of the role listens there if ``leads``.
    first_replica, first_slot: number of process 0 among all processes of the family, and among those with devices.
    store: an external store that the role uses; env_from: Secrets whose entries become environment variables.
    reward: the reward section of pods that score; has_environment: whether they also answer turns of the model.
    grace_s: seconds from SIGTERM to SIGKILL; node_lost_s: seconds until a pod leaves a node that does not answer.
    readers: roles that read from this one; granted: settings that the gang scheduler has assigned to the core's pods.
    """

    family: Family
    secrets: OwnerSecrets
    role: Role
    templates: tuple[TemplateSpec, ...]
    requested: Mapping[str, object]
    image: str
    leader: str
    leads: bool
    labels: Mapping[str, str]
    mounts: tuple[Mounted, ...]
    scheduling: SchedulingSpec
    store: StoreSpec | None = None
    reward: RewardSpec | None = None
    has_environment: bool = False
    grace_s: float = _GRACE_S
    node_lost_s: int = LimitsSpec().node_lost_seconds
    env_from: tuple[str, ...] = ()
    first_replica: int = 0
    first_slot: int = 0
    readers: tuple[RoleName, ...] = ()
    granted: GangMembership = GangMembership()

    def template_value(self, field: str, *, default: Any) -> Any:
        """Return the value of a field of the pod's spec in the last template that sets it."""
        values = [template.pod_spec[field] for template in self.templates if field in template.pod_spec]
        return values[-1] if values else default

    @property
    def scores_only(self) -> bool:
        """Return whether only the reward container computes, so that the devices belong to it."""
        return self.reward is not None and self.role.name == REWARD

    @property
    def host_network(self) -> bool:
        """Return whether the pods use the network of their nodes."""
        return bool(self.template_value("hostNetwork", default=False))

    @property
    def vendor_runtime(self) -> bool:
        """Return whether the container runtime provides the files that the devices need.

        The default runtime of a node and the class that a template names do; with ``runtimeClassName: ""`` in a
        template, none does.
        """
        return bool(self.template_value("runtimeClassName", default=True))


def job_blueprint(
    job: RLJob,
    name: RoleName,
    *,
    family: Family,
    secrets: OwnerSecrets,
    pinned: Mapping[str, str],
    registry: Registry,
    granted: GangMembership = GangMembership(),
) -> Blueprint:
    """Return the blueprint of a role of a job. Raises KeyError if the job does not have the role.

    pinned: images by role and for the reward container. If images are pinned without one for the reward container, the
        job started with images that do not support that container, and its pods have none.
    granted: settings that the gang scheduler has assigned.
    """
    spec = job.spec
    planned = plan(job)
    role = planned.role(name)
    templates = templates_of(job, name)
    grace_s = {"rollout": spec.rollout.drain_seconds + _DRAIN_MARGIN_S, "trainer": spec.limits.stop_seconds + _GRACE_S}
    grace_s["storage"] = DRAIN_S + _GRACE_S
    grace_s[CRITIC] = grace_s["trainer"]
    grace_s |= {role: worker.drain_seconds + _DRAIN_MARGIN_S for role, worker in working_roles(spec).items()}
    return Blueprint(
        family=family,
        secrets=secrets,
        role=role,
        templates=templates,
        requested=requested_by_job(job, name),
        image=image_of(role, templates=templates, pinned=pinned, registry=registry),
        leader=leader_address(family, "driver"),
        leads=name == "driver",
        labels={LABEL_QUEUE: family.name} if name in QUEUE_ROLES else {},
        mounts=job_mounts(job, role),
        grace_s=grace_s.get(name, _GRACE_S),
        node_lost_s=spec.limits.node_lost_seconds,
        first_replica=_before(role, planned.roles),
        first_slot=_before(role, [other for other in planned.roles if other.resources.accelerators]),
        scheduling=spec.scheduling,
        store=spec.transfer_queue.store if name == "storage" else None,
        env_from=_sink_secrets(job) if name == "driver" else (),
        reward=spec.reward if name in scoring_roles(spec) and (not pinned or REWARD_CONTAINER in pinned) else None,
        has_environment=name == "rollout" and spec.environment is not None,
        readers=("trainer", "rollout", *working_roles(spec)) if name == "storage" else (),
        granted=granted,
    )


def scoring_roles(spec: RLJobSpec) -> tuple[RoleName, ...]:
    """Return the roles whose pods have a reward container, which runs the user's rewards or environment."""
    reward: RoleName = "rollout" if spec.reward.role is None else REWARD
    return (reward, "rollout") if spec.environment is not None and reward != "rollout" else (reward,)


def _sink_secrets(job: RLJob) -> tuple[str, ...]:
    return tuple(sorted({sink.secret for sink in job.spec.telemetry.sinks if sink.secret is not None}))


def queue_blueprint(
    queue: TransferQueue, name: RoleName, *, family: Family, secrets: OwnerSecrets, registry: Registry
) -> Blueprint:
    """Return the blueprint of a role of a queue without a job. Raises KeyError if the queue does not have the role."""
    spec = queue.spec
    role = queue_role(queue, name)
    return Blueprint(
        family=family,
        secrets=secrets,
        role=role,
        templates=(spec.template,),
        requested=requested_by_queue(queue),
        image=image_of(role, templates=(spec.template,), pinned={}, registry=registry),
        leader=leader_address(family, "controller"),
        leads=name == "controller",
        labels={},
        mounts=queue_mounts(queue, role),
        grace_s=DRAIN_S + _GRACE_S if name == "storage" else _GRACE_S,
        scheduling=SchedulingSpec(),
        store=spec.store if name == "storage" else None,
        first_replica=_before(role, queue_roles(queue)),
    )


def publisher_blueprint(sync: WeightSync, *, family: Family, secrets: OwnerSecrets, registry: Registry) -> Blueprint:
    """Return the blueprint of the publisher of a WeightSync whose source is a model."""
    role, publisher = publisher_role(sync), sync.spec.publisher or PublisherSpec()
    return Blueprint(
        family=family,
        secrets=secrets,
        role=role,
        templates=(publisher.template,),
        requested=requested_by_sync(sync),
        image=image_of(role, templates=(publisher.template,), pinned={}, registry=registry),
        leader=leader_address(family, PUBLISHER),
        leads=True,
        labels={},
        mounts=model_mounts(sync.spec.publishes or ""),
        scheduling=SchedulingSpec(),
    )


def leader_address(family: Family, role: RoleName) -> str:
    """Return the address to which all processes of a family connect."""
    return f"tcp://{service(family.name, role)}.{family.namespace}.svc:{RPC_PORT}"


def templates_of(job: RLJob, name: RoleName) -> tuple[TemplateSpec, ...]:
    """Return the user's templates for a role; a later one overrides an earlier one."""
    spec = job.spec
    of_role = {"trainer": (spec.trainer.template,), "rollout": (spec.rollout.template,)}
    of_role |= {role: (worker.template,) for role, worker in added_roles(spec).items()}
    return (spec.template, *of_role.get(name, ()))


def _before(role: Role, roles: Sequence[Role]) -> int:
    """Return the number of processes of the roles before ``role``; the elastic role is the last one."""
    return sum(other.replicas for other in itertools.takewhile(lambda other: other.name != role.name, roles))


def requested_by_job(job: RLJob, name: RoleName) -> dict[str, object]:
    """Return the settings on which a pod of the role depends.

    Left out are settings that its processes read from the manifest, and their number. A role that the job does not have
    has only the settings of all pods.
    """
    spec = job.spec
    of_role: dict[str, dict[str, object]] = {
        "driver": {
            "resources": spec.driver.resources,
            "claim": spec.driver.claim,
            "secrets": _sink_secrets(job) or None,
        },
        "controller": {"cpu": spec.transfer_queue.resources.cpu, "ledger": spec.storage.ledger.claim},
        "master": {"cpu": spec.transfer_queue.resources.cpu},
        "holder": {"cpu": spec.transfer_queue.resources.cpu, "bytes": spec.transfer_queue.bytes_per_unit},
        "storage": {
            "resources": spec.transfer_queue.resources,
            "bytes": spec.transfer_queue.bytes_per_unit,
            "store": spec.transfer_queue.store,
        },
        "trainer": {
            "ranks": spec.trainer.replicas,
            "trainer": spec.trainer.model_dump(mode="json", include=_SHAPE, exclude_defaults=True),
            "checkpoints": spec.storage.checkpoints.claim,
            "access": spec.storage.checkpoints.access_mode,
        },
        "rollout": {
            "rollout": spec.rollout.model_dump(mode="json", include=_SHAPE, exclude_defaults=True),
        },
    }
    for role, worker in added_roles(spec).items():
        of_role[role] = {"worker": worker.model_dump(mode="json", include=_SHAPE, exclude_defaults=True)}
    if CRITIC in of_role:
        of_role[CRITIC] |= {"checkpoints": spec.storage.checkpoints.claim}
    for role in scoring_roles(spec):
        of_role[role]["rewards"] = spec.reward.resources
    return _without_defaults(template=spec.template, scheduling=spec.scheduling, **of_role.get(name, {}))


def requested_by_queue(queue: TransferQueue) -> dict[str, object]:
    """Return the settings on which the pods of a queue without a job depend."""
    spec = queue.spec
    return _without_defaults(
        template=spec.template,
        resources=spec.resources,
        bytes=spec.bytes_per_unit,
        ledger=spec.ledger.claim,
        store=spec.store,
    )


def requested_by_sync(sync: WeightSync) -> dict[str, object]:
    """Return the settings on which the pod of a publisher depends."""
    publisher = sync.spec.publisher or PublisherSpec()
    return _without_defaults(template=publisher.template, resources=publisher.resources, model=sync.spec.publishes)


def _without_defaults(**requested: object) -> dict[str, object]:
    """Return values as JSON without those that have their defaults, which another version may change."""
    values = (
        (name, requested.model_dump(mode="json", exclude_defaults=True) if isinstance(requested, Spec) else requested)
        for name, requested in requested.items()
    )
    return {name: value for name, value in values if value not in (None, {})}
