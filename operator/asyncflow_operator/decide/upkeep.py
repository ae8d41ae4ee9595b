"""Upkeep of objects other than pods: which ones to write, and which ones a pod needs before it is created.

The API server records for each field the manager that set it last (``metadata.managedFields``). If another client
changes or removes a field of the operator, the operator no longer manages it. The record alone therefore shows such a
change, without reading the object.

Invariants: an object is written if its observed digest differs from the wanted one, or if another client has changed a
field that the operator wrote. Fields that other clients add or the API server fills in are not changed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, ItemsView, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Protocol

from asyncflow.api.job import RLJob
from asyncflow.api.names import DIGEST, RoleName
from asyncflow_operator.actions import Apply, Note
from asyncflow_operator.decide.secrets import DesiredSecrets
from asyncflow_operator.observed import Denial, JobState, Manifest, ObjectView, Ref, TransferQueueState

_IDENTITY: Final = frozenset(("apiVersion", "kind", "metadata"))

Fields = Mapping[str, Any]
_PROJECTED: Final = {"configMap": "ConfigMap", "secret": "Secret"}


def intact(held: str, manifest: Manifest) -> bool:
    """Return whether the managed fields ``held`` ("" for all) include all of ``manifest`` with its labels."""
    if not held:
        return True
    wanted = {key: value for key, value in manifest.items() if key not in _IDENTITY}
    wanted["metadata"] = {"labels": manifest["metadata"].get("labels", {})}
    fields = _read(held)
    return bool(fields) and _has(fields, wanted)


def _has(fields: Fields, value: Any) -> bool:
    """Return whether ``fields`` contains all of ``value``; a field without inner fields is managed as a whole."""
    if not fields or not isinstance(value, (dict, list)):
        return True
    if isinstance(value, dict):
        return all(f"f:{key}" in fields and _has(fields[f"f:{key}"], each) for key, each in value.items())
    items = {key: inner for key, inner in fields.items() if key.startswith("k:")}
    return not items or all(
        any(_names(key, each) and _has(inner, each) for key, inner in items.items()) for each in value
    )


def _names(key: str, item: Any) -> bool:
    wanted = json.loads(key.removeprefix("k:"))
    return isinstance(item, dict) and all(item.get(name, value) == value for name, value in wanted.items())


@lru_cache(maxsize=1024)
def _read(held: str) -> Fields:
    fields: Fields = json.loads(held)
    return fields


class DesiredJob(DesiredSecrets, Protocol):
    """Interface for the desired objects of a job."""

    def supporting(self, state: JobState) -> tuple[Manifest, ...]:
        """Return all objects of the job except its pods, custom resources and Secrets."""

    def children(self, state: JobState) -> tuple[Manifest, ...]:
        """Return the job's own TransferQueue and WeightSync."""

    def pod(self, state: JobState, role: RoleName, index: int, attempt: int) -> Manifest:
        """Return one pod."""

    def images(self, job: RLJob) -> dict[str, str]:
        """Return the image of each role for a job that starts now."""


class DesiredQueue(DesiredSecrets, Protocol):
    """Interface for the desired objects of a TransferQueue."""

    def supporting(self, state: JobState) -> tuple[Manifest, ...]:
        """Return all objects of the job that owns the queue, except pods, custom resources and Secrets."""

    def queue_supporting(self, state: TransferQueueState) -> tuple[Manifest, ...]:
        """Return all objects of the queue except its pods and Secrets."""

    def queue_pod(self, state: TransferQueueState, role: RoleName, index: int, attempt: int) -> Manifest:
        """Return one pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upkeep:
    """Required writes of objects other than pods.

    write: objects to create or change; absent: wanted objects that do not exist or are being deleted; terminating:
    those of them that are being deleted; changed: objects that another client has changed.
    """

    write: tuple[Apply, ...]
    absent: Mapping[Ref, Manifest]
    terminating: Mapping[Ref, Manifest]
    changed: tuple[Ref, ...]


def upkeep(manifests: Sequence[Manifest], *, seen: Mapping[Ref, ObjectView]) -> Upkeep:
    """Compare the wanted objects with the observed ones."""
    absent: dict[Ref, Manifest] = {}
    terminating: dict[Ref, Manifest] = {}
    write, changed = [], []
    for manifest in manifests:
        action = Apply(manifest=manifest)
        view = seen.get(action.ref)
        if view is None or view.deleting:
            absent[action.ref] = manifest
        if view is not None and view.deleting:
            terminating[action.ref] = manifest
        elif view is None or view.digest != manifest["metadata"]["annotations"][DIGEST]:
            write.append(action)
        elif not intact(view.held, manifest):
            write.append(action)
            changed.append(action.ref)
    return Upkeep(write=tuple(write), absent=absent, terminating=terminating, changed=tuple(changed))


def restore_notes(changed: Iterable[Ref], denied: Collection[Denial], *, owner: str) -> Iterator[Note]:
    """Yield a warning for each changed object that is restored, which names the object to change instead."""
    refused = {denial.ref for denial in denied}
    for ref in (ref for ref in changed if ref not in refused):
        message = f"{ref.kind}/{ref.name} was changed and is restored, because it follows {owner}"
        yield Note(type="Warning", reason="PutBack", message=f"{message}: change that instead")


def with_needs(pods: Iterable[Manifest], absent: Mapping[Ref, Manifest]) -> Iterator[Apply]:
    """Yield the creation of pods, each with those of the absent objects that it needs."""
    for pod in pods:
        yield Apply(manifest=pod, needs=needs(pod, absent))


def needs(pod: Manifest, objects: Mapping[Ref, Manifest]) -> frozenset[Ref]:
    """Return those of ``objects`` that must exist before ``pod`` runs: those that it refers to, and its policies."""
    spec = pod["spec"]
    named = {Ref("ServiceAccount", spec.get("serviceAccountName", ""))}
    for volume in spec.get("volumes", ()):
        if "persistentVolumeClaim" in volume:
            named.add(Ref("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
        for source in volume.get("projected", {}).get("sources", ()):
            named |= {Ref(kind, source[key]["name"]) for key, kind in _PROJECTED.items() if key in source}
    labels = pod["metadata"]["labels"].items()
    return frozenset(ref for ref, manifest in objects.items() if ref in named or _selects(manifest, labels))


def _selects(manifest: Manifest, labels: ItemsView[str, str]) -> bool:
    """Return whether ``manifest`` is a NetworkPolicy that selects pods with these labels."""
    if manifest["kind"] != "NetworkPolicy":
        return False
    selector = manifest["spec"]["podSelector"]
    selected: Mapping[str, str] = selector["matchLabels"]
    expressions = selector.get("matchExpressions", ())
    return selected.items() <= labels and all(_holds(each, labels) for each in expressions)


def _holds(expression: Manifest, labels: ItemsView[str, str]) -> bool:
    """Return whether labels satisfy a selector's expression with the operator In or NotIn."""
    within = any((expression["key"], value) in labels for value in expression["values"])
    wanted: bool = expression["operator"] == "In"
    return within == wanted
