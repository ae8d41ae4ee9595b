"""A linear penalty for responses close to the length limit (DAPO, arXiv 2503.14476, equation 13).

    Lc = longest - buffer
    penalty(length) = 0 up to Lc, then linearly down to -factor at ``longest``

Invariant: the penalty only shapes rewards. Groups are filtered by the rewards before shaping.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def overlong_penalty(lengths: NDArray[np.int64], *, longest: int, buffer: int, factor: float) -> NDArray[np.float64]:
    """Return the reward change, at most 0, for responses of ``lengths`` [n] tokens, float64[n]."""
    beyond = np.clip(lengths - (longest - buffer), 0, buffer)
    return -factor * beyond / buffer
