"""The TransferQueue and the WeightSync that a job makes for itself.

Invariant: a job that names an existing WeightSync makes none; what it makes says what the job says, nothing of its own.
"""

from __future__ import annotations

from asyncflow.api.base import API_VERSION, Spec
from asyncflow.api.job import RLJob
from asyncflow.api.weights import WeightsSpec
from asyncflow_operator.desired.objects import Family, make_object, stamped
from asyncflow_operator.observed import Manifest


def make_children(job: RLJob, family: Family) -> tuple[Manifest, ...]:
    """Return the job's own queue and versions."""
    spec = job.spec
    queue = _said(spec.transfer_queue) | {"ledger": _said(spec.storage.ledger), "template": _said(spec.template)}
    queue["storageUnits"] = spec.transfer_queue.storage_units
    made = [make_object(API_VERSION, "TransferQueue", family, name=family.name, body={"spec": queue})]
    if spec.weight_sync.name is None:
        weights = _said(WeightsSpec(transport=spec.weight_sync.transport))
        made.append(make_object(API_VERSION, "WeightSync", family, name=family.name, body={"spec": weights}))
    return tuple(map(stamped, made))


def _said(spec: Spec) -> Manifest:
    """Leave out what has its default value: older definitions in the cluster may lack a field."""
    return spec.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude_none=True)
