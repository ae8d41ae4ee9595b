"""Conversion of objects, as the API server sends them, to the views that ``decide`` reads.

Invariants: the functions are pure and accept every object that a server may send; a missing field becomes the view's
default. A view keeps no part of the object in memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from asyncflow.api.base import MOST_REPLICAS
from asyncflow.api.names import CONTAINER, DIGEST, FIELD_MANAGER, LABEL_ATTEMPT, LABEL_INDEX, LABEL_ROLE
from asyncflow.api.versions import MOST_COUNTED
from asyncflow_operator.observed import Assigned, ObjectView, PodView, Ref

Json = Mapping[str, Any]

_CLUSTER_REASONS: Final = frozenset(
    (
        *("Preempting", "Preempted", "NodeLost", "NodeShutdown", "Shutdown", "Terminated"),
        *("NodeAffinity", "NodePorts", "TaintToleration", "TopologyAffinityError", "UnexpectedAdmissionError"),
        "VolumeAttachmentLimitExceeded",
    )
)
"""Reasons of a pod that the cluster ended or refused to start, independently of its process."""
_EVICTED: Final = "Evicted"
"""Reason of a pod that its kubelet ended or refused to start. A started pod was evicted because it used more disk than
its limit, unless the condition DisruptionTarget says that the node ran short.
"""
_OUT_OF: Final = "OutOf"
"""Prefix of the reason of a pod for which its node has too few resources; the name of the resource follows."""
_UNSEEN: Final = "ContainerStatusUnknown"
"""Reason of a container that ran and that its kubelet no longer finds, as after a reboot. Its end was not observed, and
the kubelet reports the exit code 137 by default. An observed end, such as OOMKilled, has another reason.
"""
_LAST_WORDS: Final = 4096
"""Bytes that a kubelet keeps of a termination message."""
_MOST_INDEX: Final = 2 * MOST_REPLICAS
"""Largest index of a pod that an operator creates, with room for rollouts that are still being drained."""
_RESTORED: Final = frozenset(
    ("ConfigMap", "Service", "ServiceAccount", "NetworkPolicy", "PodDisruptionBudget", "TransferQueue", "WeightSync")
)
"""Kinds whose objects are restored after a foreign change; in objects of all other kinds, a part has another owner."""


def pod_view(raw: Json, before: PodView | None = None, *, now: float) -> PodView:
    """Return the view of a pod. before: its previous view, None if it is new; now: unix seconds."""
    meta, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    labels = meta.get("labels") or {}
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    containers: Sequence[Json] = status.get("containerStatuses") or ()
    main: Json = next((each for each in containers if each.get("name") == CONTAINER), {})
    state = main.get("state") or {}
    running, ended = state.get("running") or {}, state.get("terminated") or _unseen(main)
    phase = status.get("phase", "Pending")
    main_ended = bool(ended) and phase == "Running"
    if main_ended:
        phase = "Failed" if ended.get("exitCode") else "Succeeded"
    waiting, waiting_message = _waiting(status)
    scheduled = conditions.get("PodScheduled") or {}
    disruption = conditions["DisruptionTarget"] if _holds(conditions, "DisruptionTarget") else {}
    reason = str(status.get("reason", ""))
    started = _not_after_now(
        running.get("startedAt") or ended.get("startedAt"), before.started if before else None, now
    )
    end: Json = {} if reason == _EVICTED else ended
    init_end, init_message = _failed_init(status) if not ended else ("", "")
    return PodView(
        name=meta["name"],
        uid=meta.get("uid", ""),
        role=sys.intern(str(labels.get(LABEL_ROLE, ""))),
        index=_number(labels.get(LABEL_INDEX), most=_MOST_INDEX),
        attempt=_number(labels.get(LABEL_ATTEMPT), most=MOST_COUNTED),
        digest=digest_of(raw),
        phase=phase,
        ready=_holds(conditions, "Ready"),
        deleting="deletionTimestamp" in meta,
        ends_by=_ends_by(meta, before, now),
        forced=meta.get("deletionGracePeriodSeconds") == 0,
        unreachable=_unreachable(spec, conditions) and phase == "Running",
        leftover=main_ended and any("running" in (each.get("state") or {}) for each in containers),
        created=seconds(meta.get("creationTimestamp")) or 0.0,
        started=started,
        finished=_not_after_now(ended.get("finishedAt"), before.finished if before else None, now),
        node=sys.intern(str(spec.get("nodeName", ""))),
        ip=status.get("podIP", ""),
        scheduled=bool(spec.get("nodeName")),
        scheduler=sys.intern(str(spec.get("schedulerName", ""))),
        claims=_claims(spec),
        gates=tuple(str(gate.get("name")) for gate in spec.get("schedulingGates") or ()),
        finalizers=tuple(meta.get("finalizers") or ()),
        gated=scheduled.get("reason") == "SchedulingGated",
        unschedulable=str(scheduled.get("message", "")) if scheduled.get("reason") == "Unschedulable" else "",
        waiting=waiting,
        waiting_message=waiting_message,
        exit_code=end.get("exitCode"),
        exit_reason=str(end.get("reason") or reason or init_end),
        last_words=str(end.get("message") or status.get("message") or init_message)[-_LAST_WORDS:],
        disrupted=bool(disruption)
        or reason in _CLUSTER_REASONS
        or (reason == _EVICTED and started is None)
        or reason.startswith(_OUT_OF)
        or ended.get("reason") == _UNSEEN,
        disruption=str(disruption.get("message", "")),
    )


def object_view(raw: Json, *, kind: str) -> ObjectView:
    """Return the view of an object of any other kind, from the whole object or its metadata."""
    meta, status = raw["metadata"], raw.get("status") or {}
    view = ObjectView(
        ref=Ref(sys.intern(kind), meta["name"]),
        uid=meta.get("uid", ""),
        digest=digest_of(raw),
        held=held_of(raw, kind=kind),
        phase=str(status.get("phase", "")),
        deleting="deletionTimestamp" in meta,
    )
    return _workload_view(view, raw) if kind == "Workload" else view


def _workload_view(view: ObjectView, raw: Json) -> ObjectView:
    status = raw.get("status") or {}
    conditions = {str(each["type"]): each for each in status.get("conditions") or ()}
    phase = _stage_of(conditions, admission=bool(status.get("admission")))
    condition = conditions.get("QuotaReserved" if phase in ("Pending", "Reserved") else phase) or {}
    return replace(
        view,
        phase=phase,
        said=str(condition.get("message", "")),
        conditions=tuple(conditions.values()),
        version=str(raw["metadata"].get("resourceVersion", "")),
        assigned=_assigned(status),
    )


def _stage_of(conditions: Mapping[str, Json], *, admission: bool) -> str:
    """Return the stage of a Kueue Workload; it is Evicted as long as it still holds quota."""
    if _holds(conditions, "Finished"):
        return "Finished"
    if _holds(conditions, "Evicted") and (admission or _holds(conditions, "QuotaReserved")):
        return "Evicted"
    if _holds(conditions, "Admitted"):
        return "Admitted"
    return "Reserved" if _holds(conditions, "QuotaReserved") else "Pending"


def _assigned(status: Json) -> dict[str, Assigned]:
    more: dict[str, list[dict[str, Any]]] = {}
    for check in status.get("admissionChecks") or ():
        for update in check.get("podSetUpdates") or ():
            more.setdefault(str(update.get("name", "")), []).append(dict(update))
    return {
        str(each["name"]): Assigned(
            flavors=tuple(sorted(set((each.get("flavors") or {}).values()))), more=tuple(more.get(each["name"], ()))
        )
        for each in (status.get("admission") or {}).get("podSetAssignments") or ()
    }


def digest_of(raw: Json) -> str:
    """Return the digest annotation of an object, "" if it has none."""
    return str((raw["metadata"].get("annotations") or {}).get(DIGEST, ""))


def held_of(raw: Json, *, kind: str) -> str:
    """Return the fields of an object that this operator manages, as JSON; "" for a kind that is not restored, and for
    an object without ``managedFields``. Objects with the same fields share one string.
    """
    record = raw["metadata"].get("managedFields")
    if kind not in _RESTORED or not record:
        return ""
    held: dict[str, Any] = {}
    for entry in record:
        if entry.get("manager") == FIELD_MANAGER and not entry.get("subresource"):
            _merge(held, entry.get("fieldsV1") or {})
    return sys.intern(json.dumps(held, sort_keys=True, separators=(",", ":")))


def _merge(into: dict[str, Any], fields: Json) -> None:
    for key, inner in fields.items():
        _merge(into.setdefault(key, {}), inner)


def controller_of(raw: Json) -> tuple[str, str, str]:
    """Return kind, name and UID of the object's controlling owner; empty strings if it has none."""
    for owner in raw["metadata"].get("ownerReferences") or ():
        if owner.get("controller"):
            return owner["kind"], owner["name"], owner["uid"]
    return "", "", ""


