"""PPO: proximal policy optimization with a critic (Schulman et al., arXiv 1707.06347).

    A_t, return_t   generalized advantage estimation with the critic's values before the step (``gae``)
    policy_t  = max(-A_t r_t, -A_t clip(r_t, 1 - low, 1 + high)),  r_t = π(t) / π_old(t)
    value_t   = max((V_t - return_t)², (clip(V_t, V_old,t - ε, V_old,t + ε) - return_t)²) / 2
    critic's loss = Σ_t value_t / loss tokens of the step

Invariants: without ``whiten``, a sample's advantages need its own tokens only, so samples are trained as they arrive.
With ``whiten`` they are scaled by the mean and deviation over all of D_k, so the trainer waits for the whole step.
Values and returns of a step come from the critic before the step, however many updates the step makes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncflow.algorithms.base import Algorithm
from asyncflow.algorithms.gae import Estimates, gae

if TYPE_CHECKING:
    from torch import Tensor


class PpoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the algorithm ``ppo``.

    gamma: discount from one loss token to the next; lam: λ of the advantage estimation, 1 for the return minus the
    value; value_clip: ε, the distance from the value before the step beyond which the loss has no gradient, null for no
    bound; whiten: subtract the step's mean from its advantages, and divide them by their deviation.
    """

    gamma: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    lam: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.95
    value_clip: Annotated[float, msgspec.Meta(gt=0)] | None = 0.2
    whiten: bool = False


class ValueTerms(NamedTuple):
    """Terms of the critic's loss for N tokens: loss, float[N]; clipped: whether the bound leaves no gradient."""

    loss: Tensor
    clipped: Tensor


def value_loss(values: Tensor, old: Tensor, returns: Tensor, *, clip: float | None) -> ValueTerms:
    """Return the loss terms of N tokens from their values, [N]; ``old`` and ``returns`` are constants. clip: ε."""
    free = (values - returns).square()
    if clip is None:
        return ValueTerms(free / 2, free < 0)
    bounded = (values.clamp(old - clip, old + clip) - returns).square()
    return ValueTerms(free.maximum(bounded) / 2, bounded > free)


class Ppo(Algorithm[PpoOptions]):
    """The base's policy loss, with advantages that the trainer computes from a critic's values."""

    Options = PpoOptions
    min_samples = 1
    critic = True
    ignores = ("advantage",)

    def __init__(self, options: PpoOptions | None = None, **settings: Any) -> None:
        super().__init__(options, **settings)
        self.whole_step = self.whole_step or self.options.whiten

    def estimates(
        self,
        outcomes: NDArray[np.floating],
        values: NDArray[np.floating],
        *,
        lengths: NDArray[np.int64],
        counted: NDArray[np.bool_],
        penalties: NDArray[np.floating] | None = None,
    ) -> Estimates:
        """Return advantages and returns of the tokens of n responses; the arguments are those of ``gae``."""
        gamma, lam = self.options.gamma, self.options.lam
        return gae(outcomes, values, lengths=lengths, counted=counted, gamma=gamma, lam=lam, penalties=penalties)
