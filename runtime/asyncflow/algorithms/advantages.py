"""Advantages out of the rewards of one group, and groups that teach nothing.

Invariants: only the group's own rewards enter, so an advantage is final as soon as its group is complete; a group
whose rewards are all equal gets exactly 0, never a rounding error divided by a small number; a group is filtered by
the raw metric of the task, never by a shaped reward, since a length penalty would fake variance where there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from asyncflow.errors import AsyncFlowError, ManifestError

AdvantageName = Literal["grpo", "dr-grpo", "rloo"]

_STD_FLOOR = 1e-6


def group_advantages(rewards: NDArray[np.floating], *, name: AdvantageName = "grpo") -> NDArray[np.float32]:
    """Return one advantage for each reward of a group, float32[G] for rewards [G].

    ``grpo``: (R - mean) / (std + 1e-6) with the unbiased std (DeepSeekMath, arXiv 2402.03300); ``dr-grpo``: R - mean
    (arXiv 2503.20783); ``rloo``: R minus the mean of the others = G/(G-1) (R - mean) (arXiv 2402.14740).
    Raises ManifestError for a group of one or an unknown name, AsyncFlowError for a reward that is not finite.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or values.size < 2:
        raise ManifestError(
            f"a group of shape {values.shape} has no sibling to be compared with",
            where="spec.algorithm.groupSize",
            hint="Use a group size of at least 2.",
        )
    if not np.isfinite(values).all():
        raise AsyncFlowError(
            f"rewards {values.tolist()} are not all finite",
            where="advantage",
            hint="Make the reward function return finite numbers.",
        )
    if name not in get_args(AdvantageName):
        raise ManifestError(
            f"unknown advantage {name!r}",
            where="spec.algorithm",
            hint=f"Use one of {', '.join(get_args(AdvantageName))}.",
        )
    if not np.ptp(values):
        return np.zeros(values.size, dtype=np.float32)
    centred: NDArray[np.float64] = values - values.mean()
    if name == "grpo":
        centred /= values.std(ddof=1) + _STD_FLOOR
    elif name == "rloo":
        centred *= values.size / (values.size - 1)
    return centred.astype(np.float32)


def turn_advantages(
    rewards: Sequence[NDArray[np.floating]], *, compare: Callable[[NDArray[np.float64]], NDArray[np.float32]]
) -> list[NDArray[np.float32]]:
    """Return the advantages of the turns of each sample of a group, out of the rewards of its turns, [turns] each.

    A turn has earned what it and all later turns were given. ``compare`` makes advantages of what was earned from the
    first, second, ... turn on by those samples that have it (several ``group_advantages``); a turn that no other sample
    has gets 0. Where only last turns are rewarded, and all samples have as many, it is the advantage of the sample.
    """
    earned = [np.cumsum(np.asarray(each, dtype=np.float64)[::-1])[::-1] for each in rewards]
    found = [np.zeros(len(each), dtype=np.float32) for each in earned]
    for turn in range(max(map(len, earned), default=0)):
        there = [sample for sample, each in enumerate(earned) if len(each) > turn]
        if len(there) > 1:
            compared = compare(np.array([earned[sample][turn] for sample in there]))
            for sample, advantage in zip(there, compared, strict=True):
                found[sample][turn] = advantage
    return found


def zero_variance(metric: NDArray[np.floating]) -> bool:
    """Return whether the samples of a group, metric [G], are several and all did equally well."""
    return len(metric) > 1 and not np.ptp(np.asarray(metric, dtype=np.float64))
