"""The gradient of a step in one flat buffer, and AdamW on it.

Every parameter's ``grad`` is a view of one float32 buffer: accumulation, the norm and the clipping are one operation
each, and a parameter that no micro-batch reached has gradient 0 instead of none, on every rank alike. Of a model that
is cut over ranks, buffer and moments are of this rank's pieces: AdamW treats each number by itself. Of weights in
bfloat16 the gradient and the moments are float32 too (``rounding``).

Invariant: ``apply`` is a function of (weights, moments, summed gradient, divisor, step, seed); what is copied out of
``state`` and into it again continues bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncflow.train.backends.torch.pieces import Piece, piece_of
from asyncflow.train.backends.torch.rounding import StochasticAdamW
from asyncflow.train.settings import OptimizerSettings


class Applied(NamedTuple):
    """Effect of an optimizer step: norm of the gradient before clipping, learning rate, whether the weights moved."""

    grad_norm: float
    learning_rate: float
    moved: bool


def has_fused_kernel(device: torch.device) -> bool:
    """Return whether torch has AdamW as one kernel for ``device``; for an NPU that is up to torch_npu's version."""
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device.type, "PrivateUse1")
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_adamw_", key))  # noqa: SLF001


class FlatAdamW:
    """AdamW over all trainable parameters of ``model``. seed: of stochastic rounding; of each rank another."""

    def __init__(self, model: nn.Module, settings: OptimizerSettings, *, seed: tuple[int, ...]) -> None:
        self._settings = settings
        named = [(name, p) for name, p in model.named_parameters(remove_duplicate=True) if p.requires_grad]
        pieces = [piece_of(name, parameter) for name, parameter in named]
        self._gradient = torch.zeros(sum(p.tensor.numel() for p in pieces), device=pieces[0].tensor.device)
        views = self._gradient.split([piece.tensor.numel() for piece in pieces])
        self._held: list[tuple[Piece, Tensor]] = []
        for (_, parameter), piece, view in zip(named, pieces, views, strict=True):
            gradient = view.view_as(piece.tensor)
            _set_gradient(parameter, _like(parameter, gradient))
            mine = parameter
            if isinstance(parameter, DTensor):
                mine = nn.Parameter(piece.tensor)
                _set_gradient(mine, gradient)
            self._held.append((piece, mine))
        parameters = [parameter for _, parameter in self._held]
        decay = settings.weight_decay
        rounds = any(p.dtype == torch.bfloat16 for p in parameters)
        self._adam = (partial(StochasticAdamW, seed=seed) if rounds else torch.optim.AdamW)(
            [
                {"params": [p for p in parameters if p.ndim > 1], "weight_decay": decay},
                {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.epsilon,
            fused=has_fused_kernel(self._gradient.device),
        )
        for parameter in parameters:
            self._adam.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, dtype=torch.float32),
                "exp_avg_sq": torch.zeros_like(parameter, dtype=torch.float32),
            }

    @property
    def gradient(self) -> Tensor:
        """The sum accumulated so far, float32[P], unnormalised."""
        return self._gradient

    def clear(self) -> None:
        """Forget the gradient."""
        self._gradient.zero_()

    def apply(self, step: int, *, divisor: float, norm: Callable[[Tensor], float]) -> Applied:
        """Make one step of the accumulated gradient / ``divisor``.

        norm: takes the norm of a vector of which every rank gives its piece. A gradient that is not finite moves
        nothing: the step counts, its samples are spent, the weights stay.
        """
        self._gradient.div_(divisor)
        size = norm(self._gradient)
        rate = self._settings.rate(step)
        moved = size < float("inf")
        if moved:
            limit = self._settings.max_grad_norm
            if limit and size > limit:
                self._gradient.mul_(limit / size)
            for group in self._adam.param_groups:
                group["lr"] = rate
            self._adam.step()
        self.clear()
        return Applied(size, rate, moved)

    def state(self) -> Iterator[Piece]:
        """Yield the moments and step counts, sharing their memory; copying into them restores a state."""
        for piece, parameter in self._held:
            for kind, tensor in self._adam.state[parameter].items():
                yield piece.beside(kind, tensor)


def _set_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Have backward passes add to ``gradient``, which may have more precision than ``parameter``."""
    parameter.grad_dtype = gradient.dtype
    parameter.grad = gradient


def _like(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of ``parameter`` whose numbers on this rank are ``gradient``, sharing its memory."""
    if not isinstance(parameter, DTensor):
        return gradient
    return DTensor.from_local(
        gradient,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
