"""REINFORCE++ (arXiv 2501.03262): no critic and no group, advantages normalised over the whole batch.

    G_t = sum over s >= t of discount^(s - t) * r_s        r_s = -penalty_s, and the reward R at the last token
    A_t = (G_t - mean) / (std + 1e-8)                      mean and std over all tokens of D_k that count
    loss_t = max(-A r_t, -A clip(r_t, 1 - low, 1 + high))  (r_t: ratio)

penalty_s is the KL of the token from the reference times its coefficient (``kl.place: reward``), otherwise 0. With
``baseline: group`` the mean reward of the prompt's samples is subtracted first (the paper's REINFORCE++-baseline).

Invariants: up to rounding, A depends on the set of samples in D_k, not on their order or their ranks. A needs all of
D_k, so no gradient is computed before. Tokens that the policy did not choose are skipped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from asyncflow.algorithms.base import Algorithm, AllGather, StepSamples, field_problem
from asyncflow.algorithms.whitening import whitened
from asyncflow.api.check import Problem
from asyncflow.api.job import RLJobSpec


class ReinforceOptions(Struct, frozen=True, kw_only=True):
    """The options of the algorithm ``reinforce-plus-plus``.

    discount: factor for each token between a token and a later reward; baseline: ``none``, or ``group``: the mean
    reward of the prompt's samples, which needs at least 2 samples.
    """

    discount: Annotated[float, Meta(ge=0, le=1)] = 1.0
    baseline: Literal["none", "group"] = "none"


class ReinforcePlusPlus(Algorithm[ReinforceOptions]):
    """The clipped policy gradient with batch-normalised returns."""

    Options = ReinforceOptions
    min_samples = 1
    batch_wide = True
    ignores = ("advantage",)

    def problems(self, spec: RLJobSpec) -> Iterator[Problem]:
        """Refuse a group baseline for groups of one sample."""
        yield from super().problems(spec)
        if self.options.baseline == "group" and spec.algorithm.group_size < 2:
            yield field_problem(
                spec,
                "algorithm.group_size",
                "the baseline of a single sample is its own reward",
                "Set groupSize to at least 2",
            )

    def credit(self, step: StepSamples, all_gather: AllGather) -> NDArray[np.float32]:
        """Return the normalised return of each token, 0 for tokens that do not count."""
        rewards = step.rewards
        if self.options.baseline == "group":
            rewards = rewards - group_means(step, all_gather)
        return whitened(self._returns(step, rewards), step.counted, all_gather=all_gather).astype(np.float32)

    def _returns(self, step: StepSamples, rewards: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the return of each counted token, float64[N], computed for all samples in parallel."""
        found, places = np.zeros(len(step.counted)), np.flatnonzero(step.counted)
        of_place = step.of_token[places]
        left = np.bincount(of_place, minlength=len(rewards))
        behind = np.cumsum(left)[of_place] - 1 - np.arange(len(places))  # counted tokens after each in its response
        returns = rewards.copy()
        order = np.argsort(behind, kind="stable")
        bounds = np.searchsorted(behind[order], np.arange(left.max(initial=0) + 1))
        for begin, end in itertools.pairwise(bounds):
            now = order[begin:end]
            returns[of_place[now]] -= step.penalty[places[now]]
            found[places[now]] = returns[of_place[now]]
            returns *= self.options.discount
        return found


def group_means(step: StepSamples, all_gather: AllGather) -> NDArray[np.float64]:
    """Return for each sample the mean reward of its group over all ranks, float64[n]. Collective."""
    table = all_gather(np.column_stack([step.serials, step.samples, step.rewards]).reshape(-1, 3))
    table = table[np.lexsort((table[:, 1], table[:, 0]))]
    serials, index = np.unique(table[:, 0], return_inverse=True)
    means = np.bincount(index, weights=table[:, 2]) / np.maximum(1, np.bincount(index))
    found: NDArray[np.float64] = means[np.searchsorted(serials, step.serials)]
    return found
