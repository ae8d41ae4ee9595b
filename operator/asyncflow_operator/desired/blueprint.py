"""Blueprint of the pods of one role: a role of the plan, with all that only the cluster knows.

Invariant: two pods of one role differ by index and attempt alone. What the user said about a role (``wish``) is kept
apart from what this operator makes of it, so that an operator of another version finds that nothing has changed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from asyncflow.api.base import Spec
from asyncflow.api.durability import LimitsSpec
from asyncflow.api.job import RLJob
from asyncflow.api.learning import RewardSpec
from asyncflow.api.names import LABEL_QUEUE, QUEUE_ROLES, REWARD_CONTAINER, RPC_PORT, RoleName, service
from asyncflow.api.placement import SchedulingSpec, TemplateSpec
from asyncflow.api.queue import LEAVE_S, StoreSpec, TransferQueue
from asyncflow.plan import plan
from asyncflow.plan.queue import queue_role, queue_roles
from asyncflow.plan.roles import Role
from asyncflow_operator.desired.images import Registry, image_of
from asyncflow_operator.desired.objects import Family
from asyncflow_operator.desired.storage import Mounted, job_mounts, queue_mounts

_GRACE_S: Final = 10.0
_DRAIN_MARGIN_S: Final = 5.0
_SHAPE: Final = {"accelerator", "ranks_per_replica", "threads", "resources", "template"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Fields that a gang scheduler reads from a pod, or wants in it.

    spec: fields of its spec, which a template may change; place: those that no template changes.
    """

    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    annotations: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    spec: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    place: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """Properties that distinguish the pods of a role.

    keys: the Secret with key and token; templates: the user's, the later wins; wish: what the user said of the role, as
    JSON values; leader: the address that others dial, where process 0 of the role listens if ``leads``; first_seat,
    first_slot: number of process 0 among all of the family, and among those that have devices; store: one that others
    run, which the role uses; reward: what its pods score by, None for nothing; grace_s: seconds from SIGTERM to
    SIGKILL; node_lost_s: for which its node may not answer; readers: roles that read from this one; granted: what the
    gang scheduler has given to the core's pods of the role.
    """

    family: Family
    keys: str
    role: Role
    templates: tuple[TemplateSpec, ...]
    wish: Mapping[str, object]
    image: str
    leader: str
    leads: bool
    labels: Mapping[str, str]
    mounts: tuple[Mounted, ...]
    scheduling: SchedulingSpec
    store: StoreSpec | None = None
    reward: RewardSpec | None = None
    grace_s: float = _GRACE_S
    node_lost_s: int = LimitsSpec().node_lost_seconds
    first_seat: int = 0
    first_slot: int = 0
    readers: tuple[RoleName, ...] = ()
    granted: Membership = Membership()

    def said(self, field: str, *, otherwise: Any) -> Any:
        """Return what the templates say about a field of the pod's spec, the last word where several do."""
        said = [template.pod_spec[field] for template in self.templates if field in template.pod_spec]
        return said[-1] if said else otherwise

    @property
    def host_network(self) -> bool:
        """Whether the pods are on the network of their nodes."""
        return bool(self.said("hostNetwork", otherwise=False))

    @property
    def vendor_runtime(self) -> bool:
        """Whether the container runtime brings what the devices need: a node's usual one, or the class that a template
        names. It does not where a template says ``runtimeClassName: ""``.
        """
        return bool(self.said("runtimeClassName", otherwise=True))


