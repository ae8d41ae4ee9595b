"""The newest version of every object that concerns the operator, as views, grouped by the job they belong to.

It is fed by watches, lists and the answers to its own writes, in whatever order these arrive. Invariant: a version is
never replaced by an older one, and what was deleted does not come back by a late message; so a reconcile that follows a
write sees it, and no write is repeated because a watch is late.
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
"""Deleted objects of which late messages are still expected."""


class ObjectGroup(NamedTuple):
    """Objects that belong together: a custom resource and all that is made for it. kind, name: of that resource."""

    namespace: str
    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Entry(Generic[View]):
    """One object. version: its resource version; owner: UID of the custom resource that controls it, "" without one."""

    kind: str
    uid: str
    version: int
    group: ObjectGroup
    owner: str
    view: View


Project = Callable[[str, Json, Any], Any]
"""Makes the view of an object of a kind, from it and the view of its last version or None."""
Changed = Callable[[ObjectGroup, str, Any, Any], None]
"""Called with the group in which an object of a kind changed, its view before and after; None for no object."""


class ObjectStore:
    """Store of all objects by kind, namespace and name."""

    def __init__(self, project: Project, changed: Changed) -> None:
        self._project = project
        self._changed = changed
        self._kinds: dict[str, dict[tuple[str, str], Entry[Any]]] = {}
        self._groups: dict[ObjectGroup, dict[tuple[str, str], Entry[Any]]] = {}
        self._gone: dict[str, float] = {}

    def get(self, kind: str, namespace: str, name: str) -> Entry[Any] | None:
        """Return an object, None where there is none."""
        return self._kinds.get(kind, {}).get((namespace, name))

    def of(self, group: ObjectGroup) -> Collection[Entry[Any]]:
        """Return all objects of a group."""
        return self._groups.get(group, {}).values()

    def all(self, kind: str) -> Iterator[tuple[str, str, Entry[Any]]]:
        """Yield namespace, name and entry of every object of a kind."""
        for (namespace, name), entry in self._kinds.get(kind, {}).items():
            yield namespace, name, entry

    def count(self, kind: str) -> int:
        """Return how many objects of a kind there are."""
        return len(self._kinds.get(kind, {}))

    def put(self, kind: str, raw: Json) -> None:
        """Take an object as it is, or was, at its resource version."""
        meta = raw["metadata"]
        namespace, name, uid = meta.get("namespace", ""), meta["name"], meta.get("uid", "")
        version = int(meta["resourceVersion"])
        before = self.get(kind, namespace, name)
        if version <= self._gone.get(uid, -1.0) or (before is not None and version <= before.version):
            return
        same = before is not None and before.uid == uid
        view = self._project(kind, raw, before.view if before is not None and same else None)
        owner_kind, _, controller = controller_of(raw)
        owner = controller if owner_kind in _CUSTOM else ""
        group = group_of(kind, raw)
        if before is not None and before.group != group:
            self._drop(kind, namespace, name, before)
        entry = Entry(kind, uid, version, group, owner, view)
        self._kinds.setdefault(kind, {})[namespace, name] = entry
        self._groups.setdefault(group, {})[kind, name] = entry
        if before is None or not same or before.view != view or before.owner != owner:
            self._changed(group, kind, before.view if before is not None and same else None, view)

    def revise(self, kind: str, namespace: str, name: str, view: Any) -> None:
        """Replace the view of an object by one that knows more than its newest version says."""
        entry = self._kinds[kind][namespace, name]
        revised = replace(entry, view=view)
        self._kinds[kind][namespace, name] = self._groups[entry.group][kind, name] = revised
        self._changed(entry.group, kind, entry.view, view)

    def remove(self, kind: str, namespace: str, name: str, uid: str, *, version: float = math.inf) -> None:
        """Record that the object with this UID exists no more.

        version: as of which a watch or a list says so. They say the same of one that has lost the labels by which it is
        chosen, and that comes back with a later version when it has them again.
        """
        self._gone[uid] = max(version, self._gone.pop(uid, -1.0))
        if len(self._gone) > _REMEMBERED:
            del self._gone[next(iter(self._gone))]
        entry = self.get(kind, namespace, name)
        if entry is not None and entry.uid == uid:
            self._drop(kind, namespace, name, entry)
            self._changed(entry.group, kind, entry.view, None)

    def retain(self, kind: str, namespace: str, listed: Collection[str], version: int) -> None:
        """Record that at ``version`` the objects of a kind (in a namespace, or "" for all) had just these UIDs."""
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
    """Return the group of an object, by its labels; a custom resource without an owner is alone in its group."""
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
