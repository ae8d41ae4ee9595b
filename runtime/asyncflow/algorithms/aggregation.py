"""From a loss per token to one number: a weight known from the sequence alone, times one divisor known at the end.

Invariant: loss = (sum over tokens of weight * token loss) / divisor, where the weight depends on the token's own
sequence only and the divisor on the whole step only. So gradients of unnormalised sums can be accumulated in any
order, over any split into micro-batches and ranks, and divided once: exactly the gradient of one big batch.
A sequence without any loss token is counted nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncflow.errors import ManifestError

AggregationName = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


class LossTotals(NamedTuple):
    """Counts of a whole step, over all ranks: loss tokens, and sequences that have at least one of them."""

    tokens: int
    sequences: int


@dataclass(frozen=True, kw_only=True)
class Aggregation:
    """One way to average. The names are verl's.

    ``token-mean``: mean over all tokens of the step; ``token-sum``: their sum; ``seq-mean-token-sum``: mean over
    sequences of the sum over tokens; ``seq-mean-token-mean``: mean over sequences of the mean over tokens (GRPO's
    paper); ``seq-mean-token-sum-norm``: as seq-mean-token-sum, divided by ``horizon``, the longest response allowed
    (Dr. GRPO).
    """

    name: AggregationName = "token-mean"
    horizon: int = 0

    def __post_init__(self) -> None:
        if self.name == "seq-mean-token-sum-norm" and self.horizon < 1:
            raise ManifestError(
                f"aggregation {self.name} divides by the longest response, which is given as {self.horizon}",
                where="spec.algorithm.aggregation",
                hint="Set spec.sampling.maxTokens.",
            )

    def weights(self, tokens: NDArray[np.integer]) -> NDArray[np.float64]:
        """Return the weight of each token of a sequence, float64[n], for sequences of ``tokens`` [n] loss tokens."""
        if self.name == "seq-mean-token-mean":
            return np.asarray(1.0 / np.maximum(tokens, 1), dtype=np.float64)
        if self.name == "seq-mean-token-sum-norm":
            return np.full(len(tokens), 1.0 / self.horizon)
        return np.ones(len(tokens))

    def divisor(self, totals: LossTotals) -> float:
        """Return what the sum over the whole step is divided by; 1 where the step holds nothing."""
        if self.name == "token-sum":
            return 1.0
        return float(max(1, totals.tokens if self.name == "token-mean" else totals.sequences))
