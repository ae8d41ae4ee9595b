"""The gradient of a step in one flat buffer, AdamW, and stochastic rounding of weights in bfloat16.

The ``grad`` of every parameter is a view of one float32 buffer. So accumulation, norm and clipping are one operation
each, and a parameter that no micro-batch reached has gradient 0 instead of none, on every rank. If the model is sharded
over ranks, buffer and moments belong to this rank's shards, because AdamW is an elementwise operation.

For weights in bfloat16, gradient and moments are float32 too, and there is no float32 copy of the weights. Most updates
of AdamW are smaller than half of the distance between neighbours in bfloat16, so rounding to nearest would lose them.
Stochastic rounding selects one of the two neighbours, with probabilities such that the expected value is the exact
value (arXiv 2010.06192).

Invariants: ``move`` is a function of (weights, moments, gradient, step, seed), so no random state is saved. Training
continues bit for bit if the tensors of ``state`` are saved and restored. Only this module rounds weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from asyncflow.training.settings import OptimizerSettings
from asyncflow.training.torch.shards import TensorShard, tensor_shard

_CHUNK = 1 << 24
"""Number of elements of a parameter that are held in float32 at the same time."""
_DROPPED_BITS = 16
"""Bits that float32 has more than bfloat16, which has the same exponent."""


class StochasticAdamW(torch.optim.AdamW):  # type: ignore[misc]  # mypy does not read torch
    """``torch.optim.AdamW`` whose parameters may be bfloat16: they are updated in float32 and rounded stochastically.

    Gradients and moments are float32. seed: determines the random bits together with the step's number; ranks with
    different shards of a model have different seeds.
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
    """Return float32 ``exact`` in bfloat16, each element as one of its two neighbours; infinities and NaN are kept.

    Random bits are added to the bits that bfloat16 lacks, which are then dropped. A carry rounds away from 0; its
    probability is the distance of the exact value from the neighbour towards 0, relative to the neighbours' distance.
    """
    bits = torch.randint(
        1 << _DROPPED_BITS, exact.shape, generator=generator, dtype=torch.int32, device=exact.device
    ).add_(exact.view(torch.int32))
    truncated = bits.bitwise_and_(-1 << _DROPPED_BITS).view(torch.float32)
    return torch.where(exact.isfinite(), truncated, exact).bfloat16()


def _generator(seed: tuple[int, ...], *, device: torch.device) -> torch.Generator:
    mixed = np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]
    return torch.Generator(device).manual_seed(int(mixed))


def _update(
    parameter: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any], generator: torch.Generator
) -> None:
    """Update ``parameter`` and its ``state`` in chunks, which is exact because AdamW is elementwise."""
    tensors = parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]
    for weights, gradient, first, second in zip(*(t.view(-1).split(_CHUNK) for t in tensors), strict=True):
        exact = weights.float()
        adamw(
            [exact],
            [gradient],
            [first],
            [second],
            [],
            [state["step"].clone()],  # adamw increments it for each chunk
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


class Applied(NamedTuple):
    """Effect of an optimizer step. grad_norm: norm of the gradient before clipping; learning_rate: 0 for frozen
    weights; moved: whether all gradients of the step were finite, so that all weights except frozen ones were updated.
    """

    grad_norm: float
    learning_rate: float
    moved: bool


def has_fused_kernel(device: torch.device) -> bool:
    """Return whether torch has a fused AdamW kernel for ``device``; on an NPU this depends on torch_npu's version."""
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device.type, "PrivateUse1")
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_adamw_", key))  # noqa: SLF001