def scalers(raw: Json, path: Iterable[str]) -> tuple[str, ...]:
    """Return the field managers that set the field at ``path`` through the scale subresource, sorted."""
    keys = tuple(f"f:{step}" for step in path)
    found = set()
    for entry in raw["metadata"].get("managedFields") or ():
        fields = entry.get("fieldsV1")
        for key in keys:
            fields = (fields or {}).get(key)
        if fields is not None and entry.get("subresource") == "scale":
            found.add(str(entry.get("manager", "")))
    return tuple(sorted(found))


def seconds(time: str | None) -> float | None:
    """Return an RFC 3339 time as unix seconds."""
    return datetime.fromisoformat(time).timestamp() if time else None


def _holds(conditions: Mapping[str, Json], kind: str) -> bool:
    return (conditions.get(kind) or {}).get("status") == "True"


def _unreachable(spec: Json, conditions: Mapping[str, Json]) -> bool:
    """Return whether the node controller has marked a pod of a silent node: it sets only ``Ready`` to false, whereas a
    kubelet sets ``Ready`` and ``ContainersReady`` to the same value unless there are readiness gates.
    """
    return not _holds(conditions, "Ready") and _holds(conditions, "ContainersReady") and not spec.get("readinessGates")


def _not_after_now(time: str | None, before: float | None, now: float) -> float | None:
    """Return the time that a kubelet reports, or that of its first observation if earlier, as clocks may be fast."""
    at = seconds(time)
    return None if at is None else min(at, now if before is None else before)


