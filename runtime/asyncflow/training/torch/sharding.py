"""A model cut over the ranks of a gang by FSDP2: parameters, gradients and what the optimizer keeps.

Each block of the model is a unit: its parameters are gathered before it computes and dropped after, forward and
backward, and its gradients are summed over ranks as soon as its backward is done. What belongs to no block (embeddings,
the last norm, the output layer) is the root's unit.

Invariant: no rank ever holds more of the model than its shards and the units in use. The gradient that a backward pass
leaves on a rank is the sum over ranks, not their mean. Every rank makes the same passes in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.func import functional_call

from asyncflow.api.workers import LoraSpec
from asyncflow.training.torch.device import weights_on_device
from asyncflow.training.torch.lora import add_adapters
from asyncflow.training.torch.model import LogprobModel, PackModel, open_model
from asyncflow.training.torch.shards import TensorShard

Computes = TypeVar("Computes", bound=PackModel)


def open_sharded(
    folder: Path,
    *,
    mesh: DeviceMesh,
    device: torch.device,
    dtype: torch.dtype,
    frozen: bool = False,
    lora: LoraSpec | None = None,
    longest: int | None = None,
    wrap: Callable[[nn.Module], Computes],
) -> Computes:
    """Open the model folder cut over ``mesh``, with parameters of arbitrary content; wrap: makes the model compute.

    dtype: of the parameters; frozen: it is not trained; lora: adapters that alone are trained. Raises ManifestError
    where the folder holds no model that transformers can open.
    """
    with _parameters_on_meta():
        model = open_model(folder, weights=False, device=None, dtype=dtype, longest=longest).requires_grad_(not frozen)
        if lora is not None:
            add_adapters(model, lora)
        sharded = wrap(model)
    # Below the root, computing in a narrower dtype begins with the gathering; inputs stay what they are on one rank.
    narrow = sharded.compute if sharded.compute != torch.float32 else None
    policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in _blocks(sharded.model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # The output layer is used after the root's forward, where its shards are computed again: it stays gathered.
    of_root = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(sharded, mesh=mesh, mp_policy=of_root, reshard_after_forward=frozen)
    for unit in sharded.modules():
        if isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
    # Tokens of one rank may reach experts that those of another do not: ranks must sum the same gradients.
    sharded.set_reduce_scatter_unused_params(True)
    _allocate(sharded, device)
    return sharded


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the layers that a model consists of: its largest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=lambda found: sum(p.numel() for p in found.parameters()), default=[]))


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate the parameters on ``device``; buffers, which were computed when the model was made, keep content."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Keep only the shapes of parameters that are made in this block; buffers are computed as ever."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)  # noqa: SLF001

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


@contextlib.contextmanager
def older(
    policy: LogprobModel, shards: Sequence[TensorShard], weights: Mapping[str, NDArray[Any]], *, own: Mapping[str, str]
) -> Iterator[Callable[..., Any]]:
    """Return the forward pass of ``policy`` with other ``weights``, by name what this rank holds of each.

    own: the model's names of them, by these names.

    They are used where they lie; in a model that is cut over ranks they take the place of its own, which are afterwards
    what they were, bit for bit.
    """
    if not isinstance(policy, FSDPModule):
        named = {
            f"model.{own[shard.name]}": weights_on_device(
                weights[shard.name], shard.tensor.device, dtype=shard.tensor.dtype
            )
            for shard in shards
        }
        yield lambda *args, **how: functional_call(policy, named, args=args, kwargs=how)
        return
    kept = [shard.tensor.clone() for shard in shards]
    try:
        for shard in shards:
            if shard.tensor.numel():
                given = weights_on_device(weights[shard.name], shard.tensor.device, dtype=shard.tensor.dtype)
                shard.tensor.copy_(given)
        yield policy
    finally:
        policy.reshard()
        for shard, own in zip(shards, kept, strict=True):
            shard.tensor.copy_(own)
