"""CISPO: clipped importance-sampling policy optimization (MiniMax-M1, arXiv 2506.13585).

    loss_t = -sg[ clip(r_t, 1 - low, 1 + high) ] * A * log π(t),  r_t = π(t) / π_old(t)

sg stops the gradient. The weight of a token is clipped, and not its gradient: rare tokens that the old policy hardly
chose go on being learned. The paper has no bound below (here ``clip.low: 0.999``), a tuned one above, and averages over
tokens.

Invariant: a token whose advantage is not 0 always has a gradient, of at most 1 + high times that without a ratio.
"""

from __future__ import annotations

from asyncflow.algorithms.base import Algorithm, Tokens
from asyncflow.algorithms.losses import MAX_LOG_RATIO, Clip, PolicyTerms
from asyncflow.plugins import NoOptions


class Cispo(Algorithm[NoOptions]):
    """REINFORCE with bounded importance weights and GRPO's advantages."""

    ignores = ("clip.dual",)

    def policy(self, tokens: Tokens, clip: Clip) -> PolicyTerms:
        """Return the policy loss of each token; it counts as clipped where its weight is."""
        own, positive = tokens.logprobs.detach(), tokens.advantages > 0
        ratio = (own - tokens.old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        weight = ratio.clamp(1 - clip.low, 1 + clip.high)
        loss = -weight * tokens.advantages * tokens.logprobs
        some = tokens.advantages != 0
        return PolicyTerms(loss, ratio, some & (ratio < 1 - clip.low), some & (ratio > 1 + clip.high), positive & False)