def _ends_by(meta: Json, before: PodView | None, now: float) -> float | None:
    """Return the end of the grace period of a deletion, counted from its first observation: with the deletion time of
    another machine, a fast clock could shorten the time in which a process saves its work.
    """
    if "deletionTimestamp" not in meta:
        return None
    end = now + float(meta.get("deletionGracePeriodSeconds") or 0)
    return end if before is None or before.ends_by is None else min(end, before.ends_by)


def _unseen(container: Json) -> Json:
    """Return the end of a container that its node has lost, {} for any other: the kubelet reports it as the last state,
    and the container as waiting, although it is not started again.
    """
    ended = (container.get("lastState") or {}).get("terminated") or {}
    return ended if ended.get("reason") == _UNSEEN else {}


def _failed_init(status: Json) -> tuple[str, str]:
    """Return how an init container has failed, which keeps the main one from starting, and its message; "" for none."""
    for each in status.get("initContainerStatuses") or ():
        ended = (each.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode"):
            return f"init container {each.get('name')}: exit code {ended['exitCode']}", str(ended.get("message") or "")
    return "", ""


def _claims(spec: Json) -> tuple[str, ...]:
    volumes = (volume.get("persistentVolumeClaim") for volume in spec.get("volumes") or ())
    return tuple(sys.intern(str(claim["claimName"])) for claim in volumes if claim)


def _waiting(status: Json) -> tuple[str, str]:
    for group in ("initContainerStatuses", "containerStatuses"):
        for each in status.get(group) or ():
            waiting = (each.get("state") or {}).get("waiting")
            if waiting:
                return str(waiting.get("reason", "")), str(waiting.get("message", ""))
    return "", ""


def _number(label: object, *, most: int) -> int:
    """Return the number in a label; 0 for any other value, and for a larger number, which no operator has written."""
    number = int(label) if isinstance(label, str) and label.isdecimal() else 0
    return number if number <= most else 0