def job_blueprint(
    job: RLJob,
    name: RoleName,
    *,
    family: Family,
    keys: str,
    pinned: Mapping[str, str],
    registry: Registry,
    granted: Membership = Membership(),
) -> Blueprint:
    """Return the blueprint of a role of a job.

    pinned: images by role, and of what scores, which the images of jobs that began before there was that cannot do;
    granted: what the gang scheduler gave.

    Raises KeyError where the job has no such role.
    """
    spec = job.spec
    planned = plan(job)
    role = planned.role(name)
    used = templates_of(job, name)
    grace_s = {"rollout": spec.rollout.drain_seconds + _DRAIN_MARGIN_S, "trainer": spec.limits.stop_seconds + _GRACE_S}
    grace_s["storage"] = LEAVE_S + _GRACE_S
    return Blueprint(
        family=family,
        keys=keys,
        role=role,
        templates=used,
        wish=wish_of(job, name),
        image=image_of(role, templates=used, pinned=pinned, registry=registry),
        leader=f"tcp://{service(family.name, 'driver')}.{family.namespace}.svc:{RPC_PORT}",
        leads=name == "driver",
        labels={LABEL_QUEUE: family.name} if name in QUEUE_ROLES else {},
        mounts=job_mounts(job, role),
        grace_s=grace_s.get(name, _GRACE_S),
        node_lost_s=spec.limits.node_lost_seconds,
        first_seat=_before(role, planned.roles),
        first_slot=_before(role, [other for other in planned.roles if other.resources.accelerators]),
        scheduling=spec.scheduling,
        store=spec.transfer_queue.store if name == "storage" else None,
        reward=spec.reward if name == "rollout" and (not pinned or REWARD_CONTAINER in pinned) else None,
        readers=("trainer", "rollout") if name == "storage" else (),
        granted=granted,
    )


def queue_blueprint(
    queue: TransferQueue, name: RoleName, *, family: Family, keys: str, registry: Registry
) -> Blueprint:
    """Return the blueprint of a role of a queue that stands alone. Raises KeyError where a queue has no such role."""
    spec = queue.spec
    role = queue_role(queue, name)
    return Blueprint(
        family=family,
        keys=keys,
        role=role,
        templates=(spec.template,),
        wish=queue_wish(queue),
        image=image_of(role, templates=(spec.template,), pinned={}, registry=registry),
        leader=f"tcp://{service(family.name, 'controller')}.{family.namespace}.svc:{RPC_PORT}",
        leads=name == "controller",
        labels={},
        mounts=queue_mounts(queue, role),
        grace_s=LEAVE_S + _GRACE_S if name == "storage" else _GRACE_S,
        scheduling=SchedulingSpec(),
        store=spec.store if name == "storage" else None,
        first_seat=_before(role, queue_roles(queue)),
    )


def templates_of(job: RLJob, name: RoleName) -> tuple[TemplateSpec, ...]:
    """Return the user's templates for a role; the later wins."""
    spec = job.spec
    of_role = {"trainer": (spec.trainer.template,), "rollout": (spec.rollout.template,)}
    return (spec.template, *of_role.get(name, ()))


def _before(role: Role, roles: Sequence[Role]) -> int:
    """Count the processes of the roles that stand before ``role``; the elastic one stands last."""
    return sum(other.replicas for other in itertools.takewhile(lambda other: other.name != role.name, roles))


def wish_of(job: RLJob, name: RoleName) -> dict[str, object]:
    """Return what shapes a pod of the role; not what its processes read from the manifest, nor how many there are."""
    spec = job.spec
    of_role: dict[str, dict[str, object]] = {
        "driver": {"resources": spec.driver.resources},
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
            "rewards": spec.reward.resources,
        },
    }
    return _said(template=spec.template, scheduling=spec.scheduling, **of_role[name])


def queue_wish(queue: TransferQueue) -> dict[str, object]:
    """Return what shapes the pods of a queue that stands alone."""
    spec = queue.spec
    held, ledger = spec.bytes_per_unit, spec.ledger.claim
    return _said(template=spec.template, resources=spec.resources, bytes=held, ledger=ledger, store=spec.store)


def _said(**wishes: object) -> dict[str, object]:
    """Return wishes as JSON values without what is left open, which may get another default one day."""
    values = (
        (name, wish.model_dump(mode="json", exclude_defaults=True) if isinstance(wish, Spec) else wish)
        for name, wish in wishes.items()
    )
    return {name: value for name, value in values if value not in (None, {})}
