"""Whether an object still says what the operator wrote into it.

The API server records for every field who set it last (``metadata.managedFields``). A field of ours that somebody else
changes or removes is not ours any more, so one look at that record tells, without reading the object itself.

Invariant: whatever others add to an object, and whatever the API server fills in, is left alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from asyncflow_operator.observed import Manifest

_IDENTITY: Final = frozenset(("apiVersion", "kind", "metadata"))

Fields = Mapping[str, Any]


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
