"""PF-PPO: policy filtration (arXiv 2409.06957): train only some samples of each prompt, selected by rank of reward.

    best-random   the ``keep`` / 2 best, and as many of the other samples at random
    best-worst    the ``keep`` / 2 best, and as many of the worst

A reward is least reliable in the middle of the ranking, so the filter keeps the extremes. The paper chooses the filter
by R² between rewards and ground truth. A kept sample has its advantage within the whole group and GRPO's loss: the mean
of the group is the baseline, in place of the paper's critic.

Invariants: the filter uses the samples of one prompt alone, never the batch, in which rewards of 0 and 1 would make it
keep everything. Samples of equal reward are ranked at random, keyed by seed and prompt, so the selection is a function
of the manifest and the rewards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Final, Literal

import numpy as np
from msgspec import Meta, Struct

from asyncflow.algorithms.base import OPTIONS, Algorithm, Group
from asyncflow.api.check import Problem
from asyncflow.api.job import RLJobSpec
from asyncflow.errors import ManifestError

FILTERED_POLICY: Final = "filtered: policy filtration"


class PfPpoOptions(Struct, frozen=True, kw_only=True):
    """The options of the algorithm ``pf-ppo``.

    filter: selection of the kept samples of a prompt; keep: their number, even and at most ``groupSize``.
    """

    filter: Literal["best-random", "best-worst"] = "best-random"
    keep: Annotated[int, Meta(ge=2, multiple_of=2)] = 2


class PfPpo(Algorithm[PfPpoOptions]):
    """GRPO on a subset of each group."""

    Options = PfPpoOptions
    filters = True

    def problems(self, spec: RLJobSpec) -> Iterator[Problem]:
        """Raise ManifestError if ``keep`` is larger than the group."""
        yield from super().problems(spec)
        if self.options.keep > spec.algorithm.group_size:
            what = f"keep is {self.options.keep}, and a group has {spec.algorithm.group_size} samples"
            raise ManifestError(what, where=OPTIONS, hint="Set keep to an even number of at most groupSize")

    def excluded(self, group: Group) -> Mapping[int, str]:
        """Return all samples that the filter does not keep."""
        rng = np.random.default_rng([self.seed, group.serial, _STREAM])
        ranked = np.lexsort((rng.permutation(len(group.rewards)), -group.rewards))
        half = self.options.keep // 2
        best, others = ranked[:half], ranked[half:]
        if self.options.filter == "best-random":
            others = rng.permutation(others)
        kept = {*best.tolist(), *others[len(others) - half :].tolist()}
        return {i: FILTERED_POLICY for i in range(len(ranked)) if i not in kept}


_STREAM = 0x9F
"""Separates these random numbers from those of ``reward.shuffle``."""
