"""Upkeep of the objects beside pods: which are written, and which a pod needs before it is made.

The API server records for every field which manager set it last (``metadata.managedFields``). A field of the operator
that somebody else changes or removes is the operator's no more, so that record alone shows it, without reading the
object.

Invariants: an object is written where the digest that was observed differs from the digest that is wanted, or where
somebody else has changed what was written; what others add to an object, and what the API server fills in, is left
alone.
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
    """Return whether all that ``manifest`` says, with its labels, is among the fields ``held``; "" stands for all."""
    if not held:
        return True
    said = {key: value for key, value in manifest.items() if key not in _IDENTITY}
    said["metadata"] = {"labels": manifest["metadata"].get("labels", {})}
    fields = _read(held)
    return bool(fields) and _has(fields, said)


def _has(fields: Fields, value: Any) -> bool:
    """Fields without fields of their own are held whole; an item of a list is found by what its key says of it."""
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
    """Objects of a job."""

    def supporting(self, state: JobState) -> tuple[Manifest, ...]:
        """Return every object of the job, except its pods, custom resources and Secrets."""

    def children(self, state: JobState) -> tuple[Manifest, ...]:
        """Return the job's own TransferQueue and WeightSync."""

    def pod(self, state: JobState, role: RoleName, index: int, attempt: int) -> Manifest:
        """Return one pod."""

    def images(self, job: RLJob) -> dict[str, str]:
        """Return the image of each role, as this operator would have it now."""


class DesiredQueue(DesiredSecrets, Protocol):
    """Objects of a TransferQueue."""

    def supporting(self, state: JobState) -> tuple[Manifest, ...]:
        """Return every object of the job that a queue belongs to, except its pods and custom resources."""

    def queue_supporting(self, state: TransferQueueState) -> tuple[Manifest, ...]:
        """Return every object of the queue, except its pods."""

    def queue_pod(self, state: TransferQueueState, role: RoleName, index: int, attempt: int) -> Manifest:
        """Return one pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upkeep:
    """Writes that objects other than pods need.

    write: objects to create or change; absent: objects that do not exist; going: those of them that are still being
    deleted; changed: objects that somebody else has changed.
    """

    write: tuple[Apply, ...]
    absent: Mapping[Ref, Manifest]
    going: Mapping[Ref, Manifest]
    changed: tuple[Ref, ...]


def upkeep(manifests: Sequence[Manifest], *, seen: Mapping[Ref, ObjectView]) -> Upkeep:
    """Compare what is wanted with what was seen."""
    absent: dict[Ref, Manifest] = {}
    going: dict[Ref, Manifest] = {}
    write, changed = [], []
    for manifest in manifests:
        action = Apply(manifest=manifest)
        view = seen.get(action.ref)
        if view is None or view.deleting:
            absent[action.ref] = manifest
        if view is not None and view.deleting:
            going[action.ref] = manifest
        elif view is None or view.digest != manifest["metadata"]["annotations"][DIGEST]:
            write.append(action)
        elif not intact(view.held, manifest):
            write.append(action)
            changed.append(action.ref)
    return Upkeep(write=tuple(write), absent=absent, going=going, changed=tuple(changed))


def restore_notes(changed: Iterable[Ref], denied: Collection[Denial], *, owner: str) -> Iterator[Note]:
    """Yield a warning for each changed object that is put back, which says where the change belongs."""
    refused = {denial.ref for denial in denied}
    for ref in (ref for ref in changed if ref not in refused):
        words = f"Somebody changed {ref.kind}/{ref.name}; it is put back, because it follows {owner}"
        yield Note(type="Warning", reason="PutBack", message=f"{words}: change that instead")


def with_needs(pods: Iterable[Manifest], absent: Mapping[Ref, Manifest]) -> Iterator[Apply]:
    """Yield pods to be made, each with those of the absent objects that it needs."""
    for pod in pods:
        yield Apply(manifest=pod, needs=needs(pod, absent))


def needs(pod: Manifest, objects: Mapping[Ref, Manifest]) -> frozenset[Ref]:
    """Return those of ``objects`` that ``pod`` refers to, and its policies, which must be there before it runs."""
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
    """Return whether ``manifest`` is a policy of the pods that have these labels."""
    if manifest["kind"] != "NetworkPolicy":
        return False
    selector = manifest["spec"]["podSelector"]
    selected: Mapping[str, str] = selector["matchLabels"]
    asked = selector.get("matchExpressions", ())
    return selected.items() <= labels and all(_holds(each, labels) for each in asked)


def _holds(expression: Manifest, labels: ItemsView[str, str]) -> bool:
    """Return whether labels satisfy an expression of a selector whose operator is In or NotIn."""
    within = any((expression["key"], value) in labels for value in expression["values"])
    wanted: bool = expression["operator"] == "In"
    return within == wanted