class FlatAdamW:
    """AdamW over all trainable parameters of ``model``. seed: of stochastic rounding, different on each rank."""

    def __init__(self, model: nn.Module, settings: OptimizerSettings, *, seed: tuple[int, ...]) -> None:
        self._settings = settings
        named = [(name, p) for name, p in model.named_parameters(remove_duplicate=True) if p.requires_grad]
        shards = [tensor_shard(name, parameter) for name, parameter in named]
        self._gradient = torch.zeros(sum(p.tensor.numel() for p in shards), device=shards[0].tensor.device)
        views = self._gradient.split([shard.tensor.numel() for shard in shards])
        self._held: list[tuple[TensorShard, Tensor]] = []
        for (_, parameter), shard, view in zip(named, shards, views, strict=True):
            gradient = view.view_as(shard.tensor)
            own = parameter
            if isinstance(parameter, DTensor):
                own = nn.Parameter(shard.tensor)
                _set_gradient(parameter, _like(parameter, gradient))
            elif parameter.dtype != gradient.dtype:
                own = nn.Parameter(shard.tensor)
                _add_to(gradient, parameter)
            _set_gradient(own, gradient)
            self._held.append((shard, own))
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
        """The gradient accumulated so far, float32[P], unnormalised."""
        return self._gradient

    def clear(self) -> None:
        """Reset the gradient to 0."""
        self._gradient.zero_()

    def normalise(self, divisor: float, *, norm: Callable[[Tensor], float]) -> float:
        """Divide the accumulated gradient by ``divisor``, and return its norm over all ranks.

        norm: returns the norm of a vector of which every rank passes its shard.
        """
        self._gradient.div_(divisor)
        return norm(self._gradient)

    def rate(self, step: int) -> float:
        """Return the learning rate of ``step``."""
        return self._settings.rate(step)

    def move(self, step: int, *, norm: float) -> None:
        """Make one optimizer step with the gradient, clipped by its norm ``norm``."""
        limit = self._settings.max_grad_norm
        if limit and norm > limit:
            self._gradient.mul_(limit / norm)
        for group in self._adam.param_groups:
            group["lr"] = self.rate(step)
        self._adam.step()

    def state(self) -> Iterator[TensorShard]:
        """Yield the moments and step counts, sharing their memory; copying into them restores a saved state."""
        for shard, parameter in self._held:
            for kind, tensor in self._adam.state[parameter].items():
                yield shard.companion(kind, tensor)


def apply_together(
    step: int,
    gradients: Mapping[FlatAdamW, float],
    *,
    norm: Callable[[Tensor], float],
    frozen: Collection[FlatAdamW] = (),
    other_norm: float = 0.0,
) -> list[Applied]:
    """Make one step of each optimizer, with its accumulated gradient divided by the given number.

    norm: returns the norm of a vector of which every rank passes its shard; frozen: optimizers whose weights do not
    change; other_norm: norm of the gradient of an optimizer in another process that steps together with these. If any
    gradient is not finite, no weights change, but the step counts and its samples are used up.
    """
    norms = [optimizer.normalise(divisor, norm=norm) for optimizer, divisor in gradients.items()]
    finite = all(size < float("inf") for size in (*norms, other_norm))
    applied = []
    for optimizer, size in zip(gradients, norms, strict=True):
        is_frozen = optimizer in frozen
        if finite and not is_frozen:
            optimizer.move(step, norm=size)
        optimizer.clear()
        applied.append(Applied(size, 0.0 if is_frozen else optimizer.rate(step), finite))
    return applied


def _set_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Make backward passes accumulate into ``gradient``, which may have a higher precision than ``parameter``."""
    parameter.grad_dtype = gradient.dtype
    parameter.grad = gradient


def _add_to(gradient: Tensor, parameter: Tensor) -> None:
    """Add the gradient of ``parameter`` from each backward pass to ``gradient``, in the dtype of ``gradient``.

    The parameter itself keeps no gradient, because torch.compile splits a layer at each parameter whose gradient has
    another dtype.
    """

    def add(source: Tensor) -> None:
        gradient.add_(source.grad)
        source.grad = None

    parameter.grad_dtype = gradient.dtype
    parameter.register_post_accumulate_grad_hook(add)


def _like(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of ``parameter`` with the local elements ``gradient``, sharing their memory."""
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
