"""The gradient of a step in one flat buffer, and AdamW on it.

Every parameter's ``grad`` is a view of one float32 buffer: accumulation, the sum over ranks, the norm and the
clipping are one operation each, and a parameter that no micro-batch reached has gradient 0 instead of none, on every
rank alike.

Invariant: ``apply`` is a function of (weights, moments, summed gradient, divisor, step); state written by ``state`` and
taken back by ``take`` continues bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from asyncflow.train.settings import OptimizerSettings


class Applied(NamedTuple):
    """What a step did: norm of the gradient before clipping, learning rate, whether the weights moved."""

    grad_norm: float
    learning_rate: float
    moved: bool


def has_fused_kernel(device: torch.device) -> bool:
    """Return whether torch has AdamW as one kernel for ``device``; for an NPU that is up to torch_npu's version."""
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device.type, "PrivateUse1")
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_adamw_", key))  # noqa: SLF001


class FlatAdamW:
    """AdamW over all trainable parameters of ``model``."""

    def __init__(self, model: nn.Module, settings: OptimizerSettings) -> None:
        self._settings = settings
        self._named = [(name, p) for name, p in model.named_parameters(remove_duplicate=True) if p.requires_grad]
        parameters = [parameter for _, parameter in self._named]
        self._gradient = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
        pieces = self._gradient.split([p.numel() for p in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)
        decay = settings.weight_decay
        self._adam = torch.optim.AdamW(
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
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    @property
    def gradient(self) -> Tensor:
        """The sum accumulated so far, float32[P], unnormalised."""
        return self._gradient

    def clear(self) -> None:
        """Forget the gradient."""
        self._gradient.zero_()

    def apply(self, step: int, *, divisor: float, total: Callable[[Tensor], None]) -> Applied:
        """Make one step of the accumulated gradient / ``divisor``; ``total`` sums a tensor over all ranks in place.

        A gradient that is not finite moves nothing: the step counts, its samples are spent, the weights stay.
        """
        total(self._gradient)
        self._gradient.div_(divisor)
        norm = float(torch.linalg.vector_norm(self._gradient))
        rate = self._settings.rate(step)
        moved = norm < float("inf")
        if moved:
            limit = self._settings.max_grad_norm
            if limit and norm > limit:
                self._gradient.mul_(limit / norm)
            for group in self._adam.param_groups:
                group["lr"] = rate
            self._adam.step()
        self.clear()
        return Applied(norm, rate, moved)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Give the moments and step counts by name, as views; copying into them restores a state."""
        for name, parameter in self._named:
            for part, tensor in self._adam.state[parameter].items():
                yield f"{part}/{name}", tensor

    def take(self, stored: Mapping[str, Tensor]) -> None:
        """Copy ``stored``, with the names of ``state``, into the optimizer. Raises KeyError where one is missing."""
        for name, tensor in self.state():
            tensor.copy_(stored[name])
