"""GSPO: group sequence policy optimization (arXiv 2507.18071), GRPO with one ratio for a whole response.

    s = exp( mean over the tokens of the response of (log π(t) - log π_old(t)) )
    s_t = sg[s] * exp(log π(t) - sg[log π(t)])            equal to s; each token contributes its share to the gradient
    loss_t = max(-A s_t, -A clip(s_t, 1 - low, 1 + high))

sg stops the gradient. With ``seq-mean-token-mean`` the gradient is the gradient of the sequence objective, the mean
over responses of min(s A, clip(s) A). A ratio of means is far closer to 1 than a ratio of tokens: the paper clips at
3e-4 below and 4e-4 above.

Invariant: all tokens of a response have the same ratio, so they are clipped together or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncflow.algorithms.base import Algorithm, Tokens, field_problem
from asyncflow.algorithms.losses import MAX_LOG_RATIO, Clip, PolicyTerms, clipped_loss
from asyncflow.api.check import Problem
from asyncflow.api.job import RLJobSpec
from asyncflow.plugins import NoOptions


class Gspo(Algorithm[NoOptions]):
    """GRPO with one ratio per response in place of one per token."""

    def problems(self, spec: RLJobSpec) -> Iterator[Problem]:
        """Require the average over responses."""
        yield from super().problems(spec)
        if spec.algorithm.aggregation != "seq-mean-token-mean":
            why = "gspo averages over responses: each has the same weight, whatever its length"
            yield field_problem(spec, "algorithm.aggregation", why, "Set aggregation: seq-mean-token-mean")

    def policy(self, tokens: Tokens, clip: Clip) -> PolicyTerms:
        """Return the policy loss of each token."""
        own = tokens.logprobs.detach()
        mean = tokens.summed(own - tokens.old) / tokens.lengths()
        ratio = mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() * (tokens.logprobs - own).exp()
        return clipped_loss(ratio, tokens.advantages, clip)
