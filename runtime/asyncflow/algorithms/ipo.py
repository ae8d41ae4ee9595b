"""IPO: identity preference optimization (arXiv 2310.12036): DPO with a loss that bounds the margin of a pair.

    h(y) = mean over the tokens of y of (log π(t) - log π_0(t))
    loss = ( h(chosen) - h(rejected) - 1 / (2 beta) )^2               of each pair; mean over all pairs

The paper's authors recommend the mean over tokens if responses differ in length, and trl uses it.

Invariant: the invariants of ``dpo`` hold; only the margin and the loss of a pair differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow.algorithms.dpo import Dpo

if TYPE_CHECKING:
    from torch import Tensor


class Ipo(Dpo):
    """DPO with a squared loss."""

    def pair_loss(self, margin: Tensor) -> Tensor:
        """Return the squared distance of each margin from the target margin."""
        return (margin - 1 / (2 * self.options.beta)).square()

    def token_weight(self, lengths: Tensor) -> Tensor:
        """Return 1 / n for each token of a response of n tokens."""
        return 1 / lengths
