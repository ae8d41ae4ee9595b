"""A user's piece of a pod laid over ours, as ``kubectl patch`` would do it.

Mappings are merged, null takes a field away, lists of things that have names are merged by name, tolerations are added,
every other list is replaced whole.

Invariant: merging nothing changes nothing, and what is merged in twice is there once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

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
"""By field of a PodSpec: what tells the items of its list apart (Kubernetes' ``patchMergeKey``, where it has one)."""


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
