"""Conversion of an object, as the API server sends it, to the view that ``decide`` reads.

Invariant: pure, and total over whatever a server may send: what is missing becomes the view's default, and no part of
the object is kept alive by its view.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from asyncflow.api.names import CONTAINER, DIGEST, FIELD_MANAGER, LABEL_ATTEMPT, LABEL_INDEX, LABEL_ROLE
from asyncflow_operator.observed import Assigned, ObjectView, PodView, Ref

Json = Mapping[str, Any]

_NOBODYS_FAILURE: Final = frozenset(
    (
        *("Preempting", "Preempted", "NodeLost", "NodeShutdown", "Shutdown", "Terminated"),
        *("NodeAffinity", "NodePorts", "TaintToleration", "TopologyAffinityError", "UnexpectedAdmissionError"),
        "VolumeAttachmentLimitExceeded",
    )
)
"""Reasons of a whole pod for which the cluster, and not the process in it, ended it or would not begin it."""
_EVICTED: Final = "Evicted"
"""Reason of a pod that its kubelet ended, or did not let begin. Of one that had begun it is the pod's own doing, which
used more disk than its limit, unless the condition DisruptionTarget says that the node ran short.
"""
_OUT_OF: Final = "OutOf"
"""Beginning of the reason of a pod that its node has too little for: the name of the resource follows."""
_UNSEEN: Final = "ContainerStatusUnknown"
"""Reason of a container that ran and that its kubelet does not find any more, as after a reboot: nobody saw it end, and
the exit code 137 is the kubelet's invention. One that was seen, such as OOMKilled, has a reason of its own.
"""
_LAST_WORDS: Final = 4096
"""Bytes that a kubelet keeps of a termination message."""
_MOST_DIGITS: Final = 10
"""A number of so many digits in a label was not written by an operator."""
_KEPT: Final = frozenset(
    ("ConfigMap", "Service", "ServiceAccount", "NetworkPolicy", "PodDisruptionBudget", "TransferQueue", "WeightSync")
)
"""Kinds whose objects are put back when somebody changes them: of all others a part belongs to somebody else."""


def pod_view(raw: Json, before: PodView | None = None, *, now: float) -> PodView:
    """Return the view of a pod. before: its view until now, None where it was not seen; now: unix seconds."""
    meta, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    labels = meta.get("labels") or {}
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    containers: Sequence[Json] = status.get("containerStatuses") or ()
    main: Json = next((each for each in containers if each.get("name") == CONTAINER), {})
    state = main.get("state") or {}
    running, ended = state.get("running") or {}, state.get("terminated") or _unseen(main)
    phase = status.get("phase", "Pending")
    over = bool(ended) and phase == "Running"
    if over:
        phase = "Failed" if ended.get("exitCode") else "Succeeded"
    waiting, waiting_message = _waiting(status)
    scheduled = conditions.get("PodScheduled") or {}
    reason = str(status.get("reason", ""))
    begun = _by_now(running.get("startedAt") or ended.get("startedAt"), before.started if before else None, now)
    said: Json = {} if reason == _EVICTED else ended
    return PodView(
        name=meta["name"],
        uid=meta.get("uid", ""),
        role=sys.intern(str(labels.get(LABEL_ROLE, ""))),
        index=_number(labels.get(LABEL_INDEX)),
        attempt=_number(labels.get(LABEL_ATTEMPT)),
        digest=digest_of(raw),
        phase=phase,
        ready=_holds(conditions, "Ready"),
        deleting="deletionTimestamp" in meta,
        ends_by=_ends_by(meta, before, now),
        forced=meta.get("deletionGracePeriodSeconds") == 0,
        unreachable=_unreachable(spec, conditions) and phase == "Running",
        leftover=over and any("running" in (each.get("state") or {}) for each in containers),
        created=seconds(meta.get("creationTimestamp")) or 0.0,
        started=begun,
        finished=_by_now(ended.get("finishedAt"), before.finished if before else None, now),
        node=sys.intern(str(spec.get("nodeName", ""))),
        ip=status.get("podIP", ""),
        scheduled=bool(spec.get("nodeName")),
        claims=_claims(spec),
        gates=tuple(str(gate.get("name")) for gate in spec.get("schedulingGates") or ()),
        finalizers=tuple(meta.get("finalizers") or ()),
        gated=scheduled.get("reason") == "SchedulingGated",
        unschedulable=str(scheduled.get("message", "")) if scheduled.get("reason") == "Unschedulable" else "",
        waiting=waiting,
        waiting_message=waiting_message,
        exit_code=said.get("exitCode"),
        exit_reason=str(said.get("reason") or reason),
        last_words=str(said.get("message") or status.get("message") or "")[-_LAST_WORDS:],
        disrupted=_holds(conditions, "DisruptionTarget")
        or reason in _NOBODYS_FAILURE
        or (reason == _EVICTED and begun is None)
        or reason.startswith(_OUT_OF)
        or ended.get("reason") == _UNSEEN,
    )


def object_view(raw: Json, *, kind: str) -> ObjectView:
    """Return the view of any other object, whole or its metadata only."""
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
    said = conditions.get("QuotaReserved" if phase in ("Pending", "Reserved") else phase) or {}
    return replace(
        view,
        phase=phase,
        said=str(said.get("message", "")),
        conditions=tuple(conditions.values()),
        version=str(raw["metadata"].get("resourceVersion", "")),
        assigned=_assigned(status),
    )


def _stage_of(conditions: Mapping[str, Json], *, admission: bool) -> str:
    """Return the stage of a Workload of Kueue; one that was evicted has yet to return its quota."""
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
    """Return the digest that an object carries, "" where it carries none."""
    return str((raw["metadata"].get("annotations") or {}).get(DIGEST, ""))


def held_of(raw: Json, *, kind: str) -> str:
    """Return the fields of an object that are this operator's, as JSON; "" for a kind that is not put back, and for an
    object without a record of that. Objects of a kind share the text.
    """
    record = raw["metadata"].get("managedFields")
    if kind not in _KEPT or not record:
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
    """Return kind, name and UID of the object that owns this one as its controller; empty where none does."""
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
    """Return whether the node controller has marked a pod because its node does not answer: it takes ``Ready`` away and
    leaves ``ContainersReady``, where a kubelet says the same of both (readiness gates aside).
    """
    return not _holds(conditions, "Ready") and _holds(conditions, "ContainersReady") and not spec.get("readinessGates")


def _by_now(time: str | None, before: float | None, now: float) -> float | None:
    """Return the time at which a kubelet says that something happened, or at which it was seen here, if that was
    earlier: where the clock of a node is ahead, waits would last until this one has the same time.
    """
    at = seconds(time)
    return None if at is None else min(at, now if before is None else before)


def _ends_by(meta: Json, before: PodView | None, now: float) -> float | None:
    """Return when the grace period of a deletion ends, counted from when the deletion was seen here: clocks of two
    machines are not compared, or one that is ahead would cut short the time in which a process saves its work.
    """
    if "deletionTimestamp" not in meta:
        return None
    by = now + float(meta.get("deletionGracePeriodSeconds") or 0)
    return by if before is None or before.ends_by is None else min(by, before.ends_by)


def _unseen(container: Json) -> Json:
    """Return the end of a container that is gone from its node: a kubelet says it of the one before, and that this one
    waits, though none follows.
    """
    ended = (container.get("lastState") or {}).get("terminated") or {}
    return ended if ended.get("reason") == _UNSEEN else {}


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


def _number(label: object) -> int:
    return int(label) if isinstance(label, str) and label.isdecimal() and len(label) < _MOST_DIGITS else 0
