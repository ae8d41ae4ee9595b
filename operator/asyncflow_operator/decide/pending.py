"""The condition WhyPending: the obstacle that keeps wanted pods from running, in one sentence with figures.

Invariant: the sentence states an observation. It names one object, what that object needs or lacks, and the remedy if
one is known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from asyncflow.api.durability import LimitsSpec
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
"""Seconds after which a pod that has a node and mounts a claim is reported as waiting for its volume."""
IGNORED_S: Final = 60.0
"""Seconds after which a pod about which its scheduler has reported nothing is reported as ignored."""
_LOST_S: Final = LimitsSpec().node_lost_seconds
_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_TEXT_CHARACTERS: Final = 400
_IMAGE: Final = frozenset(("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"))
_CREATING: Final = frozenset(("ContainerCreating", "PodInitializing"))
_CONFIG: Final = frozenset(("CreateContainerConfigError", "CreateContainerError", "RunContainerError"))

_MISSING: Final = "Create it, or change podSpec"
_REMEDIES: Final = {
    "must specify": "Set it in podSpec, or create a LimitRange with defaults",
    "quota": "Raise the quota or request less",
    "already exists": "It belongs to another owner: delete it, or choose another name",
    "in API group": "The operator lacks this right: upgrade its roles, which belong to its chart",
    "page not found": "Install the definition of that kind, or remove it from spec.scheduling",
    "cannot be handled as a Pod": "Correct podSpec",
    "looking up service account": _MISSING,
    "no PriorityClass": _MISSING,
    "RuntimeClass": _MISSING,
}
EVENT_REASONS: Final = frozenset(("Denied", "ApiFailed"))
"""Reasons that are also written as an event."""
_DEFAULT_REMEDY: Final = "Change the spec, or the policy that refuses it"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Obstacle to a pod: one word for programs, and a sentence for users."""

    reason: str
    message: str


def why_pending(roles: Sequence[Role], state: JobState) -> Obstacle | None:
    """Return the first obstacle to ``roles`` of a valid job, None if there is none."""
    if state.namespace_ending:
        return Obstacle("NamespaceTerminating", "The namespace is being deleted, so nothing can be created in it")
    is_refused = any(denial.missing for denial in state.denied)
    if not is_refused and not admitted(state) and (reason := waits_for(state)):
        return Obstacle("Gang", _short(reason))
    return why_waiting(roles, state, gang=state.job.spec.scheduling.gang if state.job is not None else "none")


def why_waiting(
    roles: Sequence[Role], state: JobState | TransferQueueState | SyncState, *, gang: str = "none"
) -> Obstacle | None:
    """Return the first obstacle, None for none: a refused creation, a blocked pod of ``roles``, or a refused change."""
    if missing := [denial for denial in state.denied if denial.missing]:
        return why_denied(missing)
    waiting = [pod for role in roles for pod in _of(role, state.pods) if _is_blocked(pod)]
    if not waiting:
        return why_denied(state.denied) if state.denied else None
    pod, *others = waiting
    mounted = {Ref("PersistentVolumeClaim", name) for name in pod.claims}
    claims = [each for ref, each in state.objects.items() if ref in mounted and each.phase == "Pending"]
    role = next(role for role in roles if role.name == pod.role)
    why = _of_pod(pod, role.resources, state.nodes, claims, gang)
    more = f" ({len(others)} more {'pod waits' if len(others) == 1 else 'pods wait'})" if others else ""
    return Obstacle(why.reason, why.message + more)


def why_denied(denied: Sequence[Denial]) -> Obstacle:
    """Return the refusals as one obstacle: missing objects first, of these what a user must fix, and pods first."""
    first, *others = sorted(
        denied, key=lambda denial: (not denial.missing, denial.failed, denial.ref.kind != "Pod", denial.ref)
    )
    what = ("the deletion of " if first.deletes else "") + _short(str(first))
    more = f" (and {len(others)} more)" if others else ""
    unaffected = "" if first.missing or first.deletes else ". Running pods are not affected"
    if first.failed:
        remedy = "It is retried; if it persists, check the API server, its webhooks and the operator's credentials"
        return Obstacle("ApiFailed", f"The API server failed at {what}{more}. {remedy}{unaffected}")
    return Obstacle("Denied", f"The API server refused {what}{more}. {_remedy(first.why)}{unaffected}")


