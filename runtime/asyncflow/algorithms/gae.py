"""Advantages of tokens from a critic's values: generalized advantage estimation (Schulman et al., arXiv 1506.02438).

    δ_t = r_t + γ V(s_{t+1}) - V(s_t)        A_t = Σ_l (γλ)^l δ_{t+l}        return_t = A_t + V(s_t)

t counts the *loss tokens* of a response, which are the tokens that the policy chose. An observation between two of them
is part of the next state, not a step: it causes no discount and has no value, advantage or return. The last loss token
earns the sample's outcome and ends the episode (V = 0 after it). With penalties each token's reward is reduced by its
own penalty.

Invariants: a sample's advantages need its own tokens only, so they do not depend on neighbouring samples. With λ = 1
the returns are the discounted sums of rewards, whatever the values. A token that does not count has exactly 0.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Estimates(NamedTuple):
    """Advantages and returns of N response tokens, float64[N] each, 0 for tokens that do not count."""

    advantages: NDArray[np.float64]
    returns: NDArray[np.float64]


def gae(
    outcomes: NDArray[np.floating],
    values: NDArray[np.floating],
    *,
    lengths: NDArray[np.int64],
    counted: NDArray[np.bool_],
    gamma: float,
    lam: float,
    penalties: NDArray[np.floating] | None = None,
) -> Estimates:
    """Return the estimates of the tokens of n responses in consecutive order, N tokens in total.

    outcomes [n]: reward of each sample; values [N]: the critic's value of the state in which each token was chosen;
    lengths [n]: tokens of each response; counted [N]: whether a token counts in the loss; penalties [N]: subtracted
    from each token's reward, for example a weighted estimate of KL(policy || reference).
    """
    samples = np.repeat(np.arange(len(lengths)), lengths)[counted]
    steps = np.bincount(samples, minlength=len(lengths))
    ends = np.cumsum(steps)
    kept = np.asarray(values, dtype=np.float64)[counted]
    rewards = np.zeros(len(kept)) if penalties is None else -np.asarray(penalties, dtype=np.float64)[counted]
    rewards[ends[steps > 0] - 1] += np.asarray(outcomes, dtype=np.float64)[steps > 0]
    following = np.zeros(len(kept))
    following[:-1] = kept[1:]
    following[ends[steps > 0] - 1] = 0
    advantages = rewards + gamma * following - kept
    longest_first = np.argsort(-steps, kind="stable")
    started = np.searchsorted(-steps[longest_first], -np.arange(2, steps.max(initial=0) + 1), side="right")
    for back, number in enumerate(started.tolist(), start=2):
        at = ends[longest_first[:number]] - back
        advantages[at] += gamma * lam * advantages[at + 1]
    return Estimates(_spread(advantages, counted), _spread(advantages + kept, counted))


def _spread(kept: NDArray[np.float64], counted: NDArray[np.bool_]) -> NDArray[np.float64]:
    every = np.zeros(len(counted))
    every[counted] = kept
    return every
