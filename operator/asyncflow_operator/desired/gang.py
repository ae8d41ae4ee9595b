"""Scheduling of a job's core as a whole: its trainer, queue, driver and least number of rollouts.

Volcano: one PodGroup of the core; a rollout above the minimum is in no group of the operator, so Volcano makes one for
it, in the same queue. Kueue: one Workload of the operator for the core, which the operator starts when it is admitted,
on nodes of the flavors that it was given; a rollout above the minimum is a plain pod with the queue's label, a Workload
by itself. Kueue's plain-pod *groups* are of no use here: their size is fixed, and their finalizer keeps a dead pod, and
so its name, until a substitute exists. Where Kueue manages plain pods, and a namespace has a LocalQueue ``default``, it
would take each pod of the core for a Workload too: they say that their parent is the one that waits, and the operator
removes the gates that Kueue adds to such pods.

A Workload has the priority of the class that its pods have, or of the WorkloadPriorityClass that the job's label
``kueue.x-k8s.io/priority-class`` names, as Kueue's own integrations do.

Invariant: the core's group counts exactly the pods that always exist, whatever is scaled; losing or adding a rollout
above the minimum changes nothing in it, nor does anything that was observed but the value of a priority class.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import reduce
from typing import Final

from asyncflow.api.base import QUANTITY, Quantity
from asyncflow.api.job import RLJob
from asyncflow.api.names import GROUP, RoleName
from asyncflow.api.placement import SchedulingSpec
from asyncflow.plan import plan
from asyncflow.plan.roles import Role
from asyncflow_operator.desired.blueprint import Blueprint, GangMembership, templates_of
from asyncflow_operator.desired.objects import KUEUE, Family, make_object, merge, stamped
from asyncflow_operator.observed import Assigned, JobState, Manifest, ObjectView, Owner, Ref, ReferredObject

VOLCANO_GROUP: Final = "scheduling.k8s.io/group-name"
VOLCANO_QUEUE: Final = "scheduling.volcano.sh/queue-name"
KUEUE_QUEUE: Final = f"{KUEUE}queue-name"
KUEUE_PRIORITY: Final = f"{KUEUE}priority-class"
KUEUE_PARENT: Final = f"{KUEUE}pod-suspending-parent"
_OBJECT_NAME: Final = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
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


def granted(state: JobState, role: RoleName) -> GangMembership:
    """Return the settings that Kueue assigns to the pods of a role with its place.

    They are the labels and taints of the nodes of its flavors, and what admission checks add; none before the Workload
    is admitted.
    """
    views = (view for ref, view in state.objects.items() if ref.kind == "Workload" and view.phase == "Admitted")
    assigned = next((view.assigned[role] for view in views if role in view.assigned), Assigned())
    read = (state.found.get(Ref("ResourceFlavor", name), ReferredObject()) for name in assigned.flavors)
    flavors: Iterable[Manifest] = (each.content.get("spec", {}) for each in read)
    parts = [
        *({"nodeSelector": each.get("nodeLabels"), "tolerations": each.get("tolerations")} for each in flavors),
        *assigned.more,
    ]
    chosen: Manifest = reduce(merge, ({key: part[key] for key in part if part[key]} for part in parts), {})
    return GangMembership(
        labels=chosen.get("labels", {}),
        annotations=chosen.get("annotations", {}),
        place={key: chosen[key] for key in ("nodeSelector", "tolerations") if key in chosen},
    )


def refers_to(job: RLJob, owner: Owner, objects: Mapping[Ref, ObjectView]) -> tuple[Ref, ...]:
    """Return the cluster's objects that have to be read for a job: the class of its priority, and its flavors."""
    if job.spec.scheduling.gang != "kueue":
        return ()
    priority = priority_class(job, owner)
    views = (view for ref, view in objects.items() if ref.kind == "Workload")
    flavors = {name for view in views for assigned in view.assigned.values() for name in assigned.flavors}
    return (*((priority,) if priority else ()), *(Ref("ResourceFlavor", name) for name in sorted(flavors)))


