"""Probe of a version: a few tokens and the log-probs that the publisher's model gives them, as two extra tensors.

A process that has loaded the version computes the same log-probs with its own model, whatever its layout and kernels.
A tensor that was not loaded appears as a large difference. A model that still has the previous version is detected if
the two versions differ by more than rounding.

Invariant: a probe belongs to the weights that it is published with. It is never passed to a model as a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncflow.weights.slices import AnyArray

TOKENS = 32
"""Maximum number of tokens of a probe."""
_DISTINCT = 4.0
"""Factor by which a change of the weights must exceed rounding for the previous version to be detected."""
_IDS = "asyncflow.probe.ids"
_LOGPROBS = "asyncflow.probe.logprobs"


class WeightProbe(NamedTuple):
    """A probe. ids int32[n]; logprobs float32[n - 1]: log p(ids[i] | ids[:i]) for i >= 1, at temperature 1."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    @property
    def tensors(self) -> dict[str, AnyArray]:
        """The probe as tensors to publish."""
        return {_IDS: self.ids, _LOGPROBS: self.logprobs}

    def shortened(self, tokens: int) -> WeightProbe:
        """Return the probe of the first ``tokens`` tokens, for a model with fewer positions."""
        return WeightProbe(self.ids[:tokens], self.logprobs[: max(0, tokens - 1)])


class Proved(NamedTuple):
    """The probe of a version that was loaded, and the mean difference of the loaded model's log-probs from it."""

    probe: WeightProbe
    gap: float


def refuted(found: NDArray[np.float32], probe: WeightProbe, *, before: Proved | None, limit: float) -> str | None:
    """Return why ``found`` cannot come from the weights of ``probe``, or None if it can.

    before: result of the previously loaded version; limit: largest allowed mean difference of log-probs.
    """
    gap = _mean_gap(found, probe.logprobs)
    if not gap <= limit:
        return f"log-probs of {len(found)} tokens differ by {gap:.3g} on average, which should be at most {limit:g}"
    if before is None or len(before.probe.logprobs) != len(found):
        return None
    change = _mean_gap(before.probe.logprobs, probe.logprobs)
    if change > _DISTINCT * before.gap and _mean_gap(found, before.probe.logprobs) < gap:
        return f"log-probs of {len(found)} tokens are those of the version before, which differs by {change:.3g}"
    return None


def _mean_gap(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    return float(np.abs(one - other).mean()) if len(one) else 0.0


def probe_ids(*, vocabulary: int, most: int) -> NDArray[np.int32]:
    """Return the ids of a probe, always the same ones. vocabulary, most: tokens and positions that the model has."""
    return np.random.default_rng(0).integers(vocabulary, size=min(TOKENS, most), dtype=np.int32)


def split_probe(tensors: Mapping[str, AnyArray]) -> tuple[Mapping[str, AnyArray], WeightProbe | None]:
    """Return the weights among ``tensors``, and the probe if there is one."""
    weights = {name: tensor for name, tensor in tensors.items() if not is_probe(name)}
    if len(weights) == len(tensors):
        return tensors, None
    return weights, WeightProbe(np.asarray(tensors[_IDS], np.int32), np.asarray(tensors[_LOGPROBS], np.float32))


def is_probe(name: str) -> bool:
    """Return whether a published tensor is a part of a probe."""
    return name in (_IDS, _LOGPROBS)
