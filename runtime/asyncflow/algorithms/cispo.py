"""CISPO: clipped importance-sampling policy optimization (MiniMax-M1, arXiv 2506.13585).

    loss_t = -sg[ clip(r_t, 1 - low, 1 + high) ] * A * log π(t),  r_t = π(t) / π_old(t)

sg stops the gradient. The weight of a token is clipped, not its gradient, so tokens that the old policy rarely chose
are still learned. The paper has no lower bound (here ``clip.low: 0.999``), a tuned upper bound, and averages over
tokens.

Invariant: a token whose advantage is not 0 always has a gradient, at most 1 + high times the gradient without a ratio.
"""

from __future__ import annotations

from asyncflow.algorithms.base import Algorithm, Tokens
from asyncflow.algorithms.losses import MAX_LOG_RATIO, Clip, PolicyTerms
from asyncflow.plugins import NoOptions


class Cispo(Algorithm[NoOptions]):
    """REINFORCE with bounded importance weights and GRPO's advantages."""

    ignores = ("clip.dual",)

    def policy(self, tokens: Tokens, clip: Clip) -> PolicyTerms:
        """Return the policy loss of each token; a token counts as clipped if its weight is clipped."""
        own, positive = tokens.logprobs.detach(), tokens.advantages > 0
        ratio = (own - tokens.old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        weight = ratio.clamp(1 - clip.low, 1 + clip.high)
        loss = -weight * tokens.advantages * tokens.logprobs
        nonzero = tokens.advantages != 0
        low, high = nonzero & (ratio < 1 - clip.low), nonzero & (ratio > 1 + clip.high)
        return PolicyTerms(loss, ratio, low, high, positive & False)
