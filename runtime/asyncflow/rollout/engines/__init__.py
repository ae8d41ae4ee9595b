"""Rollout engines: entry points of the group ``asyncflow.rollout_engines``, to which other packages can add engines."""

from __future__ import annotations

from typing import Any

from asyncflow.plugins import load_plugin
from asyncflow.rollout.engines.base import RolloutEngine

GROUP = "asyncflow.rollout_engines"


def open_engine(name: str, **settings: Any) -> RolloutEngine:
    """Create the engine called ``name``; settings: the parameters of ``RolloutEngine``.

    Raises ManifestError for an unknown name or option.
    """
    engine: type[RolloutEngine] = load_plugin(GROUP, name, kind=RolloutEngine, where="spec.rollout.engine.name")
    return engine(**settings)
