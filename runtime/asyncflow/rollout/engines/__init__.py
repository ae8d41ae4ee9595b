"""Engines are found by entry points (group ``asyncflow.rollout_engines``), so that a third party can add one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncflow.plugins import load_plugin
from asyncflow.rollout.engines.base import Decode, Devices, RolloutEngine

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
    decode: Decode | None = None,
    devices: Devices | None = None,
    deterministic: bool = False,
) -> RolloutEngine:
    """Make the engine called ``name``. Raises ManifestError for a name or an option that is not known."""
    made: type[RolloutEngine] = load_plugin(GROUP, name, kind=RolloutEngine, where="spec.rollout.engine.name")
    return made(
        folder=folder,
        slots=slots,
        max_length=max_length,
        threads=threads,
        dtype=dtype,
        seed=seed,
        options=options,
        decode=decode,
        devices=devices,
        deterministic=deterministic,
    )
