"""A few tokens and the log-probs that the publisher's model gives them, published with a version as two tensors more.

Whoever loads the version asks its own model for the same log-probs: a tensor that was not loaded, or was loaded from
another version, shows at once, whatever layout and kernels that model has.

Invariant: a probe belongs to the very weights that it is published with; it is never handed to a model as a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncflow.weights.slices import AnyArray

TOKENS = 32
"""Tokens of a probe at most."""
_IDS = "asyncflow.probe.ids"
_LOGPROBS = "asyncflow.probe.logprobs"


class Probe(NamedTuple):
    """ids int32[n]; logprobs float32[n - 1]: log p(ids[i] | ids[:i]) for i >= 1, at temperature 1."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    @property
    def tensors(self) -> dict[str, AnyArray]:
        """The probe as tensors to publish."""
        return {_IDS: self.ids, _LOGPROBS: self.logprobs}

    def shortened(self, tokens: int) -> Probe:
        """Return the probe of the first ``tokens`` tokens, for a model that takes no more."""
        return Probe(self.ids[:tokens], self.logprobs[: max(0, tokens - 1)])


def probe_ids(*, vocabulary: int, most: int) -> NDArray[np.int32]:
    """Return the ids of a probe of a model with so many tokens and at most so many positions: the same ones always."""
    return np.random.default_rng(0).integers(vocabulary, size=min(TOKENS, most), dtype=np.int32)


def split_probe(tensors: Mapping[str, AnyArray]) -> tuple[Mapping[str, AnyArray], Probe | None]:
    """Return the weights among ``tensors``, and the probe where there is one."""
    if _IDS not in tensors:
        return tensors, None
    weights = {name: tensor for name, tensor in tensors.items() if name not in (_IDS, _LOGPROBS)}
    return weights, Probe(np.asarray(tensors[_IDS], np.int32), np.asarray(tensors[_LOGPROBS], np.float32))
