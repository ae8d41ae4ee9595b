"""The reward of a job: the weighted sum of its components, each of which has a pool of its own.

Invariants: a sample has a reward only if all components have a value and the sum is within the bounds of the manifest.
Otherwise it has the failure of the first component without a value, or ``out_of_range``, and never a partial sum. If
one component is a function over groups, all components score all samples of a prompt together.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from asyncflow.api.rewards import RewardSpec
from asyncflow.rewards.calling import packed
from asyncflow.rewards.pool import PoolLimits, RewardPool
from asyncflow.rewards.process import Scorer
from asyncflow.rewards.wire import Example, RewardResult, Score

log = logging.getLogger(__name__)

_DECIMALS = 12
"""Decimals of a reward: 0.7 + 0.2 + 0.1 is 1, and rewards that differ only by rounding errors are equal."""


class Component(NamedTuple):
    """One addend of the reward. name: "" if the manifest has only one function."""

    name: str
    weight: float
    pool: RewardPool


class WeightedRewards:
    """Scorer of samples by all components. low, high: bounds of the sum; a sum outside is a failure."""

    def __init__(self, components: Sequence[Component], *, low: float, high: float) -> None:
        self._components = components
        self._low = low
        self._high = high

    @classmethod
    def of(cls, spec: RewardSpec, *, workdir: Path, run: Path | None = None) -> WeightedRewards:
        """Return the scorer for a manifest. workdir, run: as for ``Scorer.of``."""
        limits = PoolLimits(
            min_workers=spec.workers.min,
            max_workers=spec.workers.max,
            timeout_s=spec.timeout_seconds,
            start_timeout_s=spec.start_seconds,
            batch=spec.batch,
            calls=spec.concurrency,
        )
        scorers = Scorer.of(spec, workdir=workdir, run=run)
        components = [
            Component(part.name, part.weight, RewardPool(scorer, limits))
            for part, scorer in zip(spec.parts, scorers, strict=True)
        ]
        return cls(components, low=spec.min, high=spec.max)

    @property
    def by_group(self) -> bool:
        """True if all samples of a prompt must be scored together; known after the start."""
        return any(component.pool.takes == "group" for component in self._components)

    async def start(self) -> None:
        """Start all pools. Raises ManifestError if a function cannot be loaded."""
        for component in self._components:
            await component.pool.start()

    async def score(self, examples: Sequence[Example]) -> list[RewardResult]:
        """Score samples (all of one prompt if ``by_group``). Errors of the functions are returned as failures."""
        scores = await asyncio.gather(*(component.pool.score(examples) for component in self._components))
        return [self._sum(example, each) for example, each in zip(examples, zip(*scores, strict=True), strict=True)]

    async def close(self) -> None:
        """Kill all processes; samples that are being scored fail as ``died``."""
        await asyncio.gather(*(component.pool.close() for component in self._components))

    def _sum(self, example: Example, scores: Sequence[Score]) -> RewardResult:
        checked = list(zip(self._components, [_checked(example, score) for score in scores], strict=True))
        values = {component.name: score.value for component, score in checked if not score.failure}
        named = {name: value for name, value in values.items() if name}
        details = _details({component.name: score.details for component, score in checked if score.details})
        for component, score in checked:
            if score.failure:
                detail = f"component {component.name}: {score.detail}" if component.name else score.detail
                return RewardResult(value=0.0, failure=score.failure, detail=detail, components=named, details=details)
        value = round(sum(component.weight * values[component.name] for component in self._components), _DECIMALS)
        if not self._low <= value <= self._high:
            detail = f"{value:g} is not between reward.min {self._low:g} and reward.max {self._high:g}"
            return RewardResult(value=0.0, failure="out_of_range", detail=detail, components=named, details=details)
        turns = _turns(example, [(component.weight, score) for component, score in checked])
        return RewardResult(value=value, components=named, details=details, turns=turns)


def _checked(example: Example, score: Score) -> Score:
    """Return the score, or a failure if its rewards of turns do not match the turns and the value."""
    count = example.turns
    if not score.turns or (len(score.turns) == count and math.isclose(_total(score.turns), score.value)):
        return score
    detail = f"the reward function returned rewards of {len(score.turns)} turns; there are {count}"
    return Score(failure="invalid", detail=detail, details=score.details)


def _total(values: Sequence[float]) -> float:
    """Return the exact sum, NaN if there is none: a reward process may send infinite or huge numbers."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return math.nan


def _turns(example: Example, scores: Sequence[tuple[float, Score]]) -> list[float]:
    """Return the weighted sums of the rewards of turns, [] if no score has any.

    A score without rewards of turns counts for the last turn.
    """
    if not any(score.turns for _, score in scores):
        return []
    total = [0.0] * example.turns
    for weight, score in scores:
        for turn, value in enumerate(score.turns or [*[0.0] * (len(total) - 1), score.value]):
            total[turn] += weight * value
    return total


def _details(packets: dict[str, bytes]) -> bytes:
    """Return the details of all components as one JSON object: by name, or the details of the only component.

    A reward process is not trusted: details that are not a JSON object, or nested too deeply, are left out.
    """
    combined: dict[str, Any] = {}
    for name, packet in packets.items():
        try:
            details = msgspec.json.decode(packet, type=dict[str, Any])
            packed({name: details})
        except (msgspec.DecodeError, RecursionError):
            log.warning("details of a sample are dropped: they are not a JSON object, or nested too deeply")
            continue
        combined |= {name: details} if name else details
    return packed(combined)
