"""The loss of the group-relative family (GRPO, Dr. GRPO, RLOO differ in advantage and aggregation only), whole.

    loss = sum_t weight_t * ( clip(ratio_t, A) + kl * KL_t - entropy * H_t ) / divisor

Invariants: a token's term and its weight need its own sequence and nothing else of the batch, and the divisor the whole
step only. So samples may be trained as they stream in, and gradients of unnormalised sums accumulated in any order,
over any split into micro-batches and ranks, and divided once: exactly the gradient of one big batch. A sequence without
any loss token is counted nowhere; a sample that is ``silent`` contributes exactly nothing to the gradient and may be
left out of the computation, but not out of the divisor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncflow.algorithms.losses import Clip, KlName, PolicyTerms, kl_penalty, ppo_clip
from asyncflow.errors import ManifestError, NotYetError

if TYPE_CHECKING:
    from torch import Tensor


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


OldName = Literal["behaviour", "recompute"]


class TokenLoss(NamedTuple):
    """The loss of N tokens: ``total`` [N] is what is weighted and summed; the rest is for the metrics."""

    total: Tensor
    policy: PolicyTerms
    kl: Tensor | None


@dataclass(frozen=True, kw_only=True)
class GrpoLoss:
    """A loss, as the job describes it.

    old: the denominator of the ratio: ``behaviour`` = the log-probs of the engine that sampled, ``recompute`` = the
    trainer's own at the start of the step, which at its first update is the policy itself (ratio 1).
    kl: weight of the divergence from θ_0; entropy: weight of the entropy bonus; 0 switches either off.
    """

    clip: Clip = field(default_factory=Clip)
    aggregation: Aggregation = field(default_factory=Aggregation)
    old: OldName = "behaviour"
    kl: float = 0.0
    kl_name: KlName = "k3+"
    entropy: float = 0.0

    def __post_init__(self) -> None:
        if self.old not in ("behaviour", "recompute"):
            raise NotYetError(
                f"old: {self.old} does not work yet", where="spec.algorithm.old", hint="Use behaviour or recompute."
            )

    def silent(self, advantages: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Return for each sample, advantages [n], whether its gradient is exactly 0: bool[n]."""
        only_policy = self.kl == 0 and self.entropy == 0
        return np.equal(advantages, 0) & only_policy

    def tokens(
        self,
        logprobs: Tensor,
        *,
        behaviour: Tensor,
        advantages: Tensor,
        reference: Tensor | None,
        entropy: Tensor | None,
        before: Tensor | None = None,
    ) -> TokenLoss:
        """Return the loss of N tokens, each argument [N]: the policy's, the engine's and the reference's log-probs.

        before: the policy's at the start of the step, which ``recompute`` needs once an update has been made.

        ``advantages`` is that of each token's sample. ``reference`` may be None where ``kl`` is 0, and ``entropy``,
        of the policy's distribution at that token, where its weight is 0.
        """
        old = behaviour
        if self.old == "recompute":
            old = logprobs.detach() if before is None else before
        policy = ppo_clip(logprobs, old, advantages, self.clip)
        total, divergence = policy.loss, None
        if reference is not None:
            divergence = kl_penalty(logprobs, reference, self.kl_name)
            total = total + self.kl * divergence
        if entropy is not None:
            total = total - self.entropy * entropy
        return TokenLoss(total, policy, divergence)
