"""Per-token estimators of KL(policy || reference) that can be put into a loss (Schulman, "kl approx").

Invariant: every estimator is 0, with gradient 0 in value k2, k3 and k3+, where policy and reference agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from asyncflow.algorithms.losses import MAX_LOG_RATIO
from asyncflow.errors import ManifestError

if TYPE_CHECKING:
    from torch import Tensor

KlName = Literal["k1", "k2", "k3", "k3+"]


def kl_penalty(logprobs: Tensor, reference: Tensor, name: KlName) -> Tensor:
    """Return one estimate per token, [N], of KL(policy || reference) from log-probs of the sampled tokens, [N] each.

    ``k1`` = lp - ref: unbiased value, but its gradient as a loss has mean zero, so it teaches nothing; ``k2`` = (lp -
    ref)^2 / 2: the right gradient on-policy; ``k3`` = exp(ref - lp) - (ref - lp) - 1: unbiased and never negative;
    ``k3+``: the value of k3 with the gradient of k2. Raises ManifestError for another name.
    """
    if name not in get_args(KlName):
        raise ManifestError(
            f"unknown KL estimator {name!r}",
            where="spec.algorithm.kl",
            hint=f"Use one of {', '.join(get_args(KlName))}.",
        )
    distance = logprobs - reference
    if name == "k1":
        return distance
    k2 = 0.5 * distance.square()
    if name == "k2":
        return k2
    k3 = (-distance).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() + distance - 1
    return k3 if name == "k3" else k3.detach() + k2 - k2.detach()
