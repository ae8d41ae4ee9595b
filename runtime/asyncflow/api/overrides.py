"""``--set path=value``: changes to a manifest's data before it is checked.

Invariant: an override is checked exactly as if its value had been written into the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncflow.api.document import Document, parse
from asyncflow.errors import ManifestError

_ROOTS = ("spec", "metadata")


def apply(document: Document, overrides: Sequence[str]) -> None:
    """Write each ``path=value`` into ``document``. Paths start at spec, or at the root with ``spec.``, ``metadata.``.

    Raises ManifestError where an override is not of this form, or its path leads through something that is no mapping.
    """
    for override in overrides:
        path, separator, text = override.partition("=")
        where = f"--set {override}"
        keys = path.strip().split(".")
        if not separator or not all(keys):
            raise ManifestError("not of the form path=value", where=where, hint="E.g. --set algorithm.steps=5")
        if keys[0] not in _ROOTS:
            keys = ["spec", *keys]
        document.lines = {place: line for place, line in document.lines.items() if place[: len(keys)] != tuple(keys)}
        _put(document.data, keys, parse(f"value: {text}", source=where).data["value"], where=where)


def latest(overrides: Sequence[str]) -> list[str]:
    """Return ``overrides`` without those whose path is set again later."""
    last = {override.partition("=")[0].strip(): index for index, override in enumerate(overrides)}
    return [override for index, override in enumerate(overrides) if index in last.values()]


def _put(data: Any, keys: Sequence[str], value: Any, *, where: str) -> None:
    here = data
    for depth, key in enumerate(keys[:-1]):
        here = here.setdefault(key, {})
        if not isinstance(here, dict):
            raise ManifestError(
                f"{'.'.join(keys[: depth + 1])} is no mapping", where=where, hint="Set it as a whole: path={key: value}"
            )
    here[keys[-1]] = value
