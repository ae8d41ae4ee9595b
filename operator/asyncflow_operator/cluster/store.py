"""Store of the newest known version of each watched object, as a view, grouped by its custom resource.

Watches, lists and the answers to the operator's own writes update it, in any order.

Invariant: a version is never replaced by an older one, and a late message does not bring a deleted object back.
Therefore a reconcile after a write sees that write, and no write is repeated because a watch is late.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, NamedTuple, TypeVar

from asyncflow.api.names import LABEL_JOB, LABEL_QUEUE, LABEL_SYNC
from asyncflow_operator.cluster.kinds import CUSTOM_KINDS, QUEUE, RLJOB, SYNC
from asyncflow_operator.cluster.views import controller_of

Json = Mapping[str, Any]
View = TypeVar("View")

_CUSTOM: Final = frozenset(kind.name for kind in CUSTOM_KINDS)
_REMEMBERED: Final = 4096
"""Number of deleted objects whose late messages are recognised."""


class ObjectGroup(NamedTuple):
    """Group of objects: a custom resource and all objects created for it. kind, name: those of the custom resource."""

    namespace: str
    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Entry(Generic[View]):
    """One object. version: its resource version; owner: UID of the custom resource that controls it, "" for none."""

    kind: str
    uid: str
    version: int
    group: ObjectGroup
    owner: str
    view: View


Project = Callable[[str, Json, Any], Any]
"""Returns the view of an object, from its kind, the object, and the view of its previous version or None."""
Changed = Callable[[ObjectGroup, str, Any, Any], None]
"""Called for each change with the group, the kind, and the views before and after; None if the object did not exist."""


class ObjectStore:
    """Store of all objects by kind, namespace and name."""

    def __init__(self, project: Project, changed: Changed) -> None:
        self._project = project
        self._changed = changed
        self._kinds: dict[str, dict[tuple[str, str], Entry[Any]]] = {}
        self._groups: dict[ObjectGroup, dict[tuple[str, str], Entry[Any]]] = {}
        self._deleted: dict[str, float] = {}

    def get(self, kind: str, namespace: str, name: str) -> Entry[Any] | None:
        """Return an object, None if it does not exist."""
        return self._kinds.get(kind, {}).get((namespace, name))

    def of(self, group: ObjectGroup) -> Collection[Entry[Any]]:
        """Return all objects of a group."""
        return self._groups.get(group, {}).values()

    def all(self, kind: str) -> Iterator[tuple[str, str, Entry[Any]]]:
        """Yield namespace, name and entry of every object of a kind."""
        for (namespace, name), entry in self._kinds.get(kind, {}).items():
            yield namespace, name, entry

    def count(self, kind: str) -> int:
        """Return the number of objects of a kind."""
        return len(self._kinds.get(kind, {}))

    def put(self, kind: str, raw: Json) -> None:
        """Store an object, unless a newer version is already known."""
        meta = raw["metadata"]
        namespace, name, uid = meta.get("namespace", ""), meta["name"], meta.get("uid", "")
        version = int(meta["resourceVersion"])
        before = self.get(kind, namespace, name)
        if version <= self._deleted.get(uid, -1.0) or (before is not None and version <= before.version):
            return
        same = before is not None and before.uid == uid
        view = self._project(kind, raw, before.view if before is not None and same else None)
        owner_kind, _, controller = controller_of(raw)
        owner = controller if owner_kind in _CUSTOM else ""
        group = group_of(kind, raw)
        if before is not None and before.group != group:
            self._drop(kind, namespace, name, before)
            self._changed(before.group, kind, before.view, None)
            before = None
        entry = Entry(kind, uid, version, group, owner, view)
        self._kinds.setdefault(kind, {})[namespace, name] = entry
        self._groups.setdefault(group, {})[kind, name] = entry
        if before is None or not same or before.view != view or before.owner != owner:
            self._changed(group, kind, before.view if before is not None and same else None, view)

    def revise(self, kind: str, namespace: str, name: str, view: Any) -> None:
        """Replace the view of an object by one with information from other sources than the object's newest version."""
        entry = self._kinds[kind][namespace, name]
        revised = replace(entry, view=view)
        self._kinds[kind][namespace, name] = self._groups[entry.group][kind, name] = revised
        self._changed(entry.group, kind, entry.view, view)

    def remove(self, kind: str, namespace: str, name: str, uid: str, *, version: float = math.inf) -> None:
        """Record that the object with this UID no longer exists.

        version: resource version of the watch event or list that reports it. They also report it for an object that has
        lost the labels of their selector; such an object returns with a later version when it has them again.
        """
        self._deleted[uid] = max(version, self._deleted.pop(uid, -1.0))
        if len(self._deleted) > _REMEMBERED:
            del self._deleted[next(iter(self._deleted))]
        entry = self.get(kind, namespace, name)
        if entry is not None and entry.uid == uid:
            self._drop(kind, namespace, name, entry)
            self._changed(entry.group, kind, entry.view, None)

    def retain(self, kind: str, namespace: str, listed: Collection[str], version: int) -> None:
        """Remove the objects of a kind that are not among the UIDs of a list, unless they are newer than the list."""
        lost = [
            (where, name, entry.uid)
            for where, name, entry in self.all(kind)
            if entry.uid not in listed and entry.version <= version and namespace in ("", where)
        ]
        for where, name, uid in lost:
            self.remove(kind, where, name, uid, version=version)

    def _drop(self, kind: str, namespace: str, name: str, entry: Entry[Any]) -> None:
        del self._kinds[kind][namespace, name]
        members = self._groups[entry.group]
        del members[kind, name]
        if not members:
            del self._groups[entry.group]


def group_of(kind: str, raw: Json) -> ObjectGroup:
    """Return the group of an object, by its labels; a custom resource without an owner has a group of its own."""
    meta = raw["metadata"]
    namespace, name, labels = meta.get("namespace", ""), meta["name"], meta.get("labels") or {}
    owner_kind, owner_name, _ = controller_of(raw)
    if kind in _CUSTOM:
        return (
            ObjectGroup(namespace, owner_kind, owner_name)
            if owner_kind in _CUSTOM
            else ObjectGroup(namespace, kind, name)
        )
    if LABEL_JOB in labels:
        return ObjectGroup(namespace, RLJOB.name, labels[LABEL_JOB])
    if LABEL_SYNC in labels:
        return ObjectGroup(namespace, SYNC.name, labels[LABEL_SYNC])
    return ObjectGroup(namespace, QUEUE.name, labels.get(LABEL_QUEUE, ""))
