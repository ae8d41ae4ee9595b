"""GRPO: group-relative policy optimization (DeepSeekMath, arXiv 2402.03300), and by ``advantage`` Dr. GRPO and RLOO.

    A_i = (R_i - mean R) / (std R + 1e-6)          of the G samples of one prompt (``advantages`` has the others)
    loss_t = max(-A r_t, -A clip(r_t, 1 - low, 1 + high)),  r_t = π(t) / π_old(t)

Invariant: the advantage of a sample is final as soon as its group is complete, and a token's loss needs that token
alone, so samples are trained as they arrive.
"""

from __future__ import annotations

from asyncflow.algorithms.base import Algorithm
from asyncflow.plugins import NoOptions


class Grpo(Algorithm[NoOptions]):
    """The base class as it is."""
