"""The frame that all objects of a family share (name, labels, owner, digest), and the merge of a user's part of a pod.

A family is what is made for one job, for one TransferQueue that stands alone, or for one WeightSync that publishes a
model: its objects carry one label by which they find each other and are found.

A user's part is merged as ``kubectl patch`` would do it: mappings are merged, null takes a field away, lists of things
that have names are merged by name, tolerations are added, every other list is replaced whole.

Invariants: every object has exactly one owner, a controller, so that garbage collection alone takes everything away;
the operator's own labels stand, whatever the user says; merging nothing changes nothing, and what is merged in twice is
there once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

from asyncflow.api.names import API_VERSION, DIGEST, GROUP, LABEL_JOB, LABEL_QUEUE, LABEL_SYNC, MANAGED
from asyncflow_operator.observed import Manifest, Owner

DIGEST_DIGITS: Final = 16
KUEUE: Final = "kueue.x-k8s.io/"
"""Prefix of the labels, annotations, gates and finalizers that are Kueue's."""
_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "ports": ("containerPort", "protocol"),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "imagePullSecrets": ("name",),
    "resourceClaims": ("name",),
    "schedulingGates": ("name",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey",),
    "tolerations": ("key", "operator", "value", "effect", "tolerationSeconds"),
}
"""By field of a PodSpec: the keys of the items of its list (Kubernetes' ``patchMergeKey``, where it has one)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Family of objects.

    name: that of the job or queue, with which their names begin; selector: labels that all of them have and no
    others; labels: more labels, of the user; owner: the resource that the object at hand is made for.
    """

    name: str
    namespace: str
    owner: Owner
    selector: Mapping[str, str]
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, owner: Owner) -> Family:
        """Return the same family with another owner: a job's queue owns pods of the job's family."""
        return replace(self, owner=owner)


_LABELS: Final = {"RLJob": LABEL_JOB, "TransferQueue": LABEL_QUEUE, "WeightSync": LABEL_SYNC}
"""By kind of what has a family: the label that its objects have."""


def family_of(owner: Owner) -> Family:
    """Return the family of a job, of a queue that stands alone, or of a WeightSync that publishes a model."""
    return Family(
        name=owner.name,
        namespace=owner.namespace,
        owner=owner,
        selector={_LABELS[owner.kind]: owner.name},
        labels=_inherited(owner),
    )


def _inherited(owner: Owner) -> dict[str, str]:
    """Return the labels of an owner that its objects have too.

    Left out are Kueue's, which takes each pod that names a queue for a Workload of its own, and AsyncFlow's, by which
    objects are found: by the label of another owner they would be found as that one's.
    """
    return {key: value for key, value in owner.labels.items() if not key.startswith((KUEUE, f"{GROUP}/"))}


def make_object(
    api_version: str,
    kind: str,
    family: Family,
    *,
    name: str,
    labels: Mapping[str, str] = MappingProxyType({}),
    annotations: Mapping[str, str] = MappingProxyType({}),
    body: Mapping[str, Any],
) -> Manifest:
    """Return an object of ``family`` without a digest; ``labels`` come on top of the family's."""
    metadata: Manifest = {
        "name": name,
        "namespace": family.namespace,
        "labels": {**family.labels, **labels, **family.selector, **MANAGED},
        "ownerReferences": [make_owner_reference(family.owner)],
    }
    if annotations:
        metadata["annotations"] = dict(annotations)
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **body}


def make_owner_reference(owner: Owner) -> Manifest:
    """Return the reference by which garbage collection finds an object when its owner is gone."""
    return {
        "apiVersion": API_VERSION,
        "kind": owner.kind,
        "name": owner.name,
        "uid": owner.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def digest(value: object) -> str:
    """Return a short hash of JSON values, the same for equal values in whatever order their keys are."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_DIGITS]


def stamped(manifest: Manifest, *, made_from: object = None) -> Manifest:
    """Return ``manifest`` with its digest as an annotation: that of ``made_from``, or of all that it says."""
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), DIGEST: digest(manifest if made_from is None else made_from)}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def merge(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``patch`` laid over it; neither is changed."""
    merged = dict(base)
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
            continue
        before = merged.get(name)
        if isinstance(value, Mapping):
            merged[name] = merge(before if isinstance(before, Mapping) else {}, value)
        elif isinstance(value, list) and name in _KEYS:
            merged[name] = _merge_items(before if isinstance(before, list) else [], value, _KEYS[name])
        else:
            merged[name] = value
    return merged


def _merge_items(base: list[Any], patch: list[Any], keys: tuple[str, ...]) -> list[Any]:
    items = {_identity(item, keys): item for item in base}
    for item in patch:
        identity = _identity(item, keys)
        known = items.get(identity)
        items[identity] = _merge_item(known if isinstance(known, Mapping) else {}, item)
    return list(items.values())


def _merge_item(base: Mapping[str, Any], item: Any) -> Any:
    return merge(base, item) if isinstance(item, Mapping) else item


def _identity(item: Any, keys: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(str(item.get(key)) for key in keys) if isinstance(item, Mapping) else (str(item),)
