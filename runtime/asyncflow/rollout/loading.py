"""Loading of a version from the receiver into an engine: merge, stage next to the running model, load, verify.

Rollouts and followers both load in this way; they decide when.

Invariants: weights are prepared once per version, in another thread. Loaded weights are verified against the log-probs
published with them, if the engine can compute log-probs. An engine with other weights is not used.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncflow.errors import AsyncFlowError, DeadlineExceeded
from asyncflow.identity import Version
from asyncflow.rollout.engines.base import RolloutEngine
from asyncflow.rpc.membership import Status
from asyncflow.telemetry.metrics import LoadingMetrics
from asyncflow.telemetry.spans import NO_SPANS, Spans
from asyncflow.weights.probe import Proved, WeightProbe, refuted, split_probe
from asyncflow.weights.receiver import WeightReceiver

log = logging.getLogger(__name__)

EXACT, ROUNDED = 1e-3, 0.25
"""Largest mean difference of an engine's log-probs from the trainer's for the same weights, in float32 and in bfloat16.
Those of other weights differ by whole units.
"""
_WATCH_S = 3600.0

Weights: TypeAlias = Mapping[str, NDArray[Any]]
Merge: TypeAlias = Callable[[Weights], Weights]


@dataclass(frozen=True, kw_only=True)
class PreparedWeights:
    """A version in the form that its engine loads, and the probe published with it."""

    version: Version
    weights: Weights
    probe: WeightProbe | None


class WeightLoader:
    """Loads versions of ``receiver`` into ``engine``.

    merge: converts published tensors to the engine's weights, in another thread, as soon as a version is staged;
    None if they are the same. probe_gap: largest allowed mean difference of the engine's log-probs; spans: records
    staging.
    """

    def __init__(
        self,
        receiver: WeightReceiver,
        engine: RolloutEngine,
        *,
        metrics: LoadingMetrics,
        probe_gap: float,
        merge: Merge | None = None,
        spans: Spans = NO_SPANS,
    ) -> None:
        self._receiver = receiver
        self._engine = engine
        self._metrics = metrics
        self._probe_gap = probe_gap
        self._merge = merge
        self._spans = spans
        self._merging: tuple[Version, asyncio.Task[Weights]] | None = None
        self._proved: Proved | None = None
        self.swaps = 0
        self._stage_s: float | None = None
        self._swap_s: float | None = None

    def status(self) -> Status:
        """Return the status for heartbeats: the receiver's, with the loaded version.

        stage_s, swap_s: seconds that the phases took last, absent before the first time.
        """
        version = self._engine.version
        phases = {"stage_s": self._stage_s, "swap_s": self._swap_s}
        return {
            **self._receiver.status(),
            "version": -1 if version is None else version.packed,
            "swaps": self.swaps,
            **{phase: seconds for phase, seconds in phases.items() if seconds is not None},
        }

    async def stage(self, version: Version) -> None:
        """Prepare a complete version in the engine, while the engine works with the previous one."""
        started = time.monotonic()
        with self._spans.background("stage", version=version.step):
            weights, _ = await self._weights_of(version, self._receiver.tensors(version))
            await self._engine.stage(version, weights)
        self._stage_s = time.monotonic() - started
        self._metrics.stage_seconds.observe(self._stage_s)

    async def stage_all(self) -> None:
        """Prepare each version in the engine as soon as it is complete, forever."""
        while True:
            staged = self._receiver.staged
            if staged is not None and self._engine.version is not None:
                await self.stage(staged)
            with contextlib.suppress(DeadlineExceeded):
                differs = functools.partial(lambda seen: self._receiver.staged != seen, staged)
                await self._receiver.wait_for(differs, what="a version to prepare", timeout=_WATCH_S)

    async def prepare(self, step: int) -> PreparedWeights:
        """Take the version of ``step``, which the receiver must hold, and prepare it. It is in use from now on."""
        version, tensors = self._receiver.take(step)
        weights, probe = await self._weights_of(version, tensors)
        if self._merging is not None and self._merging[0] == version:
            self._merging = None
        return PreparedWeights(version=version, weights=weights, probe=probe)

    async def load(self, prepared: PreparedWeights) -> None:
        """Swap the engine to a version. Raises AsyncFlowError if the engine's weights are not the published ones."""
        await self._engine.load(prepared.version, prepared.weights)
        if prepared.probe is not None:
            await self._prove(prepared.version, prepared.probe)

    def swapped(self, step: int, seconds: float) -> None:
        """Record a swap to ``step`` that blocked the engine for ``seconds``."""
        self.swaps += 1
        self._swap_s = seconds
        self._metrics.swaps.inc()
        self._metrics.swap_seconds.observe(seconds)
        self._metrics.version_step.set(step)

    def close(self) -> None:
        """Stop preparing versions."""
        if self._merging is not None:
            self._merging[1].cancel()

    async def _weights_of(self, version: Version, tensors: Weights) -> tuple[Weights, WeightProbe | None]:
        """Return the engine's weights of a held version, merged once and in another thread, and its probe."""
        published, probe = split_probe(tensors)
        if self._merge is None:
            return published, probe
        if self._merging is None or self._merging[0] != version:
            work = asyncio.to_thread(self._merge, published)
            self._merging = version, asyncio.create_task(work, name=f"merge {version}")
        return await asyncio.shield(self._merging[1]), probe

    async def _prove(self, version: Version, probe: WeightProbe) -> None:
        """Verify the loaded weights by the log-probs that were published with them."""
        probe = probe.shortened(self._engine.max_length - 1)
        found = await self._engine.probe(probe.ids.tolist())
        if found is None:
            return
        gaps = np.abs(found - probe.logprobs)
        gap = float(gaps.mean()) if len(gaps) else 0.0
        self._metrics.probe_gap.set(float(gaps.max(initial=0.0)))
        log.info("%s: log-probs of %d tokens differ by %.1e from those published with it", version, len(found), gap)
        if (reason := refuted(found, probe, before=self._proved, limit=self._probe_gap)) is not None:
            what = f"the engine does not have the weights of {version}: {reason}"
            raise AsyncFlowError(what, where="spec.rollout.engine", hint="It has not loaded all tensors of this model")
        self._proved = Proved(probe, gap)
