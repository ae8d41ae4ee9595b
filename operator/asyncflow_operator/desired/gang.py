"""How the core of a job, its trainer, queue, driver and least number of rollouts, gets its place as a whole.

Volcano: one PodGroup of the core; a rollout above the minimum is in no group of ours, so Volcano gives it one of its
own, in the same queue. Kueue: one Workload of our own for the core, which the operator starts when it is admitted; a
rollout above the minimum is a plain pod with the queue's label, a Workload by itself. Kueue's plain-pod *groups* are of
no use here: their size is fixed, and their finalizer keeps a dead pod, and so its name, until a substitute exists.

Invariant: the core's group counts exactly the pods that always exist, whatever is scaled; losing or adding a rollout
above the minimum changes nothing in it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from types import MappingProxyType
from typing import Final

from asyncflow.api.placement import SchedulingSpec
from asyncflow.api.quantity import PATTERN, Quantity
from asyncflow.plan.roles import Role
from asyncflow_operator.desired.blueprint import Blueprint
from asyncflow_operator.desired.objects import Family, make_object, stamped
from asyncflow_operator.observed import Manifest

VOLCANO_GROUP: Final = "scheduling.k8s.io/group-name"
VOLCANO_QUEUE: Final = "scheduling.volcano.sh/queue-name"
KUEUE_QUEUE: Final = "kueue.x-k8s.io/queue-name"
_CONTAINERS: Final = ("initContainers", "containers")
_KUEUE_USUAL: Final = "default"
"""The LocalQueue that Kueue takes where none is named."""
_SCHEDULED_BY: Final = (
    "nodeSelector",
    "affinity",
    "tolerations",
    "topologySpreadConstraints",
    "runtimeClassName",
    "priorityClassName",
    "overhead",
    "resourceClaims",
)
"""Fields of a PodSpec that decide where, and at whose cost, it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What a gang scheduler reads from a pod."""

    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    annotations: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    spec: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


def membership(blueprint: Blueprint, index: int) -> Membership:
    """Give what ties process ``index`` to the core's group, or keeps it out: the lowest indices are the core."""
    scheduling, in_core = blueprint.scheduling, index < blueprint.role.core
    if scheduling.gang == "volcano":
        queue = {VOLCANO_QUEUE: scheduling.queue} if scheduling.queue is not None else {}
        group = {VOLCANO_GROUP: blueprint.family.name} if in_core else {}
        return Membership(annotations={**queue, **group}, spec={"schedulerName": "volcano"})
    if scheduling.gang == "kueue" and not in_core:
        return Membership(labels={KUEUE_QUEUE: scheduling.queue or _KUEUE_USUAL})
    return Membership()


def make_gang(
    scheduling: SchedulingSpec, family: Family, *, core: Sequence[tuple[Role, Manifest]], active: bool
) -> tuple[Manifest, ...]:
    """Give the object that places the core, if there is one.

    core: each role of which some are in the core, with one of its pods; active: false while the job is suspended, so
    that its quota goes to others.
    """
    if scheduling.gang == "volcano":
        return (_pod_group(scheduling, family, core),)
    if scheduling.gang == "kueue":
        return (_workload(scheduling, family, core, active=active),)
    return ()


def _pod_group(scheduling: SchedulingSpec, family: Family, core: Sequence[tuple[Role, Manifest]]) -> Manifest:
    spec: Manifest = {"minMember": sum(role.core for role, _ in core), "minResources": _requests(core)}
    if scheduling.queue is not None:
        spec["queue"] = scheduling.queue
    return stamped(
        make_object("scheduling.volcano.sh/v1beta1", "PodGroup", family, name=family.name, body={"spec": spec})
    )


def _workload(
    scheduling: SchedulingSpec, family: Family, core: Sequence[tuple[Role, Manifest]], *, active: bool
) -> Manifest:
    spec: Manifest = {
        "active": active,
        "queueName": scheduling.queue or _KUEUE_USUAL,
        "podSets": [
            {"name": role.name, "count": role.core, "template": {"spec": _shape(pod["spec"])}} for role, pod in core
        ],
    }
    return stamped(make_object("kueue.x-k8s.io/v1beta1", "Workload", family, name=family.name, body={"spec": spec}))


def _shape(spec: Manifest) -> Manifest:
    shape: Manifest = {"restartPolicy": "Never"} | {name: spec[name] for name in _SCHEDULED_BY if name in spec}
    return shape | {kind: [_cost(each) for each in spec[kind]] for kind in _CONTAINERS if kind in spec}


def _cost(container: Manifest) -> Manifest:
    return {name: container[name] for name in ("name", "image", "resources", "restartPolicy") if name in container}


def _running(spec: Manifest) -> list[Manifest]:
    """Return the containers that run as long as the pod."""
    beside = [each for each in spec.get("initContainers", ()) if each.get("restartPolicy") == "Always"]
    return [*beside, *spec["containers"]]


def _requests(core: Sequence[tuple[Role, Manifest]]) -> dict[str, str]:
    """Add up what the core's containers ask for; what is no quantity is for the API server to refuse, in the pod."""
    total: Counter[str] = Counter()
    for role, pod in core:
        for container in _running(pod["spec"]):
            for name, amount in container.get("resources", {}).get("requests", {}).items():
                if re.fullmatch(PATTERN, str(amount)):
                    total[name] += int(Quantity(str(amount)).amount * 1000) * role.core
    return {name: _written(Decimal(thousandths) / 1000) for name, thousandths in sorted(total.items())}


def _written(amount: Decimal) -> str:
    return str(int(amount)) if amount == int(amount) else f"{int(amount * 1000)}m"
