"""Filter of groups that teach nothing: they are taken out before they reach the trainer (dynamic sampling).

Invariant: a filter looks at the raw metric of the task, never at a shaped reward, since a length penalty would fake
variance where there is none.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def zero_variance(metric: NDArray[np.floating]) -> bool:
    """Return whether all samples of a group, metric [G], did equally well, so that every advantage is 0."""
    return not np.ptp(np.asarray(metric, dtype=np.float64))
