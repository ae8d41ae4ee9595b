"""Gang scheduling of a job's core: its trainer, queue, driver and minimum number of rollouts.

Volcano: the core is one PodGroup. A rollout above the minimum is in no group of the operator, so Volcano creates a
group for it, in the same queue.

Kueue: the core is one Workload, which the operator creates. When it is admitted, the operator creates the pods, on
nodes of the assigned flavors. A rollout above the minimum is a plain pod with the queue's label and has its own
Workload. Kueue's plain-pod groups are not used, because their size is fixed and their finalizer keeps a dead pod, and
therefore its name, until a substitute exists. If Kueue manages plain pods and a namespace has a LocalQueue ``default``,
Kueue would also create a Workload for each pod of the core. An annotation therefore names the parent as the object that
waits, and the operator removes the gates that Kueue adds to such pods.

A Workload has the priority of the WorkloadPriorityClass in the job's label ``kueue.x-k8s.io/priority-class``, or of the
PriorityClass of its pods, as in Kueue's own integrations.

Invariant: the core's group contains exactly the pods that always exist, independently of scaling. It does not change
with rollouts above the minimum, and of all observations it depends only on the value of a priority class.
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
_DEFAULT_QUEUE: Final = "default"
"""Name of the LocalQueue that Kueue uses by default."""
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
"""Fields of a PodSpec on which its place and its quota depend."""


def granted(state: JobState, role: RoleName) -> GangMembership:
    """Return the settings from assigned flavors and admission checks for a role; none before Kueue admits the job."""
    views = (view for ref, view in state.objects.items() if ref.kind == "Workload" and view.phase == "Admitted")
    assigned = next((view.assigned[role] for view in views if role in view.assigned), Assigned())
    found = (state.found.get(Ref("ResourceFlavor", name), ReferredObject()) for name in assigned.flavors)
    flavors: Iterable[Manifest] = (each.content.get("spec", {}) for each in found)
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
    """Return the cluster-scoped objects to read for a job: its priority class and its flavors."""
    if job.spec.scheduling.gang != "kueue":
        return ()
    priority = priority_class(job, owner)
    views = (view for ref, view in objects.items() if ref.kind == "Workload")
    flavors = {name for view in views for assigned in view.assigned.values() for name in assigned.flavors}
    return (*((priority,) if priority else ()), *(Ref("ResourceFlavor", name) for name in sorted(flavors)))


def priority_class(job: RLJob, owner: Owner) -> Ref | None:
    """Return the priority class of a job: from its label, or from the first core role whose pods name one."""
    if named := owner.labels.get(KUEUE_PRIORITY):
        return Ref("WorkloadPriorityClass", named)
    for role in plan(job).roles:
        names = [each.pod_spec.get("priorityClassName") for each in templates_of(job, role.name)]
        named = next((str(name) for name in reversed(names) if name), "")
        if role.core and re.fullmatch(_OBJECT_NAME, named):
            return Ref("PriorityClass", named)
    return None


def membership(blueprint: Blueprint, index: int) -> GangMembership:
    """Return the fields that put process ``index`` into the core's group or keep it out; the lowest indices are in."""
    scheduling, in_core = blueprint.scheduling, index < blueprint.role.core
    if scheduling.gang == "volcano":
        queue = {VOLCANO_QUEUE: scheduling.queue} if scheduling.queue is not None else {}
        group = {VOLCANO_GROUP: blueprint.family.name} if in_core else {}
        return GangMembership(annotations={**queue, **group}, spec={"schedulerName": "volcano"})
    if scheduling.gang == "kueue" and not in_core:
        return GangMembership(labels={KUEUE_QUEUE: scheduling.queue or _DEFAULT_QUEUE})
    if scheduling.gang == "kueue":
        parent = {KUEUE_PARENT: f"{blueprint.family.owner.kind.lower()}.{GROUP}"}
        return replace(blueprint.granted, annotations={**blueprint.granted.annotations, **parent})
    return GangMembership()


def make_gang(
    job: RLJob, family: Family, *, core: Sequence[tuple[Role, Manifest]], found: Mapping[Ref, ReferredObject]
) -> tuple[Manifest, ...]:
    """Return the gang scheduler's object for the core, none without a gang or before its priority is known.

    core: each role with processes in the core, and one of its pods; found: the cluster-scoped objects that were read.
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
    """Return the priority fields of a Workload, None if the priority class has not been read."""
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
        "queueName": scheduling.queue or _DEFAULT_QUEUE,
        "podSets": [
            {"name": role.name, "count": role.core, "template": {"spec": _pod_set_spec(pod["spec"])}}
            for role, pod in core
        ],
    }
    return stamped(make_object("kueue.x-k8s.io/v1beta2", "Workload", family, name=family.name, body={"spec": spec}))


def _pod_set_spec(spec: Manifest) -> Manifest:
    pod_set: Manifest = {"restartPolicy": "Never"} | {name: spec[name] for name in _SCHEDULED_BY if name in spec}
    return pod_set | {kind: [_pod_set_container(each) for each in spec[kind]] for kind in _CONTAINERS if kind in spec}


def _pod_set_container(container: Manifest) -> Manifest:
    return {name: container[name] for name in ("name", "image", "resources", "restartPolicy") if name in container}


def _running(spec: Manifest) -> list[Manifest]:
    """Return the containers that run during the whole life of the pod."""
    sidecars = [each for each in spec.get("initContainers", ()) if each.get("restartPolicy") == "Always"]
    return [*sidecars, *spec["containers"]]


def _requests(core: Sequence[tuple[Role, Manifest]]) -> dict[str, str]:
    """Return the sum of the requests of the core's containers, without invalid quantities, which the server refuses."""
    total: Counter[str] = Counter()
    for role, pod in core:
        for container in _running(pod["spec"]):
            for name, amount in container.get("resources", {}).get("requests", {}).items():
                if re.fullmatch(QUANTITY, str(amount)):
                    total[name] += int(Quantity(str(amount)).amount * 1000) * role.core
    return {name: _quantity(Decimal(thousandths) / 1000) for name, thousandths in sorted(total.items())}


def _quantity(amount: Decimal) -> str:
    return str(int(amount)) if amount == int(amount) else f"{int(amount * 1000)}m"
