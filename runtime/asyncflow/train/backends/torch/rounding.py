"""AdamW on weights that are held in bfloat16, without a float32 copy of them.

Most updates of AdamW are smaller than half of the distance between two neighbours in bfloat16, so rounding to the
nearest would lose them. Stochastic rounding takes one of the two neighbours, each with a probability such that the
expected value is the exact one (arXiv 2010.06192).

Invariant: weights are rounded here only. A step is a function of weights, moments, gradient, seed and the step's
number, so no random state has to be saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.adamw import adamw

_CHUNK = 1 << 24
"""Numbers of a parameter that are held in float32 at once."""
_DROPPED_BITS = 16
"""Bits of a float32 behind those of the bfloat16 with the same exponent."""


class StochasticAdamW(torch.optim.AdamW):  # type: ignore[misc]  # mypy does not read torch
    """``torch.optim.AdamW`` whose parameters may be bfloat16: they are updated in float32 and rounded stochastically.

    Gradients and moments are float32. seed: numbers of which, with the step's number, the random bits are a function;
    different on ranks that hold different pieces of a model.
    """

    def __init__(self, groups: list[dict[str, Any]], *, seed: tuple[int, ...], **settings: Any) -> None:
        super().__init__(groups, **settings)
        self._seed = seed

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self) -> None:
        """Update all parameters once. Waits for the device, to read the step's number."""
        generator: torch.Generator | None = None
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if generator is None:
                    generator = _generator((*self._seed, int(state["step"])), device=parameter.device)
                _update(parameter, state, group, generator)


def round_stochastically(exact: Tensor, generator: torch.Generator) -> Tensor:
    """Return float32 ``exact`` in bfloat16, each number as one of its two neighbours; infinities and NaN are kept.

    Random bits are added behind the bits that are kept, which are then cut off: a carry rounds away from 0, and is as
    probable as the exact number is near to the neighbour there.
    """
    bits = torch.randint(
        1 << _DROPPED_BITS, exact.shape, generator=generator, dtype=torch.int32, device=exact.device
    ).add_(exact.view(torch.int32))
    cut = bits.bitwise_and_(-1 << _DROPPED_BITS).view(torch.float32)
    return torch.where(exact.isfinite(), cut, exact).bfloat16()


def _generator(seed: tuple[int, ...], *, device: torch.device) -> torch.Generator:
    mixed = np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]
    return torch.Generator(device).manual_seed(int(mixed))


def _update(
    parameter: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any], generator: torch.Generator
) -> None:
    """Update ``parameter`` and its ``state``, a chunk at a time, since AdamW treats each number by itself."""
    tensors = parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]
    for weights, gradient, first, second in zip(*(t.view(-1).split(_CHUNK) for t in tensors), strict=True):
        exact = weights.float()
        adamw(
            [exact],
            [gradient],
            [first],
            [second],
            [],
            [state["step"].clone()],  # it is counted up for each chunk
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        if weights.dtype == torch.bfloat16:
            weights.copy_(round_stochastically(exact, generator))
    state["step"].add_(1)
