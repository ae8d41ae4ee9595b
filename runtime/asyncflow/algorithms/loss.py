"""The loss of a step: the algorithm's policy loss of each token, with correction, KL and entropy terms added.

    loss = sum_t weight_t * ( correction_t * policy_t + kl * KL_t - entropy * H_t ) / divisor

policy_t is the algorithm's policy loss; correction_t is 1 without a ``Correction``.

Invariants: a token's term and its weights need only the token's own sequence (with an algorithm of pairs, its own pair,
whose two sequences are in one pack); only the divisor needs the whole step. So samples may be trained as they stream
in: gradients of unnormalised sums are accumulated in any order, over any split into micro-batches and ranks, and
divided once, which gives exactly the gradient of one big batch. A sequence without loss tokens counts nowhere. A sample
that is ``silent`` contributes exactly nothing to the gradient and may be left out of the computation. It stays in the
divisor, and so do tokens that a correction masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncflow.algorithms.base import NAME, Algorithm, Tokens
from asyncflow.algorithms.correction import Correction, CorrectionTerms
from asyncflow.algorithms.grpo import Grpo
from asyncflow.algorithms.losses import Clip, KlName, KlTarget, PolicyTerms, kl_penalty
from asyncflow.errors import ManifestError

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
                f"aggregation {self.name} divides by the length of the longest response, which is {self.horizon}",
                where="spec.algorithm.aggregation",
                hint="Set spec.sampling.maxTokens",
            )

    def weights(self, tokens: NDArray[np.integer]) -> NDArray[np.float64]:
        """Return the weight of each token of a sequence, float64[n], for sequences of ``tokens`` [n] loss tokens."""
        if self.name == "seq-mean-token-mean":
            return np.asarray(1.0 / np.maximum(tokens, 1), dtype=np.float64)
        if self.name == "seq-mean-token-sum-norm":
            return np.full(len(tokens), 1.0 / self.horizon)
        return np.ones(len(tokens))

    def divisor(self, totals: LossTotals) -> float:
        """Return the divisor of the sum over the whole step; 1 for an empty step."""
        if self.name == "token-sum":
            return 1.0
        return float(max(1, totals.tokens if self.name == "token-mean" else totals.sequences))


_OF_TOKENS = ("loss", "ratio", "clipped_low", "clipped_high", "clipped_dual")
OldName = Literal["behaviour", "recompute", "lagged"]


class TokenLoss(NamedTuple):
    """The loss of N tokens: ``total`` [N] is weighted and summed; the other fields are for metrics."""

    total: Tensor
    policy: PolicyTerms
    kl: Tensor | None
    correction: CorrectionTerms | None


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The loss that a job configures.

    algorithm: computes the policy loss of each token.
    old: denominator of the ratio. ``behaviour``: log-probs of the engine that sampled. ``recompute``: the trainer's own
        log-probs at the start of the step, which at its first update are the policy's (ratio 1). ``lagged``: log-probs
        under the weights one step before (Periodic Asynchrony: θ_{k-2} in step k, whose policy is θ_{k-1}).
    correction: importance weights for the samples' distance from the old policy, None for none.
    kl: weight of the divergence from θ_0, in the loss, or in the reward if ``penalised``; 0 for none.
    target: adapts ``kl`` after each step, None for a constant weight.
    entropy: weight of the entropy bonus, 0 for none.
    """

    algorithm: Algorithm[Any] = field(default_factory=Grpo)
    clip: Clip = field(default_factory=Clip)
    aggregation: Aggregation = field(default_factory=Aggregation)
    old: OldName = "behaviour"
    correction: Correction | None = None
    kl: float = 0.0
    kl_name: KlName = "k3+"
    penalised: bool = False
    target: KlTarget | None = None
    entropy: float = 0.0

    def __post_init__(self) -> None:
        if self.old == "behaviour" and self.correction is not None and self.correction.kind == "truncate":
            raise ManifestError(
                "the ratio of the loss is already the importance weight, which would count twice",
                where="spec.algorithm.correction.kind",
                hint="Set kind: mask, or algorithm.old: recompute",
            )

    @property
    def diverges(self) -> bool:
        """True if the loss has a KL term."""
        return self.kl > 0 and not self.penalised

    @property
    def compares(self) -> bool:
        """True if the loss of a token needs its log-prob under θ_0."""
        return self.diverges or self.algorithm.reference

    @property
    def references(self) -> bool:
        """True if a step needs log-probs under θ_0, for the loss or for the rewards."""
        return self.kl > 0 or self.algorithm.reference

    def after(self, metrics: Mapping[str, float]) -> Loss:
        """Return the loss of the next step, with the KL weight adapted by the metrics of the previous step."""
        kl = metrics.get("penalty_kl" if self.penalised else "kl")
        if self.target is None or kl is None:
            return self
        return replace(self, kl=self.target.adapted(self.kl, kl=kl))

    def silent(self, advantages: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Return whether the gradient of each sample is exactly 0, bool[n], for ``advantages`` [n].

        If each token has its own advantage, ``advantages`` is the largest absolute value of the sample.
        """
        only_policy = not self.diverges and self.entropy == 0
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
        sequences: Tensor | None = None,
        pairs: Tensor | None = None,
    ) -> TokenLoss:
        """Return the loss of N tokens that count, each argument [N]: log-probs of policy, engine and reference.

        before: log-probs of the old policy, None if it is the policy itself (``recompute`` before the first update of a
        step, ``lagged`` if there are no older weights). sequences, pairs: see ``Tokens``; without ``sequences``, all
        tokens belong to one response.

        ``advantages``: advantage of each token, or of its sample. ``reference`` may be None unless ``compares``.
        ``entropy`` of the policy's distribution at each token may be None if its weight is 0.
        """
        own = logprobs.detach()
        old = behaviour if self.old == "behaviour" else own if before is None else before
        sequences = own.new_zeros(len(own)).long() if sequences is None else sequences
        policy = self.algorithm.policy(
            Tokens(logprobs, old, advantages, sequences, reference=reference, pairs=pairs), self.clip
        )
        self._check(policy, len(logprobs))
        total, divergence, correction = policy.loss, None, None
        if self.correction is not None:
            weighed = own if self.old == "behaviour" else old
            correction = self.correction.terms(weighed, behaviour, sequences=sequences)
            if self.old == "behaviour":
                within = ~(correction.above | correction.below)
                correction = correction._replace(weight=within.to(total.dtype))
            total = total * correction.weight
        if reference is not None and self.diverges:
            divergence = kl_penalty(logprobs, reference, self.kl_name)
            total = total + self.kl * divergence
        if entropy is not None:
            total = total - self.entropy * entropy
        return TokenLoss(total, policy, divergence, correction)

    def _check(self, policy: object, count: int) -> None:
        """Raise ManifestError unless the algorithm returned the terms of ``count`` tokens.

        A loss of another shape could be broadcast silently: the mean over all tokens would be another objective.
        """
        if not isinstance(policy, PolicyTerms):
            found = f"an object of the type {type(policy).__name__}"
        elif wrong := [name for name in _OF_TOKENS if getattr(policy, name).shape != (count,)]:
            found = f"{wrong[0]} of the shape {tuple(getattr(policy, wrong[0]).shape)}"
        else:
            return
        what = f"{type(self.algorithm).__name__}.policy returned {found} for {count} tokens"
        hint = "Return PolicyTerms with one value for each token; AsyncFlow computes the mean"
        raise ManifestError(what, where=NAME, hint=hint)
