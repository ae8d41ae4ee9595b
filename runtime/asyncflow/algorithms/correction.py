"""Correction of the loss for samples whose behaviour policy is not the old policy: bounded importance weights.

    ρ_t = π_old(t) / μ(t)                     for token t; μ: the behaviour policy (the engine's log-probs)

    level  token      ratio_t = ρ_t
           sequence   ratio_t = product of ρ_s over the n loss tokens s of the response of t
           geometric  ratio_t = that product ^ (1 / n)
    kind   truncate   weight_t = ratio_t, at least ``low`` and at most ``high``
           mask       weight_t = ratio_t if low <= ratio_t <= high, otherwise 0

The weight is a constant factor of the token's policy loss. If the trainer computes the old policy itself, this is the
decoupled objective, weight_t * clip(π/π_old, A) (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298). If the
behaviour policy is the old policy, the ratio of the loss already is the importance weight, and a second factor would
count it twice. Then ρ_t is the ratio of the policy, π(t) / μ(t), and tokens are only masked, with weight 1 or 0 (verl's
bypass mode with ``ppo_clip``: rejection without weights).

``truncate`` at level token with low 0 is truncated importance sampling (Ionides 2008; verl's ``rollout_is``), ``mask``
is masked importance sampling (IcePop; verl's ``rollout_is_threshold: low_high``), ``geometric`` is the ratio of AReaL's
sequence level. Unlike in verl's rejection, a masked token stays in the divisor of the loss, as in AReaL: masking makes
the gradient smaller and does not increase the weight of the other tokens.

Invariants: products are computed as sums of log-probs, bounded before exp. A weight lies within the bounds, or is 0 if
masked. If both policies agree on a response, its weights are exactly 1. The weights of a response need only its own
tokens, all of which are in one pack, so layout and micro-batches change them only by rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from asyncflow.algorithms.losses import MAX_LOG_RATIO
from asyncflow.errors import ManifestError

if TYPE_CHECKING:
    from torch import Tensor


class CorrectionTerms(NamedTuple):
    """Terms for N tokens, each [N].

    weight: factor of the policy loss; above, below: whether the ratio is above ``high`` or below ``low``, bool; unit:
    the token's share of its unit, which is a token or a response, so that a sum weighted by it is a sum over units; k1,
    k3: the estimates -log ρ and ρ - 1 - log ρ of KL(μ || π_old) at each token (Schulman, "kl approx").
    """

    weight: Tensor
    above: Tensor
    below: Tensor
    unit: Tensor
    k1: Tensor
    k3: Tensor


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Weights of one kind and level, with bounds 0 <= low <= 1 <= high, so that a ratio of 1 is not changed."""

    kind: Literal["truncate", "mask"] = "truncate"
    level: Literal["token", "sequence", "geometric"] = "token"
    low: float = 0.0
    high: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.low <= 1 <= self.high:
            raise ManifestError(
                f"bounds low={self.low}, high={self.high} of importance weights",
                where="spec.algorithm.correction",
                hint="Set 0 <= low <= 1 <= high, since a sample of the old policy itself has the weight 1",
            )

    def terms(self, old: Tensor, behaviour: Tensor, *, sequences: Tensor) -> CorrectionTerms:
        """Return the terms of N tokens that count in the loss, from their log-probs, constants of shape [N].

        sequences [N]: number of the token's response, int64, each below N.
        """
        distance = old - behaviour
        unit, exponent = distance.new_ones(len(distance)), distance
        if self.level != "token":
            lengths = _summed(unit, sequences)
            unit, exponent = 1 / lengths, _summed(distance, sequences)
            if self.level == "geometric":
                exponent = exponent / lengths
        ratio = exponent.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        above, below = ratio > self.high, ratio < self.low
        weight = ratio.clamp(self.low, self.high)
        if self.kind == "mask":
            weight = ratio.where(~(above | below), 0.0)
        k3 = distance.clamp(max=MAX_LOG_RATIO).exp() - 1 - distance
        return CorrectionTerms(weight, above, below, unit, -distance, k3)


def effective_share(*, units: float, weights: float, squares: float) -> float:
    """Return the effective sample size of n weights as a share of n: (Σw)² / (n Σw²), 0 if all are 0 (Kong 1992).

    units: n; weights: Σw; squares: Σw².
    """
    return weights * weights / (units * squares) if squares else 0.0


def _summed(values: Tensor, sequences: Tensor) -> Tensor:
    """Return for each token the sum of ``values`` over its response, [N]."""
    return values.new_zeros(len(values)).index_add(0, sequences, values)[sequences]