def why_lacking(
    lacks: Sequence[str], pods: Collection[PodView], *, terminating: Collection[Ref] = (), ran: bool, alarm: Alarm
) -> Obstacle:
    """Return why roles lack ready processes although there is no other obstacle.

    lacks: as ``progress.lacking`` returns it; terminating: objects that pods need and that are being deleted; ran:
    whether the job has run before, so that it is not merely starting.
    """
    if terminating:
        first = min(terminating)
        return Obstacle(
            "Terminating", f"{first.kind}/{first.name} is being deleted; pods that need it wait until that is done"
        )
    short = {text.partition(" ")[0] for text in lacks}
    waiting = sorted((pod for pod in pods if pod.role in short), key=lambda pod: pod.name)
    affected = [pod for pod in waiting if pod.node]
    counts = f"{', '.join(lacks)} ready"
    if ignored := [pod for pod in waiting if _is_ignored(pod, alarm)]:
        pod = ignored[0]
        silence = f"the scheduler {pod.scheduler} has reported nothing about {pod.name} for {duration(IGNORED_S)}"
        return Obstacle("NoScheduler", f"{counts}: {silence}. Check that it runs, and its name")
    if lost := [pod for pod in affected if pod.unreachable]:
        pod = lost[0]
        when = f"a rollout immediately, others after limits.nodeLostSeconds, without a job after {duration(_LOST_S)}"
        reaction = f"{pod.name} is replaced on another node: {when}"
        return Obstacle("NodeLost", f"{counts}: {pod.node} does not answer. {reaction}")
    if deleting := [pod for pod in affected if pod.deleting]:
        pod = deleting[0]
        limit = f"at the latest {duration(OVERDUE_S)} after its grace period"
        return Obstacle("Terminating", f"{counts}: {pod.name} is being deleted on {pod.node}, then replaced, {limit}")
    if attaching := [pod for pod in affected if _attaches(pod, alarm)]:
        pod = attaching[0]
        what = f"{pod.name} on {pod.node} waits for the volume of {', '.join(pod.claims)}"
        rule = "A ReadWriteOnce volume stays attached to a lost node for 6 minutes"
        remedy = "To detach it: kubectl taint node LOST-NODE node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
        return Obstacle("VolumeAttach", f"{counts}: {what}. {rule}. {remedy}")
    if ran and (unready := [pod for pod in affected if pod.phase == "Running" and not pod.ready]):
        pod = unready[0]
        return Obstacle("NotReady", f"{counts}: {pod.name} on {pod.node} is not ready. Check its log and its node")
    return Obstacle("Starting", f"{counts}; {'it is being replaced' if ran else 'the rest starts after them'}")


def held(pods: Iterable[PodView]) -> str:
    """Return which of ``pods`` has ended and still exists because of a finalizer of another client, "" for none."""
    for pod in sorted(pods, key=lambda pod: pod.name):
        if pod.deleting and pod.forced and pod.finalizers:
            kept = f"{pod.name} is deleted, but the finalizer {', '.join(pod.finalizers)} keeps its name"
            return f"{kept}. The client that set it must remove it"
    return ""


def _is_ignored(pod: PodView, alarm: Alarm) -> bool:
    """Return whether a pod has neither a node nor a reason why, ``IGNORED_S`` seconds after its creation."""
    unseen = pod.phase == "Pending" and not (pod.node or pod.deleting or pod.unschedulable or pod.gated)
    return unseen and not alarm.until(pod.created + IGNORED_S)


def _attaches(pod: PodView, alarm: Alarm) -> bool:
    """Return whether a pod with a claim has not started its containers within ``ATTACH_S`` seconds of its creation."""
    is_creating = pod.phase == "Pending" and pod.waiting in _CREATING and bool(pod.claims)
    return is_creating and not alarm.until(pod.created + ATTACH_S)


def _remedy(denied: str) -> str:
    """Return the remedy for a refusal, by the API server's message."""
    return next((remedy for part, remedy in _REMEDIES.items() if part in denied), _DEFAULT_REMEDY)


def _of(role: Role, pods: Iterable[PodView]) -> list[PodView]:
    return sorted((pod for pod in pods if pod.role == role.name), key=lambda pod: pod.index)


