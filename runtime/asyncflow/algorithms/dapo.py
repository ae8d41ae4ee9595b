"""DAPO: decoupled clip and dynamic sampling policy optimization (arXiv 2503.14476): GRPO with four changes.

* clip-higher: ``clip.high`` above ``clip.low`` (.28 and .2);
* dynamic sampling: groups of equal rewards are dropped and replaced by newly generated groups
  (``filterZeroVariance: drop``, at most ``maxFilteredBatches``);
* token-level loss: the mean over all tokens of the step (``aggregation: token-mean``);
* overlong: the reward of responses near the limit is reduced (``overlong``), and truncated ones may be excluded.

    loss_t = max(-A r_t, -A clip(r_t, 1 - low, 1 + high)),  A = (R + penalty - mean) / (std + 1e-6) within the group

Invariants: groups are filtered by the rewards before the penalty, because the penalty would add variance. An excluded
response still counts in the comparison with the rest of its group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Final

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from asyncflow.algorithms.base import OPTIONS, Algorithm, Group, field_problem
from asyncflow.algorithms.overlong import overlong_penalty
from asyncflow.api.check import Problem
from asyncflow.api.job import RLJobSpec
from asyncflow.errors import ManifestError

FILTERED_OVERLONG: Final = "filtered: overlong"


class DapoOptions(Struct, frozen=True, kw_only=True):
    """The options of the algorithm ``dapo``.

    overlong_buffer: tokens before ``sampling.maxTokens`` over which the reward falls, 0 for no penalty;
    overlong_penalty: reduction of the reward of a response of maximum length; overlong_filter: exclude truncated
    responses from the loss; dynamic_sampling: false gives the recipe without it, as in verl's asynchronous recipe.
    """

    overlong_buffer: Annotated[int, Meta(ge=0)] = 0
    overlong_penalty: Annotated[float, Meta(gt=0)] = 1.0
    overlong_filter: bool = False
    dynamic_sampling: bool = True


class Dapo(Algorithm[DapoOptions]):
    """GRPO with the settings that DAPO requires, and with handling of overlong responses."""

    Options = DapoOptions
    filters = True

    def problems(self, spec: RLJobSpec) -> Iterator[Problem]:
        """Yield the fields that differ from DAPO's. Raises ManifestError if the buffer is longer than a response."""
        yield from super().problems(spec)
        algorithm = spec.algorithm
        if algorithm.clip.high <= algorithm.clip.low:
            yield field_problem(
                spec, "algorithm.clip.high", "dapo clips higher above than below", "Set e.g. low: 0.2, high: 0.28"
            )
        if algorithm.aggregation != "token-mean":
            yield field_problem(
                spec, "algorithm.aggregation", "dapo averages over tokens", "Set aggregation: token-mean"
            )
        if self.options.dynamic_sampling and algorithm.filter_zero_variance != "drop":
            why = "dapo samples dynamically: groups whose rewards are all equal are replaced"
            yield field_problem(
                spec, "algorithm.filter_zero_variance", why, "Set it to drop, or options.dynamic_sampling: false"
            )
        if (buffer := self.options.overlong_buffer) > self.longest:
            what = f"overlong_buffer is {buffer}, and a response has at most {self.longest} tokens"
            raise ManifestError(what, where=OPTIONS, hint="Set overlong_buffer to at most sampling.maxTokens")

    def shaped(self, group: Group) -> NDArray[np.float64]:
        """Return the rewards with the length penalty added."""
        options = self.options
        if not options.overlong_buffer:
            return group.rewards
        return group.rewards + overlong_penalty(
            group.lengths, longest=self.longest, buffer=options.overlong_buffer, factor=options.overlong_penalty
        )

    def excluded(self, group: Group) -> Mapping[int, str]:
        """Return the truncated responses if ``overlong_filter`` is set."""
        cut = np.flatnonzero(group.cut) if self.options.overlong_filter else ()
        return dict.fromkeys(map(int, cut), FILTERED_OVERLONG)
