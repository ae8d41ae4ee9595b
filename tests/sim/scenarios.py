"""Scenarios of a few prompts, in which a line of arithmetic says what comes out."""

from __future__ import annotations

from typing import Any

from asyncflow.api.schedule import ScheduleSpec
from asyncflow.rollout.lengths import Lengths
from asyncflow.sim import Models, Scenario

MOST = 1_000_000


def scenario(mode: str = "sync", *, schedule: dict[str, Any] | None = None, **given: Any) -> Scenario:
    """Make one of a few prompts. given: models by name, and other sizes than the usual ones."""
    usual = {"steps": 6, "prompts_per_step": 8, "group_size": 4, "max_tokens": MOST, "rollouts": 2}
    models = Models(**{name: given.pop(name) for name in Models.__struct_fields__ if name in given})
    return Scenario(schedule=ScheduleSpec(mode=mode, **(schedule or {})), models=models, **(usual | given))


def equal(tokens: int) -> Lengths:
    return Lengths(tokens=tokens)
