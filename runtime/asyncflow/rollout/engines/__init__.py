"""Engines are found by entry points (group ``asyncflow.rollout_engines``), so that a third party can add one."""

from __future__ import annotations

from typing import Any

from asyncflow.plugins import load_plugin
from asyncflow.rollout.engines.base import RolloutEngine

GROUP = "asyncflow.rollout_engines"


def open_engine(name: str, **settings: Any) -> RolloutEngine:
    """Make the engine called ``name`` with the settings that ``RolloutEngine`` takes.

    Raises ManifestError for a name or an option that is not known.
    """
    made: type[RolloutEngine] = load_plugin(GROUP, name, kind=RolloutEngine, where="spec.rollout.engine.name")
    return made(**settings)
