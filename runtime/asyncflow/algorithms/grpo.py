"""GRPO: group-relative policy optimization (DeepSeekMath, arXiv 2402.03300); ``advantage`` selects Dr. GRPO or RLOO.

    A_i = (R_i - mean R) / (std R + 1e-6)          over the G samples of one prompt (other formulas in ``advantages``)
    loss_t = max(-A r_t, -A clip(r_t, 1 - low, 1 + high)),  r_t = π(t) / π_old(t)

Invariant: the advantage of a sample is final as soon as its group is complete, and the loss of a token needs only that
token, so samples are trained as they arrive.
"""

from __future__ import annotations

from asyncflow.algorithms.base import Algorithm
from asyncflow.plugins import NoOptions


class Grpo(Algorithm[NoOptions]):
    """GRPO, which is the base class unchanged."""
