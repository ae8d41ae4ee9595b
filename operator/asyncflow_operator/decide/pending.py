"""The condition WhyPending: the obstacle that keeps wanted pods from running, in one sentence, with the arithmetic.

Invariant: the sentence states what was observed; it names one object, what it needs or lacks, and what to do where
that is known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from asyncflow.plan.describe import duration
from asyncflow.plan.roles import Resources, Role
from asyncflow_operator.decide.admission import admitted, waits_for
from asyncflow_operator.decide.replicas import OVERDUE_S
from asyncflow_operator.decide.times import Alarm
from asyncflow_operator.observed import (
    Denial,
    JobState,
    NodeFree,
    ObjectView,
    PodView,
    Ref,
    SyncState,
    TransferQueueState,
)

ATTACH_S: Final = 60.0
"""Seconds after which a pod that has a node and mounts a claim is said to wait for its volume."""
_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_WORDS: Final = 400
_IMAGE: Final = frozenset(("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"))
_CREATING: Final = frozenset(("ContainerCreating", "PodInitializing"))
_CONFIG: Final = frozenset(("CreateContainerConfigError", "CreateContainerError", "RunContainerError"))

_REMEDIES: Final = {
    "must specify": "State it in podSpec, or make a LimitRange with defaults",
    "quota": "Raise the quota or ask for less",
    "already exists": "It belongs to another owner: delete it, or give this job another name",
    "could not find the requested resource": "Install what defines that kind, or do without it in spec.scheduling",
}
TOLD: Final = frozenset(("Denied", "ApiFailed"))
"""Reasons that are an event, too."""
_USUAL_REMEDY: Final = "The object, or who may make it, must change"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Obstacle to a pod: one word for machines and a sentence for people."""

    reason: str
    message: str


def why_pending(roles: Sequence[Role], state: JobState) -> Obstacle | None:
    """Return the first obstacle on the way of ``roles`` of a legal job, None where there is none.

    A change that was refused to an object that is there is the last of them.
    """
    if state.namespace_ending:
        return Obstacle("NamespaceTerminating", "The namespace is being deleted, so nothing can be made in it")
    is_refused = any(denial.missing for denial in state.denied)
    if not is_refused and not admitted(state) and (words := waits_for(state)):
        return Obstacle("Gang", _short(words))
    return why_waiting(roles, state, gang=state.job.spec.scheduling.gang if state.job is not None else "none")


def why_waiting(
    roles: Sequence[Role], state: JobState | TransferQueueState | SyncState, *, gang: str = "none"
) -> Obstacle | None:
    """Return what the API server refused to make, else why the first pod of ``roles`` that cannot run does not, else
    what change it refused; None where there is none of these.
    """
    if missing := [denial for denial in state.denied if denial.missing]:
        return why_denied(missing)
    waiting = [pod for role in roles for pod in _of(role, state.pods) if _stands_still(pod)]
    if not waiting:
        return why_denied(state.denied) if state.denied else None
    claims = [
        each for ref, each in state.objects.items() if ref.kind == "PersistentVolumeClaim" and each.phase == "Pending"
    ]
    pod, *others = waiting
    role = next(role for role in roles if role.name == pod.role)
    why = _of_pod(pod, role.resources, state.nodes, claims, gang)
    more = f" ({len(others)} more {'pod waits' if len(others) == 1 else 'pods wait'})" if others else ""
    return Obstacle(why.reason, why.message + more)


def why_denied(denied: Sequence[Denial]) -> Obstacle:
    """Return what the API server refused, in words: objects that are missing for it first, of those what somebody has
    to change, and pods first.
    """
    first, *others = sorted(
        denied, key=lambda denial: (not denial.missing, denial.failed, denial.ref.kind != "Pod", denial.ref)
    )
    more = f" ({len(others)} more {'is' if len(others) == 1 else 'are'} not written)" if others else ""
    goes_on = "" if first.missing else ". What runs goes on as it is"
    if first.failed:
        remedy = (
            "It is tried again by itself; if it stays, see the API server, its webhooks and the operator's credentials"
        )
        return Obstacle("ApiFailed", f"The API server failed at {_short(str(first))}{more}. {remedy}{goes_on}")
    return Obstacle("Denied", f"The API server refused {_short(str(first))}{more}. {_remedy(first.why)}{goes_on}")


def why_lacking(
    lacks: Sequence[str], pods: Collection[PodView], *, going: Collection[Ref] = (), ran: bool, alarm: Alarm
) -> Obstacle:
    """Return why roles lack ready processes though nothing stands in the way.

    lacks: as ``progress.lacking`` returns it; going: objects that pods need and that are on their way out; ran: whether
    the job ran already, so that it does not merely start.
    """
    if going:
        first = min(going)
        return Obstacle(
            "Terminating", f"{first.kind}/{first.name} is being deleted; what needs it waits until it is gone"
        )
    short = {words.partition(" ")[0] for words in lacks}
    affected = sorted((pod for pod in pods if pod.role in short and pod.node), key=lambda pod: pod.name)
    said = f"{', '.join(lacks)} ready"
    if lost := [pod for pod in affected if pod.unreachable]:
        pod = lost[0]
        then = f"{pod.name} is made again elsewhere: a rollout at once, others after limits.nodeLostSeconds"
        return Obstacle("NodeLost", f"{said}: {pod.node} does not answer. {then}")
    if deleting := [pod for pod in affected if pod.deleting]:
        pod = deleting[0]
        then = f"at the latest {duration(OVERDUE_S)} after its grace period"
        return Obstacle("Terminating", f"{said}: {pod.name} has yet to go from {pod.node} and then comes again, {then}")
    if attaching := [pod for pod in affected if _attaches(pod, alarm)]:
        pod = attaching[0]
        what = f"{pod.name} on {pod.node} waits for the volume of {', '.join(pod.claims)}"
        rule = "A ReadWriteOnce volume stays attached to a lost node for 6 minutes"
        remedy = "To have it now: kubectl taint node LOST-NODE node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
        return Obstacle("VolumeAttach", f"{said}: {what}. {rule}. {remedy}")
    if ran and (unready := [pod for pod in affected if pod.phase == "Running" and not pod.ready]):
        pod = unready[0]
        return Obstacle(
            "NotReady", f"{said}: {pod.name} on {pod.node} is not. See its log, and whether that node is Ready"
        )
    return Obstacle("Starting", f"{said}; {'it is being replaced' if ran else 'the rest starts after them'}")


