"""Common metadata of all objects of a family (name, labels, owner, digest), and the merge of a user's pod template.

A family is the set of objects created for one job, for one TransferQueue without a job, or for one WeightSync that
publishes a model. All of them carry one label, which selectors and watches use.

A template is merged like a ``kubectl patch``: mappings are merged, null removes a field, lists of named items are
merged by name, tolerations are added, and every other list is replaced.

Invariants: every object has exactly one owner, a controller, so that garbage collection alone deletes all objects. The
user cannot override the operator's own labels. Merging an empty template changes nothing, and merging a template twice
has the same result as merging it once.
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
"""Prefix of Kueue's labels, annotations, gates and finalizers."""
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
"""Keys that identify the items of a list, by field of a PodSpec (Kubernetes' ``patchMergeKey`` if it has one)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Family of objects.

    name: name of the custom resource and prefix of the objects' names; selector: the label of exactly these objects;
    labels: further labels, set by the user; owner: the custom resource that owns the objects built with this Family.
    """

    name: str
    namespace: str
    owner: Owner
    selector: Mapping[str, str]
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, owner: Owner) -> Family:
        """Return the same family with another owner, for the pods of a job's family that the job's queue owns."""
        return replace(self, owner=owner)


_LABELS: Final = {"RLJob": LABEL_JOB, "TransferQueue": LABEL_QUEUE, "WeightSync": LABEL_SYNC}
"""Label of a family's objects, by the kind of the custom resource."""


def family_of(owner: Owner) -> Family:
    """Return the family of a job, of a queue without a job, or of a WeightSync that publishes a model."""
    return Family(
        name=owner.name,
        namespace=owner.namespace,
        owner=owner,
        selector={_LABELS[owner.kind]: owner.name},
        labels=_inherited(owner),
    )


def _inherited(owner: Owner) -> dict[str, str]:
    """Return the labels that the objects inherit from their owner.

    Kueue's labels are left out, because Kueue would create a Workload for each pod that names a queue. AsyncFlow's
    labels are left out, because an object with the label of another owner would be attributed to that owner.
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
    """Return an object of ``family`` without a digest; ``labels`` are added to those of the family."""
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
    """Return the owner reference, by which garbage collection deletes the object after its owner."""
    return {
        "apiVersion": API_VERSION,
        "kind": owner.kind,
        "name": owner.name,
        "uid": owner.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def digest(value: object) -> str:
    """Return a short hash of a JSON value, which does not depend on the order of keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_DIGITS]


def stamped(manifest: Manifest, *, made_from: object = None) -> Manifest:
    """Return ``manifest`` with a digest annotation: the digest of ``made_from``, or of the whole manifest."""
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), DIGEST: digest(manifest if made_from is None else made_from)}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def merge(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` merged with ``patch``; neither argument is changed."""
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