def priority_class(job: RLJob, owner: Owner) -> Ref | None:
    """Return the priority class of a job: that of its label, else of the first role whose pods have one."""
    if named := owner.labels.get(KUEUE_PRIORITY):
        return Ref("WorkloadPriorityClass", named)
    for role in plan(job).roles:
        said = [each.pod_spec.get("priorityClassName") for each in templates_of(job, role.name)]
        named = next((str(name) for name in reversed(said) if name), "")
        if role.core and re.fullmatch(_OBJECT_NAME, named):
            return Ref("PriorityClass", named)
    return None


def membership(blueprint: Blueprint, index: int) -> GangMembership:
    """Return the fields by which process ``index`` is in the core's group, or out of it: the lowest indices are in."""
    scheduling, in_core = blueprint.scheduling, index < blueprint.role.core
    if scheduling.gang == "volcano":
        queue = {VOLCANO_QUEUE: scheduling.queue} if scheduling.queue is not None else {}
        group = {VOLCANO_GROUP: blueprint.family.name} if in_core else {}
        return GangMembership(annotations={**queue, **group}, spec={"schedulerName": "volcano"})
    if scheduling.gang == "kueue" and not in_core:
        return GangMembership(labels={KUEUE_QUEUE: scheduling.queue or _KUEUE_USUAL})
    if scheduling.gang == "kueue":
        parent = {KUEUE_PARENT: f"{blueprint.family.owner.kind.lower()}.{GROUP}"}
        return replace(blueprint.granted, annotations={**blueprint.granted.annotations, **parent})
    return GangMembership()


def make_gang(
    job: RLJob, family: Family, *, core: Sequence[tuple[Role, Manifest]], found: Mapping[Ref, ReferredObject]
) -> tuple[Manifest, ...]:
    """Return the object that places the core, if there is one; none as long as its priority is not known.

    core: each role of which some are in the core, with one of its pods; found: what was read of the cluster's objects.
    """
    scheduling = job.spec.scheduling
    if scheduling.gang == "volcano":
        return (_pod_group(scheduling, family, core),)
    if scheduling.gang == "kueue":
        named = priority_class(job, family.owner)
        priority = _priority(named, found) if named is not None else {}
        if priority is not None:
            return (_workload(scheduling, family, core, priority=priority),)
    return ()


def _priority(named: Ref, found: Mapping[Ref, ReferredObject]) -> Manifest | None:
    """Return the fields of a Workload that say its priority; None as long as the class could not be read."""
    value = found.get(named, ReferredObject()).content.get("value")
    if not isinstance(value, int):
        return None
    group = "scheduling.k8s.io" if named.kind == "PriorityClass" else KUEUE.rstrip("/")
    return {"priorityClassRef": {"group": group, "kind": named.kind, "name": named.name}, "priority": value}


def _pod_group(scheduling: SchedulingSpec, family: Family, core: Sequence[tuple[Role, Manifest]]) -> Manifest:
    spec: Manifest = {"minMember": sum(role.core for role, _ in core), "minResources": _requests(core)}
    if scheduling.queue is not None:
        spec["queue"] = scheduling.queue
    return stamped(
        make_object("scheduling.volcano.sh/v1beta1", "PodGroup", family, name=family.name, body={"spec": spec})
    )


def _workload(
    scheduling: SchedulingSpec,
    family: Family,
    core: Sequence[tuple[Role, Manifest]],
    *,
    priority: Manifest,
) -> Manifest:
    spec: Manifest = {
        **priority,
        "queueName": scheduling.queue or _KUEUE_USUAL,
        "podSets": [
            {"name": role.name, "count": role.core, "template": {"spec": _shape(pod["spec"])}} for role, pod in core
        ],
    }
    return stamped(make_object("kueue.x-k8s.io/v1beta2", "Workload", family, name=family.name, body={"spec": spec}))


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
                if re.fullmatch(QUANTITY, str(amount)):
                    total[name] += int(Quantity(str(amount)).amount * 1000) * role.core
    return {name: _written(Decimal(thousandths) / 1000) for name, thousandths in sorted(total.items())}


def _written(amount: Decimal) -> str:
    return str(int(amount)) if amount == int(amount) else f"{int(amount * 1000)}m"
