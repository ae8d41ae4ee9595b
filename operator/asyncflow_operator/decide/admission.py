"""Admission of a job's core by the gang scheduler: whether it is admitted, evicted, or no longer needs its object.

Volcano itself holds back the pods of its PodGroup. Kueue admits a Workload of the operator; then the operator creates
the pods, on nodes of the assigned flavors. When a Workload is evicted, its pods end; then its quota is released, and it
waits for admission again, at its former position in the queue.

Invariants: with Kueue no pod is created without an admitted Workload whose flavors are known. A job that has ended or
was suspended by its user has no gang object. A Workload that holds quota is not changed, because Kueue would refuse it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from asyncflow.api.names import DIGEST
from asyncflow.plan import plan
from asyncflow_operator.actions import Delete, Release, Report
from asyncflow_operator.decide.times import to_rfc3339
from asyncflow_operator.desired.objects import KUEUE
from asyncflow_operator.observed import JobState, Manifest, ObjectView, Ref

_WORKLOAD: Final = "Workload"
_GANGS: Final = frozenset(("PodGroup", _WORKLOAD))
_HOLDS_QUOTA: Final = frozenset(("Reserved", "Admitted", "Evicted"))
_AT_ONCE: Final = frozenset(("Preempted", "NodeFailures"))
"""Reasons of an eviction after which a Workload may be admitted again immediately; otherwise Kueue decides when."""
_READY: Final = "PodsReady"

Objects = Mapping[Ref, ObjectView]


def admitted(state: JobState) -> bool:
    """Return whether the gang scheduler allows the creation of pods."""
    if state.job is None or state.job.spec.scheduling.gang != "kueue":
        return True
    return any(each.phase == "Admitted" for each in _workloads(state.objects)) and _flavors_known(state)


def evicted(state: JobState) -> bool:
    """Return whether Kueue has evicted the Workload of a job."""
    return any(each.phase == "Evicted" for each in _workloads(state.objects))


def waits_for(state: JobState) -> str:
    """Return why the pods of a gang are not created yet; "" if the reason will disappear in less than a second."""
    admission = any(each.phase == "Admitted" for each in _workloads(state.objects))
    if admission or any(each.problem for each in state.found.values()):
        return _unread(state)
    reason = next((each.said for each in _workloads(state.objects) if each.said), "it has not reported a reason yet")
    return f"Kueue has not admitted the job's Workload: {reason}"


def delete_gang(objects: Objects, *, why: str) -> tuple[Delete, ...]:
    """Return the deletion of the gang scheduler's objects. why: the reason in words."""
    gangs = (view for ref, view in objects.items() if ref.kind in _GANGS and not view.deleting)
    return tuple(Delete(ref=view.ref, uid=view.uid, why=why) for view in gangs)


def requeue(objects: Objects, *, now: float) -> tuple[Report, ...]:
    """Return the reports that release the quota of an evicted Workload without pods, so that it is queued again."""
    return tuple(
        Report(ref=view.ref, version=view.version, status={"admission": None, "conditions": _requeued(view, now)})
        for view in _workloads(objects)
        if view.phase == "Evicted"
    )


def pods_ready(objects: Objects, *, lacks: Collection[str], now: float) -> tuple[Report, ...]:
    """Return the reports to Kueue whether all pods of an admitted Workload are ready, if that has changed.

    Kueue may be configured to evict a Workload that is not ready in time. lacks: as ``progress.lacking`` returns it.
    """
    reports = []
    for view in _workloads(objects):
        before = next((each for each in view.conditions if each["type"] == _READY), {})
        recovers = before.get("reason") in ("WaitForRecovery", "Recovered")
        if not lacks:
            reason, message = "Recovered" if recovers else "Started", "All pods are ready"
        else:
            recovers = recovers or before.get("status") == "True"
            reason, message = "WaitForRecovery" if recovers else "WaitForStart", f"Only {', '.join(lacks)} ready"
        status = "False" if lacks else "True"
        if view.phase == "Admitted" and (before.get("status"), before.get("reason")) != (status, reason):
            conditions = _with(view.conditions, _READY, status, reason, message, now=now)
            reports.append(Report(ref=view.ref, version=view.version, status={"conditions": conditions}))
    return tuple(reports)


