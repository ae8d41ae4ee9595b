"""Parsing of the three custom kinds: views of the objects that the API server sends, validated by ``asyncflow.api``.

If a resource that has started is edited to a spec that is refused, its last accepted spec stays in force, together with
the parts of the newest spec that can still be followed: ``suspend: true`` and the scaled number. An operator that has
not seen the accepted spec reads it from the ConfigMap that the pods mount (``recover_accepted``).

Invariants: an object is parsed once per generation and set of labels, however often its status changes. A refused
object is kept with the reason and a fix, and never stops the operator. The API server validates against the newest
definitions, so a field that is unknown here belongs to a newer version, and is ignored.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from pydantic import ValidationError

from asyncflow.api.base import COLLECT, Spec
from asyncflow.api.check import Problem, inspect, readable_part
from asyncflow.api.job import RLJob
from asyncflow.api.names import JOB_FILE
from asyncflow.api.queue import QueueStatus, TransferQueue
from asyncflow.api.status import JobStatus
from asyncflow.api.weights import WeightsStatus, WeightSync
from asyncflow_operator.cluster.views import controller_of, digest_of, held_of, scalers, seconds
from asyncflow_operator.observed import Owner

Json = Mapping[str, Any]

INVALID: Final = "Invalid"
NOT_YET: Final = "NotYet"
_REPLICAS: Final = ("spec", "rollout", "replicas")
_SHOWN: Final = 1024

_MODELS: Final[dict[str, tuple[type[Spec], type[Spec]]]] = {
    "RLJob": (RLJob, JobStatus),
    "TransferQueue": (TransferQueue, QueueStatus),
    "WeightSync": (WeightSync, WeightsStatus),
}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomResource:
    """An RLJob, a TransferQueue or a WeightSync.

    model: the spec in force, None if no spec was ever accepted; problem: why the newest spec is refused, "" if it is
    not; written: the status as stored; controller: kind and name of its owner, "" if it has none.
    """

    owner: Owner
    model: Any
    problem: str
    problem_reason: str
    status: Any
    written: Json
    scaled_by: tuple[str, ...]
    controller: tuple[str, str]
    digest: str
    held: str


def custom_resource(kind: str, raw: Json, before: CustomResource | None) -> CustomResource:
    """Return the view of a custom resource. before: the view of its previous version."""
    meta = raw["metadata"]
    labels = dict(meta.get("labels") or {})
    generation = int(meta.get("generation", 0))
    if before is not None and before.owner.generation == generation and before.owner.labels == labels:
        model, problem, reason = before.model, before.problem, before.problem_reason
    else:
        model, problem, reason = _parsed(kind, raw, labels)
    written = raw.get("status") or {}
    unchanged = before is not None and before.written == written
    status = before.status if before is not None and unchanged else _status(kind, raw, written)
    if model is None and before is not None and before.model is not None and has_started(status):
        model = _with_allowed_changes(before.model, raw, status)
    return CustomResource(
        owner=Owner(
            kind=kind,  # type: ignore[arg-type]
            namespace=meta.get("namespace", ""),
            name=meta["name"],
            uid=meta["uid"],
            generation=generation,
            created=seconds(meta.get("creationTimestamp")) or 0.0,
            deleting="deletionTimestamp" in meta,
            labels=labels,
        ),
        model=model,
        problem=problem,
        problem_reason=reason,
        status=status,
        written=written,
        scaled_by=scalers(raw, _REPLICAS) if kind == "RLJob" else (),
        controller=controller_of(raw)[:2],
        digest=digest_of(raw),
        held=held_of(raw, kind=kind),
    )


def has_started(status: Any) -> bool:
    """Return whether pods were created for a custom resource, according to its status."""
    return isinstance(status, JobStatus | QueueStatus | WeightsStatus) and status.begun


def recover_accepted(view: CustomResource, raw: Json, config: Json) -> CustomResource:
    """Return ``view`` with the last accepted spec, from the ConfigMap of the pods; unchanged if that cannot be read or
    belongs to another object. An operator of an older version accepted it, so it stays in force against newer rules.
    """
    try:
        data = json.loads((config.get("data") or {})[JOB_FILE.rpartition("/")[2]])
        uid, kind = data["metadata"]["uid"], _MODELS[view.owner.kind][0]
    except (KeyError, TypeError, ValueError):
        return view
    model = inspect(kind, readable_part(kind, data))[0] if uid == view.owner.uid else None
    return view if model is None else replace(view, model=_with_allowed_changes(model, raw, view.status))


def _with_allowed_changes(accepted: Any, raw: Json, status: Any) -> Any:
    """Return ``accepted`` with the changes of a refused spec that are followed anyway; none of them resumes a job."""
    spec, newest = accepted.spec, raw.get("spec") or {}
    if isinstance(accepted, RLJob):
        replicas = (newest.get("rollout") or {}).get("replicas")
        within = type(replicas) is int and spec.rollout.min_replicas <= replicas <= spec.rollout.max_replicas
        rollout = spec.rollout.model_copy(update={"replicas": replicas}) if within else spec.rollout
        named = (newest.get("weightSync") or {}).get("name")
        weights = spec.weight_sync.model_copy(update={"name": named}) if named else spec.weight_sync
        suspend = spec.suspend or newest.get("suspend") is True or status.phase in ("Suspending", "Suspended")
        changed = {"rollout": rollout, "suspend": suspend, "weight_sync": weights}
    else:
        units = newest.get("storageUnits")
        changed = {"storage_units": units} if type(units) is int and units >= 1 else {}
    return accepted.model_copy(update={"spec": spec.model_copy(update=changed)})


def _parsed(kind: str, raw: Json, labels: dict[str, str]) -> tuple[Any, str, str]:
    meta = raw["metadata"]
    known = {"name": meta["name"], "namespace": meta.get("namespace", ""), "labels": labels, "uid": meta["uid"]}
    data = {"apiVersion": raw.get("apiVersion"), "kind": raw.get("kind"), "metadata": known, "spec": raw.get("spec")}
    present = {key: value for key, value in data.items() if value is not None}
    model, problems = inspect(_MODELS[kind][0], present)
    if model is None:
        model, problems = inspect(_MODELS[kind][0], readable_part(_MODELS[kind][0], present))
    reason = INVALID
    if not problems:
        problems, reason = list(_only_on_one_machine(model)), NOT_YET
    if not problems:
        return model, "", ""
    return None, "; ".join(str(problem) for problem in problems)[:_SHOWN], reason


def _only_on_one_machine(model: Any) -> Iterator[Problem]:
    """Yield a problem for each field that this version supports only on one machine, without a cluster."""
    if isinstance(model, RLJob) and model.spec.trainer.external:
        yield Problem(
            place=("spec", "trainer", "external"),
            value=True,
            reason="not supported yet: an external trainer can join jobs of one machine only",
            fix="Leave it out, or run the job with asyncflow.init_engines",
        )


def _status(kind: str, raw: Json, written: Json) -> Any:
    """Return the status without fields of newer versions; an empty status if it cannot be read at all."""
    model = _MODELS[kind][1]
    try:
        return model.model_validate(written, by_name=False, context=COLLECT)
    except ValidationError as error:
        meta = raw["metadata"]
        _log.warning(
            "could not read the whole status",
            extra={"object": f"{kind}/{meta.get('namespace', '')}/{meta['name']}", "why": str(error.errors()[:3])},
        )
    try:
        return model.model_validate(readable_part(model, written), by_name=False, context=COLLECT)
    except ValidationError:
        return model()
