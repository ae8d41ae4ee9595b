"""Whitening: advantages with mean 0 and deviation 1 over all tokens of a step that count, on all ranks.

    A_t -> (A_t - mean) / (std + 1e-8)          std: the unbiased one

Invariant: a function of the set of samples in D_k, not of their order or of which rank has them, up to rounding.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asyncflow.algorithms.base import Everywhere

_STD_FLOOR = 1e-8


def whitened(
    advantages: NDArray[np.float64], counted: NDArray[np.bool_], *, everywhere: Everywhere
) -> NDArray[np.float64]:
    """Return this rank's ``advantages`` [N] so, 0 where ``counted`` [N] is false; collective.

    everywhere: gathers an array [m, columns] of every rank into one.
    """
    chosen = advantages[counted]
    count, total = everywhere(np.array([[len(chosen), chosen.sum()]])).sum(axis=0)
    mean = total / max(1.0, count)
    squares = everywhere(np.array([[np.square(chosen - mean).sum()]])).sum()
    deviation = np.sqrt(squares / max(1.0, count - 1))
    return np.where(counted, (advantages - mean) / (deviation + _STD_FLOOR), 0.0)