def release_pods(state: JobState) -> tuple[Release, ...]:
    """Return the removal of Kueue's gates and finalizers from the pods of the core, whose Workload is the job's."""
    if state.job is None or state.job.spec.scheduling.gang != "kueue":
        return ()
    cores: dict[str, int] = {role.name: role.core for role in plan(state.job).roles}
    pods = (pod for pod in state.pods if pod.index < cores.get(pod.role, 0))
    core = [(pod, _without(pod.gates), _without(pod.finalizers)) for pod in pods]
    return tuple(
        Release(ref=Ref("Pod", pod.name), uid=pod.uid, gates=gates, finalizers=finalizers)
        for pod, gates, finalizers in core
        if gates is not None or finalizers is not None
    )


def _without(names: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the names without Kueue's, None if none is Kueue's."""
    others = tuple(name for name in names if not name.startswith(KUEUE))
    return others if others != names else None


def changeable(manifest: Manifest, objects: Objects) -> bool:
    """Return whether an object may be written now, which is true of all except a Workload that holds quota."""
    return manifest["kind"] != _WORKLOAD or not any(view.phase in _HOLDS_QUOTA for view in _workloads(objects))


def outgrown(wanted: Iterable[Manifest], objects: Objects) -> bool:
    """Return whether a Workload that holds quota differs from the wanted one."""
    digests = {each["metadata"]["annotations"][DIGEST] for each in wanted if each["kind"] == _WORKLOAD}
    held = {view.digest for view in _workloads(objects) if view.phase in _HOLDS_QUOTA}
    return bool(digests and held) and digests != held


def _workloads(objects: Objects) -> list[ObjectView]:
    return [view for ref, view in objects.items() if ref.kind == _WORKLOAD and not view.deleting]


def _unread(state: JobState) -> str:
    """Return the first cluster-scoped object of the job that cannot be read, and the reason; "" if there is none."""
    return next(
        (
            f"{ref.kind} {ref.name} cannot be read: {found.problem}"
            for ref, found in state.found.items()
            if found.problem
        ),
        "",
    )


def _flavors_known(state: JobState) -> bool:
    assigned = (each for view in _workloads(state.objects) for each in view.assigned.values())
    flavors = {Ref("ResourceFlavor", name) for each in assigned for name in each.flavors}
    return all(ref in state.found and not state.found[ref].problem for ref in flavors)


def _requeued(view: ObjectView, now: float) -> tuple[Manifest, ...]:
    """Return the conditions of a Workload that is queued again, as Kueue's own integrations set them."""
    evicted: Manifest = next((each for each in view.conditions if each["type"] == "Evicted"), {})
    reason, message = str(evicted.get("reason") or "Evicted"), str(evicted.get("message") or "")
    requeued = "True" if reason in _AT_ONCE else "False"
    conditions = _with(view.conditions, "Requeued", requeued, reason, message, now=now)
    conditions = _with(conditions, "QuotaReserved", "False", "Pending", message, now=now)
    conditions = _with(conditions, "Admitted", "False", "NoReservation", "The workload has no reservation", now=now)
    return _with(conditions, _READY, "False", "WaitForStart", "No pod is left", now=now)


def _with(
    conditions: Iterable[Manifest], kind: str, status: str, reason: str, message: str, *, now: float
) -> tuple[Manifest, ...]:
    """Return ``conditions`` with one of them set; its time is that of the last change of its status."""
    before: Manifest = next((each for each in conditions if each["type"] == kind), {})
    since = before["lastTransitionTime"] if before.get("status") == status else to_rfc3339(now)
    condition = {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": since}
    return (*(each for each in conditions if each["type"] != kind), condition)