def _is_blocked(pod: PodView) -> bool:
    if pod.deleting:
        return bool(held([pod]))
    stopped = pod.gated or pod.unschedulable or pod.waiting in _IMAGE or pod.waiting in _CONFIG
    return pod.phase == "Pending" and bool(stopped or pod.waiting_message)


def _of_pod(
    pod: PodView, needs: Resources, nodes: Sequence[NodeFree] | None, claims: Sequence[ObjectView], gang: str
) -> Obstacle:
    if pod.deleting:
        return Obstacle("Terminating", held([pod]))
    if pod.gated:
        gate = f"the scheduling gate {', '.join(pod.gates)}"
        return Obstacle("Gated", f"{pod.name} is held by {gate} until {_scheduler_name(gang)} admits it")
    if pod.unschedulable:
        return _unschedulable(pod, needs, nodes, claims, gang)
    if pod.waiting in _IMAGE:
        return Obstacle(
            "ImagePull",
            f"{pod.name} cannot pull its image: {pod.waiting}{_because(pod)}. Check its name and imagePullSecrets",
        )
    if pod.waiting in _CONFIG:
        return Obstacle(
            "ContainerConfig",
            f"{pod.name} cannot be started: {pod.waiting}{_because(pod)}. Create the missing object, or remove its use",
        )
    return Obstacle("Waiting", f"{pod.name} waits: {pod.waiting or 'Pending'}{_because(pod)}")


def _unschedulable(
    pod: PodView, needs: Resources, nodes: Sequence[NodeFree] | None, claims: Sequence[ObjectView], gang: str
) -> Obstacle:
    if claims and "PersistentVolumeClaim" in pod.unschedulable:
        names = ", ".join(sorted(claim.ref.name for claim in claims))
        why = f"no volume is bound to {names}. `kubectl describe pvc` says why"
        return Obstacle("ClaimPending", f"{pod.name} needs a volume, and {why}")
    if short := _shortage(needs, nodes or ()):
        return Obstacle("Unschedulable", f"{pod.name} needs {short}")
    if "persistentvolumeclaim" in pod.unschedulable and "not found" in pod.unschedulable:
        return Obstacle(
            "ClaimMissing", f"{pod.name} needs a claim: {_short(pod.unschedulable)}. Create it, or name another one"
        )
    if gang != "none" and "gang" in pod.unschedulable.lower():
        return Obstacle(
            "Gang", f"{pod.name} waits until {_scheduler_name(gang)} has room for all: {_short(pod.unschedulable)}"
        )
    return Obstacle("Unschedulable", f"{pod.name} finds no node: {_short(pod.unschedulable)}")


def _shortage(needs: Resources, nodes: Sequence[NodeFree]) -> str:
    """Return the first resource of which no node has enough, and the largest free amount; "" if nodes have enough."""
    wanted = {needs.resource: float(needs.accelerators)} if needs.accelerators else {}
    wanted |= {"memory": float(needs.memory)} if needs.memory else {}
    wanted |= {"cpu": needs.cpu}
    for resource, amount in wanted.items():
        best = max(nodes, key=lambda node: (node.free.get(resource, 0.0), node.name), default=None)
        if best is not None and best.free.get(resource, 0.0) < amount:
            free = best.free.get(resource, 0.0)
            largest = f"the largest free is {_amount(resource, free)} on {best.name}" if free > 0 else "none is free"
            return f"{_amount(resource, amount)} {_display_name(resource)} on one node; {largest}"
    return ""


def _amount(resource: str, amount: float) -> str:
    if resource != "memory":
        return f"{amount:.3g}" if amount != int(amount) else f"{int(amount)}"
    return f"{amount / _GIB:.4g}Gi" if amount >= _GIB else f"{amount / _MIB:.4g}Mi"


def _display_name(resource: str) -> str:
    return {"cpu": "CPU"}.get(resource, resource)


def _scheduler_name(gang: str) -> str:
    return {"volcano": "Volcano", "kueue": "Kueue"}.get(gang, "the client that set it")


def _because(pod: PodView) -> str:
    return f": {_short(pod.waiting_message)}" if pod.waiting_message else ""


def _short(text: str) -> str:
    return " ".join(text.split())[:_TEXT_CHARACTERS].rstrip(". ")
