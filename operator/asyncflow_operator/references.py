"""References between custom resources: from a job to its WeightSync, from a WeightSync for followers to its job.

Invariant: references are those of the specs in force, whether or not the named objects exist.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

from asyncflow.api.job import RLJob
from asyncflow.api.weights import WeightSync


class Key(NamedTuple):
    """Key of a custom resource."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return "/".join(self)


def named_by(model: Any, namespace: str) -> Key | None:
    """Return the custom resource that a spec in force names, None if it names none."""
    if isinstance(model, RLJob) and (name := model.spec.weight_sync.name) is not None:
        return Key("WeightSync", namespace, name)
    if isinstance(model, WeightSync) and model.spec.source is not None and model.spec.source.job is not None:
        return Key("RLJob", namespace, model.spec.source.job)
    return None


class References:
    """References between custom resources, updated as these change."""

    def __init__(self) -> None:
        self._named: dict[Key, Key] = {}
        self._by: defaultdict[Key, set[Key]] = defaultdict(set)

    def note(self, key: Key, model: Any) -> None:
        """Record the reference of an object. model: its spec in force, None if it was deleted or never had one."""
        named, before = named_by(model, key.namespace), self._named.pop(key, None)
        if before is not None:
            self._by[before].discard(key)
            if not self._by[before]:
                del self._by[before]
        if named is not None:
            self._named[key] = named
            self._by[named].add(key)

    def by(self, key: Key) -> frozenset[Key]:
        """Return the objects that name ``key``."""
        return frozenset(self._by.get(key, ()))

    def around(self, key: Key) -> frozenset[Key]:
        """Return the objects that name ``key``, the object that ``key`` names, and the others that name that object."""
        named = self._named.get(key)
        return self.by(key) if named is None else self.by(key) | {named} | self.by(named) - {key}
