"""Engines and backends come from entry points: ours and a third party's are found in the same way.

Invariant: nothing of a plug-in is imported before it is named by a manifest.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from asyncflow.errors import ManifestError


def load_plugin(group: str, name: str, *, where: str) -> type[Any]:
    """Give the class registered as ``name``. Raises ManifestError where there is none, or it cannot be imported."""
    found = {point.name: point for point in entry_points(group=group)}
    if name not in found:
        raise ManifestError(f"{name!r} is not installed", where=where, hint=f"Installed: {', '.join(sorted(found))}")
    try:
        loaded: type[Any] = found[name].load()
    except ImportError as error:
        hint = "Install what it needs, e.g. pip install 'asyncflow[torch]'"
        raise ManifestError(f"{name!r} cannot be imported: {error}", where=where, hint=hint) from error
    return loaded
