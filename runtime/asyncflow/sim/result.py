"""The result of a simulated run: its steps, its idle shares, and its timeline.

Invariant: figures have the same names and meanings as in ``metrics.jsonl`` and ``summary.json`` of real runs; all times
are virtual seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec

from asyncflow.timeline.tracks import Timeline

Spent: TypeAlias = Mapping[tuple[str, str], float]
"""Seconds by kind of span, and for idle spans by reason to wait."""


class SimulatedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step.

    ended: time of its report; wall_s: seconds since the previous report, including ``wait_s`` of waiting for samples
    and ``publish_s`` of waiting for a publication; staleness_start, staleness_end: (step - 1) - v of a sample's oldest
    and newest token; slots: number of slots of the step.
    """

    step: int
    ended: float
    wall_s: float
    wait_s: float
    compute_s: float
    optimizer_s: float
    publish_s: float
    checkpoint_s: float
    samples: int
    tokens: int
    response_tokens: int
    staleness_start_max: int
    staleness_start_mean: float
    staleness_end_max: int
    staleness_end_mean: float
    staleness_token_mean: float
    slots: int


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated run.

    wall_s: from the first prompt to the end of the last step; ended: time of the last evaluation; spent: by role,
    seconds of all its processes in that window; idle: of trainer and rollouts, the share of their time in which they
    were not busy; samples: number of trained samples; redone: tokens lost with killed rollouts; timeline: None if spans
    were not recorded.
    """

    steps: Sequence[SimulatedStep]
    wall_s: float
    ended: float
    spent: Mapping[str, Spent]
    idle: Mapping[str, float]
    samples: int
    redone: int
    timeline: Timeline | None

    @property
    def tokens_per_second(self) -> float:
        """Tokens of prompts and responses trained per second."""
        return sum(step.tokens for step in self.steps) / self.wall_s if self.wall_s > 0 else 0.0

    def step_s(self, *, without: int = 0) -> float:
        """Return the mean seconds of a step after the first ``without``."""
        counted = self.steps[without:]
        began = self.steps[without - 1].ended if without else counted[0].ended - counted[0].wall_s
        return (counted[-1].ended - began) / len(counted)
