"""Responses that are too long: a soft punishment before the limit (DAPO, arXiv 2503.14476, equation 13).

    Lc = longest - buffer
    penalty(length) = 0 up to Lc, then linearly down to -factor at ``longest``

Invariant: it shapes rewards only; whether a group teaches anything is decided by what was judged.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def overlong_penalty(lengths: NDArray[np.int64], *, longest: int, buffer: int, factor: float) -> NDArray[np.float64]:
    """Return what is added to the reward of responses of ``lengths`` [n] tokens, float64[n], none above 0."""
    beyond = np.clip(lengths - (longest - buffer), 0, buffer)
    return -factor * beyond / buffer