def _attaches(pod: PodView, alarm: Alarm) -> bool:
    """Return whether a pod has had its node for ``ATTACH_S`` and nothing of it has begun, and it mounts a claim."""
    begins = pod.phase == "Pending" and pod.waiting in _CREATING and bool(pod.claims)
    return begins and not alarm.until(pod.created + ATTACH_S)


def _remedy(denied: str) -> str:
    """Return what to do about what the API server refused, by its words."""
    return next((remedy for words, remedy in _REMEDIES.items() if words in denied), _USUAL_REMEDY)


def _of(role: Role, pods: Iterable[PodView]) -> list[PodView]:
    return sorted((pod for pod in pods if pod.role == role.name), key=lambda pod: pod.index)


def _stands_still(pod: PodView) -> bool:
    held = pod.gated or pod.unschedulable or pod.waiting in _IMAGE or pod.waiting in _CONFIG
    return pod.phase == "Pending" and not pod.deleting and bool(held or pod.waiting_message)


def _of_pod(
    pod: PodView, needs: Resources, nodes: Sequence[NodeFree] | None, claims: Sequence[ObjectView], gang: str
) -> Obstacle:
    if pod.gated:
        return Obstacle("Gated", f"{pod.name} is held by a scheduling gate until {_scheduler_name(gang)} admits it")
    if pod.unschedulable:
        return _unschedulable(pod, needs, nodes, claims, gang)
    if pod.waiting in _IMAGE:
        return Obstacle(
            "ImagePull",
            f"{pod.name} cannot have its image: {pod.waiting}{_because(pod)}. Check its name and imagePullSecrets",
        )
    if pod.waiting in _CONFIG:
        return Obstacle(
            "ContainerConfig",
            f"{pod.name} cannot be started: {pod.waiting}{_because(pod)}. Make what it lacks, or do without",
        )
    return Obstacle("Waiting", f"{pod.name} waits: {pod.waiting or 'Pending'}{_because(pod)}")


def _unschedulable(
    pod: PodView, needs: Resources, nodes: Sequence[NodeFree] | None, claims: Sequence[ObjectView], gang: str
) -> Obstacle:
    if claims and "PersistentVolumeClaim" in pod.unschedulable:
        names = ", ".join(sorted(claim.ref.name for claim in claims))
        return Obstacle("ClaimPending", f"{pod.name} needs a volume, and no volume is bound to {names}")
    if short := _shortage(needs, nodes or ()):
        return Obstacle("Unschedulable", f"{pod.name} needs {short}")
    if "persistentvolumeclaim" in pod.unschedulable and "not found" in pod.unschedulable:
        return Obstacle(
            "ClaimMissing", f"{pod.name} needs a claim: {_short(pod.unschedulable)}. Make it, or name another"
        )
    if gang != "none" and "gang" in pod.unschedulable.lower():
        return Obstacle(
            "Gang", f"{pod.name} waits until {_scheduler_name(gang)} has room for all: {_short(pod.unschedulable)}"
        )
    return Obstacle("Unschedulable", f"{pod.name} finds no node: {_short(pod.unschedulable)}")


def _shortage(needs: Resources, nodes: Sequence[NodeFree]) -> str:
    """Return which resource no node has enough of, and how much the best one has; "" where some node has enough."""
    wanted = {needs.resource: float(needs.accelerators)} if needs.accelerators else {}
    wanted |= {"memory": float(needs.memory)} if needs.memory else {}
    wanted |= {"cpu": needs.cpu}
    for resource, amount in wanted.items():
        best = max(nodes, key=lambda node: (node.free.get(resource, 0.0), node.name), default=None)
        if best is not None and best.free.get(resource, 0.0) < amount:
            free = best.free.get(resource, 0.0)
            largest = f"the largest free is {_amount(resource, free)} on {best.name}" if free > 0 else "none is free"
            return f"{_amount(resource, amount)} {_called(resource)} on one node; {largest}"
    return ""


def _amount(resource: str, amount: float) -> str:
    if resource != "memory":
        return f"{amount:.3g}" if amount != int(amount) else f"{int(amount)}"
    return f"{amount / _GIB:.4g}Gi" if amount >= _GIB else f"{amount / _MIB:.4g}Mi"


def _called(resource: str) -> str:
    return {"cpu": "CPU"}.get(resource, resource)


def _scheduler_name(gang: str) -> str:
    return {"volcano": "Volcano", "kueue": "Kueue"}.get(gang, "the scheduler that set the gate")


def _because(pod: PodView) -> str:
    return f": {_short(pod.waiting_message)}" if pod.waiting_message else ""


def _short(words: str) -> str:
    return " ".join(words.split())[:_WORDS].rstrip(". ")
