"""Whitening: scale advantages to mean 0 and deviation 1 over all counted tokens of a step, on all ranks.

    A_t -> (A_t - mean) / (std + 1e-8)          std: unbiased

Invariant: up to rounding, the result depends on the set of samples in D_k, not on their order or their ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asyncflow.algorithms.base import AllGather

_STD_FLOOR = 1e-8


def whitened(
    advantages: NDArray[np.float64], counted: NDArray[np.bool_], *, all_gather: AllGather
) -> NDArray[np.float64]:
    """Return this rank's whitened ``advantages`` [N], 0 for tokens that are not ``counted`` [N]. Collective.

    all_gather: concatenates the arrays [m, columns] of all ranks.
    """
    chosen = advantages[counted]
    count, total = all_gather(np.array([[len(chosen), chosen.sum()]])).sum(axis=0)
    mean = total / max(1.0, count)
    squares = all_gather(np.array([[np.square(chosen - mean).sum()]])).sum()
    deviation = np.sqrt(squares / max(1.0, count - 1))
    return np.where(counted, (advantages - mean) / (deviation + _STD_FLOOR), 0.0)
