"""Engines are found by entry points (group ``asyncflow.rollout_engines``), so that a third party can add one."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from asyncflow.errors import ManifestError
from asyncflow.rollout.engines.base import RolloutEngine

GROUP = "asyncflow.rollout_engines"


def open_engine(
    name: str,
    *,
    folder: Path | None,
    slots: int,
    max_length: int,
    threads: int = 1,
    dtype: str = "float32",
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> RolloutEngine:
    """Make the engine called ``name``. Raises ManifestError for an unknown name, listing the known ones."""
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        raise ManifestError(
            f"no rollout engine is called {name!r}", hint=f"Known: {', '.join(sorted(found)) or 'none'}"
        )
    kind: type[RolloutEngine] = found[name].load()
    return kind(
        folder=folder, slots=slots, max_length=max_length, threads=threads, dtype=dtype, seed=seed, options=options
    )
