"""Advantages from the rewards of one group, and detection of groups without a training signal.

Invariants: an advantage depends only on its own group's rewards, so it is final as soon as the group is complete. A
group of equal rewards has advantages of exactly 0, never a rounding error divided by a small number. A group is
filtered by the rewards before shaping, because a length penalty would add variance to a group that has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from asyncflow.errors import AsyncFlowError, ManifestError

AdvantageName = Literal["grpo", "dr-grpo", "rloo"]

_STD_FLOOR = 1e-6
_DECIMALS = 12
"""Decimals of a return, so that returns that differ only by rounding errors are equal."""


def group_advantages(rewards: NDArray[np.floating], *, name: AdvantageName = "grpo") -> NDArray[np.float32]:
    """Return one advantage for each reward of a group, float32[G] for rewards [G].

    ``grpo``: (R - mean) / (std + 1e-6) with the unbiased std (DeepSeekMath, arXiv 2402.03300); ``dr-grpo``: R - mean
    (arXiv 2503.20783); ``rloo``: R minus the mean of the other rewards = G/(G-1) (R - mean) (arXiv 2402.14740).
    Raises ManifestError for a group of one or an unknown name, AsyncFlowError for a reward that is not finite.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or values.size < 2:
        raise ManifestError(
            f"a group of shape {values.shape} has no sibling to compare with",
            where="spec.algorithm.groupSize",
            hint="Set groupSize to at least 2",
        )
    if not np.isfinite(values).all():
        raise AsyncFlowError(
            f"rewards {values.tolist()} are not all finite",
            where="advantage",
            hint="Make the reward function return finite numbers",
        )
    if name not in get_args(AdvantageName):
        raise ManifestError(
            f"unknown advantage {name!r}",
            where="spec.algorithm",
            hint=f"Use one of {', '.join(get_args(AdvantageName))}",
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
    """Return the advantages of each sample's turns, from the rewards of its turns, [turns] each.

    The return of a turn is the sum of its own reward and the rewards of all later turns. ``compare`` computes the
    advantages of the n-th turns from the returns of all samples that have an n-th turn (usually ``group_advantages``).
    A turn that only one sample has gets 0. If only last turns have rewards and all samples have the same number of
    turns, each turn has the advantage of its sample.
    """
    returns = [np.cumsum(np.asarray(each, dtype=np.float64)[::-1])[::-1].round(_DECIMALS) for each in rewards]
    found = [np.zeros(len(each), dtype=np.float32) for each in returns]
    for turn in range(max(map(len, returns), default=0)):
        samples = [sample for sample, each in enumerate(returns) if len(each) > turn]
        if len(samples) > 1:
            compared = compare(np.array([returns[sample][turn] for sample in samples]))
            for sample, advantage in zip(samples, compared, strict=True):
                found[sample][turn] = advantage
    return found


def zero_variance(metric: NDArray[np.floating]) -> bool:
    """Return whether a group has more than one sample and all values of ``metric`` [G] are equal."""
    return len(metric) > 1 and not np.ptp(np.asarray(metric, dtype=np.float64))
