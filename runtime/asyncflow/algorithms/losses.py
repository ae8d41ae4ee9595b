"""The clipped policy gradient, per token.

Invariant: nothing is summed or averaged here; a token's loss depends on that token alone. A token whose advantage is
exactly 0 has loss exactly 0 and gradient exactly 0, whatever its ratio.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from asyncflow.errors import ManifestError

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound of |log ratio| before exp, so that one absurd token gives a large finite number instead of infinity."""


@dataclass(frozen=True, kw_only=True)
class Clip:
    """Bounds of the probability ratio, [1 - low, 1 + high]; no gradient moves a ratio beyond them further out.

    ``high`` above ``low`` is DAPO's clip-higher (arXiv 2503.14476); ``dual`` is the bound c > 1 of dual-clip PPO
    for negative advantages (arXiv 1912.09729), None for none.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.low < 1 and self.high >= 0):
            raise ManifestError(
                f"clip low={self.low}, high={self.high}",
                where="spec.algorithm.clip",
                hint="0 <= low < 1 and high >= 0.",
            )
        if self.dual is not None and self.dual <= 1:
            raise ManifestError(
                f"dual clip {self.dual}",
                where="spec.algorithm.clip.dual",
                hint="Give a number above 1, or leave it out.",
            )


class PolicyTerms(NamedTuple):
    """Terms of the clipped loss for N tokens, each [N]: loss and ratio are float, the others bool."""

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    clipped_dual: Tensor


def ppo_clip(logprobs: Tensor, old: Tensor, advantages: Tensor, clip: Clip) -> PolicyTerms:
    """Return max(-A r, -A clip(r)), r = exp(logprobs - old), for tensors [N]; ``old`` and ``advantages`` are constants.

    With ``clip.dual`` = c, tokens of negative advantage lose at most -A c.
    """
    ratio = (logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
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
