"""Several optimizer updates out of one step: which samples belong to which, and what the step reports of them.

Invariant: a mini-batch holds whole groups, and which ones is a function of the set of groups in D_k alone: not of the
order in which they came, nor of the rank that has them. All ranks make the same number of updates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

TOKENS = "computed_tokens"
COUNTS = ("silent_samples", TOKENS, "packed_tokens")
"""Metrics that add up over the updates of a step."""
TOKEN_MEANS = ("kl", "entropy", "surprise", "ratio", "approx_kl", "clip_low", "clip_high", "clip_dual")
"""Metrics that are means over the computed tokens of an update."""
MEASURED_FIRST = "logprob_gap"
"""Metrics that begin so compare with the weights before the step, which only the first update has."""


def mini_batches(serials: NDArray[np.int64], *, groups: NDArray[np.int64], count: int) -> list[NDArray[np.int64]]:
    """Return the indices of this rank's samples in each mini-batch.

    serials: of this rank's samples, [n]; groups: the serials of D_k on all ranks, in any order, repeated or not; count:
    mini-batches, which are fewer where there are fewer groups. The sizes differ by at most one group.
    """
    known = np.unique(groups)
    count = max(1, min(count, len(known)))
    number = np.searchsorted(known, serials) * count // max(1, len(known))
    return [np.flatnonzero(number == mine) for mine in range(count)]


def combined(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of a step out of those of its updates, at least one.

    ``COUNTS`` are sums, ``TOKEN_MEANS`` means over the tokens of all updates, ``ratio_max`` is the maximum, ``skipped``
    is 1 where no update moved the weights, and what begins with ``MEASURED_FIRST`` is that of the first update.
    Everything else is a mean over the updates that have it.
    """
    first = updates[0]
    if len(updates) == 1:
        return dict(first)
    measured = {name: value for name, value in first.items() if name.startswith(MEASURED_FIRST)}
    others = dict.fromkeys(name for update in updates for name in update if not name.startswith(MEASURED_FIRST))
    return measured | {name: _combined(name, [update for update in updates if name in update]) for name in others}


def _combined(name: str, updates: Sequence[Mapping[str, float]]) -> float:
    values = [update[name] for update in updates]
    if name in COUNTS:
        return sum(values)
    if name == "ratio_max":
        return max(values)
    if name == "skipped":
        return min(values)
    weights = [update[TOKENS] if name in TOKEN_MEANS else 1.0 for update in updates]
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / max(1.0, sum(weights))
