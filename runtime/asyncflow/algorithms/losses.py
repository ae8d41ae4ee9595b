"""Losses per token: the clipped policy gradient, and estimators of KL(policy || reference) (Schulman, "kl approx").

Invariants: this module neither sums nor averages; a token's loss depends on that token alone. A token whose advantage
is exactly 0 has loss and gradient of exactly 0, whatever its ratio. Every KL estimator is 0 if policy and reference
agree, and so is the gradient of k2, k3 and k3+.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from asyncflow.errors import ManifestError

if TYPE_CHECKING:
    from torch import Tensor


MAX_LOG_RATIO = 20.0
"""Bound of |log ratio| before exp, so that an extreme token gives a large finite number instead of infinity."""


@dataclass(frozen=True, kw_only=True)
class Clip:
    """Bounds of the probability ratio, [1 - low, 1 + high]; no gradient moves a ratio beyond them further out.

    ``high`` above ``low`` is DAPO's clip-higher (arXiv 2503.14476); ``dual`` is the bound c > 1 of dual-clip PPO
    for negative advantages (arXiv 1912.09729), None for no bound.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.low < 1 and self.high >= 0):
            raise ManifestError(
                f"clip low={self.low}, high={self.high}",
                where="spec.algorithm.clip",
                hint="Set 0 <= low < 1 and high >= 0",
            )
        if self.dual is not None and self.dual <= 1:
            raise ManifestError(
                f"dual clip {self.dual}",
                where="spec.algorithm.clip.dual",
                hint="Set a number above 1, or leave it out",
            )


class PolicyTerms(NamedTuple):
    """The policy loss of N tokens, each [N]: loss and ratio are float, the next three bool.

    figures: other values that the algorithm measures, constants, by the names that it declares.
    """

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    clipped_dual: Tensor
    figures: Mapping[str, Tensor] = MappingProxyType({})


def ppo_clip(logprobs: Tensor, old: Tensor, advantages: Tensor, clip: Clip) -> PolicyTerms:
    """Return max(-A r, -A clip(r)), r = exp(logprobs - old), for tensors [N]; ``old`` and ``advantages`` are constants.

    With ``clip.dual`` = c, the loss of a token of negative advantage is at most -A c.
    """
    return clipped_loss((logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), advantages, clip)


def clipped_loss(ratio: Tensor, advantages: Tensor, clip: Clip) -> PolicyTerms:
    """Return max(-A r, -A clip(r)) as ``ppo_clip`` does, for any ratios [N]; they carry the gradient."""
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip.low, 1 + clip.high)
    loss = free.maximum(bounded)
    clipped = bounded > free
    dual = clipped & False
    if clip.dual is not None:
        ceiling = -advantages * clip.dual
        dual = (advantages < 0) & (loss > ceiling)
        loss = loss.where(~dual, ceiling)
    return PolicyTerms(loss, ratio.detach(), clipped & (advantages < 0), clipped & (advantages > 0), dual)


KlName = Literal["k1", "k2", "k3", "k3+"]
_MOST_ERROR = 0.2


@dataclass(frozen=True, kw_only=True)
class KlTarget:
    """Target KL, a mean over tokens, and the number of steps to adapt in (Ziegler et al., arXiv 1909.08593, sec. 2.2).

    The coefficient is a function of its initial value and of the KL of all steps, so a resumed run has the same one.
    """

    value: float
    horizon: float

    def adapted(self, coefficient: float, *, kl: float) -> float:
        """Return the coefficient after a step with the KL ``kl``: higher if ``kl`` is above ``value``."""
        error = min(max(kl / self.value - 1, -_MOST_ERROR), _MOST_ERROR)
        return coefficient * (1 + error / self.horizon)


def kl_penalty(logprobs: Tensor, reference: Tensor, name: KlName) -> Tensor:
    """Return one estimate per token, [N], of KL(policy || reference) from log-probs of the sampled tokens, [N] each.

    ``k1`` = lp - ref: unbiased, but its gradient as a loss has mean zero, so the model learns nothing from it; ``k2`` =
    (lp - ref)^2 / 2: has the right gradient on-policy; ``k3`` = exp(ref - lp) - (ref - lp) - 1: unbiased and never
    negative; ``k3+``: the value of k3 with the gradient of k2. Raises ManifestError for another name.
    """
    if name not in get_args(KlName):
        raise ManifestError(
            f"unknown KL estimator {name!r}",
            where="spec.algorithm.kl",
            hint=f"Use one of {', '.join(get_args(KlName))}",
        )
    distance = logprobs - reference
    if name == "k1":
        return distance
    k2 = 0.5 * distance.square()
    if name == "k2":
        return k2
    k3 = (-distance).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() + distance - 1
    return k3 if name == "k3" else k3.detach() + k2 - k2.detach()
