"""DPO: direct preference optimization (arXiv 2305.18290), online: each group is divided into pairs by reward.

    h(y) = sum over the tokens of y of (log π(t) - log π_0(t))
    loss = -log sigmoid( beta * (h(chosen) - h(rejected)) )           of each pair; mean over all pairs

The n-th pair of a group is its n-th best and its n-th worst sample, if the best has the larger reward. The chosen
sample has the advantage +n and the rejected one -n; all other samples are excluded. Each token of a pair has its pair's
loss divided by the number of tokens of its response. So the mean over responses of the sum over tokens
(``seq-mean-token-sum``) is the mean over pairs.

Invariants: both samples of a pair are in one pack, so their loss is exact however a step is streamed and split. h is a
sum over many tokens, so it is computed in float64. The loss does not use the behaviour policy, so samples may be as old
as the schedule permits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Final

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from asyncflow.algorithms.base import Algorithm, Group, Tokens, field_problem
from asyncflow.algorithms.losses import MAX_LOG_RATIO, Clip, PolicyTerms
from asyncflow.api.check import Problem
from asyncflow.api.job import RLJobSpec

if TYPE_CHECKING:
    from torch import Tensor

FILTERED_UNPAIRED: Final = "filtered: not in a pair"


class DpoOptions(Struct, frozen=True, kw_only=True):
    """The options of the algorithms ``dpo`` and ``ipo``.

    beta: penalty for leaving the reference: the smaller, the further the policy may move; pairs: most pairs of a group.
    """

    beta: Annotated[float, Meta(gt=0)] = 0.1
    pairs: Annotated[int, Meta(ge=1)] = 1


class Dpo(Algorithm[DpoOptions]):
    """The DPO loss of pairs."""

    Options = DpoOptions
    filters = True
    reference = True
    pairs = True
    ignores = ("advantage", "clip")
    figures = ("pair_accuracy", "pair_margin")

    def problems(self, spec: RLJobSpec) -> Iterator[Problem]:
        """Yield the fields that conflict with a loss of pairs."""
        yield from super().problems(spec)
        name, algorithm = spec.algorithm.name, spec.algorithm
        if algorithm.aggregation != "seq-mean-token-sum":
            why = f"{name} averages over pairs, so over responses, and sums over tokens"
            yield field_problem(spec, "algorithm.aggregation", why, "Set aggregation: seq-mean-token-sum")
        if algorithm.filter_zero_variance != "drop":
            why = f"samples of equal reward form no pair, and {name} learns only from pairs"
            yield field_problem(spec, "algorithm.filter_zero_variance", why, "Set filterZeroVariance: drop")
        if algorithm.correction is not None:
            why = f"{name} has no ratio to the behaviour policy that could be corrected"
            yield field_problem(spec, "algorithm.correction", why, "Leave it out")
        if algorithm.old != "behaviour":
            yield field_problem(
                spec, "algorithm.old", f"{name} has no old policy", "Set old: behaviour, or leave it out"
            )
        budget, least = spec.trainer.backend.tokens_per_micro_batch, 2 * spec.longest
        if budget is not None and budget < least:
            why = f"a pair of {name} is computed together, and the longest one has {least} tokens"
            yield field_problem(spec, "trainer.backend.tokens_per_micro_batch", why, f"Set at least {least}")

    def excluded(self, group: Group) -> Mapping[int, str]:
        """Return the samples that are not in a pair."""
        paired = self.advantages(group.rewards)
        return dict.fromkeys(np.flatnonzero(paired == 0).tolist(), FILTERED_UNPAIRED)

    def advantages(self, rewards: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return +n for the chosen sample of the n-th pair, -n for the rejected one, and 0 for unpaired samples."""
        order = np.argsort(-rewards, kind="stable")
        found = np.zeros(len(rewards), np.float32)
        for number in range(min(self.options.pairs, len(rewards) // 2)):
            best, worst = order[number], order[-1 - number]
            if rewards[best] > rewards[worst]:
                found[best], found[worst] = number + 1, -number - 1
        return found

    def policy(self, tokens: Tokens, clip: Clip) -> PolicyTerms:  # noqa: ARG002
        """Return for each token the loss of its pair, divided by the number of tokens of its response."""
        lengths = tokens.lengths()
        margin = self._margins(tokens, lengths)
        loss = self.pair_loss(margin)[tokens.pairs].to(tokens.logprobs.dtype) / lengths
        shown = margin.detach()[tokens.pairs].to(loss.dtype)
        ratio = (tokens.logprobs.detach() - tokens.old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        never = tokens.advantages.isnan()
        figures = {"pair_accuracy": (shown > 0).to(loss.dtype), "pair_margin": shown}
        return PolicyTerms(loss, ratio, never, never, never, figures)

    def pair_loss(self, margin: Tensor) -> Tensor:
        """Return the losses [N] of pairs whose h(chosen) - h(rejected) is ``margin`` [N]."""
        return margin.new_zeros(()).logaddexp(-self.options.beta * margin)

    def token_weight(self, lengths: Tensor) -> Tensor:
        """Return the weight of each token in h, [N], from the token counts of the responses."""
        return lengths.new_ones(len(lengths))

    def _margins(self, tokens: Tokens, lengths: Tensor) -> Tensor:
        """Return h(chosen) - h(rejected) of each pair, float64[N]; entries after the last pair are 0."""
        assert tokens.reference is not None
        assert tokens.pairs is not None
        parts = (tokens.logprobs - tokens.reference) * self.token_weight(lengths)
        signed = parts.double() * tokens.advantages.sign()
        return signed.new_zeros(len(signed)).index_add(0, tokens.pairs, signed)
