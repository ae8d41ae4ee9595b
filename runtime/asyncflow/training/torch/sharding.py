"""A model sharded over the ranks of a gang by FSDP2: parameters, gradients and optimizer state.

Each block of the model is a unit. Its parameters are gathered before it computes and freed afterwards, in forward and
backward, and its gradients are summed over ranks as soon as its backward pass is done. Modules outside of all blocks
(embeddings, the last norm, the output layer) form the unit of the root.

Invariants: a rank never holds more of the model than its shards and the units in use. The gradient that a backward pass
leaves on a rank is the sum over ranks, not their mean. All ranks make the same passes in the same order.
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
    """Open the model folder sharded over ``mesh``, with uninitialised parameters; wrap: creates the computing model.

    dtype: of the parameters; frozen: whether it is not trained; lora: adapters, which then are the only trained
    parameters. Raises ManifestError if transformers cannot open a model from the folder.
    """
    with _parameters_on_meta():
        model = open_model(folder, weights=False, device=None, dtype=dtype, frozen=frozen, longest=longest)
        if lora is not None:
            add_adapters(model, lora)
        sharded = wrap(model)
    # Below the root, parameters are cast to a narrower dtype when they are gathered; inputs are as on one rank.
    narrow = sharded.compute if sharded.compute != torch.float32 else None
    policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in _blocks(sharded.model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # The output layer is used after the root's forward pass, if its chunks are recomputed, so it stays gathered.
    root_policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(sharded, mesh=mesh, mp_policy=root_policy, reshard_after_forward=frozen)
    for unit in sharded.modules():
        if isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
    # Tokens of different ranks may reach different experts, but all ranks must sum the same gradients.
    sharded.set_reduce_scatter_unused_params(True)
    _allocate(sharded, device)
    return sharded


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model: its largest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=lambda found: sum(p.numel() for p in found.parameters()), default=[]))


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate the parameters on ``device``; buffers, which are computed at construction, keep their content."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Create parameters in this block without storage; buffers are computed as usual."""
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
def with_weights(
    policy: LogprobModel,
    shards: Sequence[TensorShard],
    weights: Mapping[str, NDArray[Any]],
    *,
    names: Mapping[str, str],
) -> Iterator[Callable[..., Any]]:
    """Yield the forward pass of ``policy`` with other ``weights``, this rank's part of each by published name.

    names: the name in the model for each published name.

    If possible, the arrays are used in place. In a sharded model they replace the model's own weights, which are
    restored bit for bit at the end.
    """
    if not isinstance(policy, FSDPModule):
        replacements = {
            f"model.{names[shard.name]}": weights_on_device(
                weights[shard.name], shard.tensor.device, dtype=shard.tensor.dtype
            )
            for shard in shards
        }
        yield lambda *args, **kwargs: functional_call(policy, replacements, args=args, kwargs=kwargs)
        return
    saved = [shard.tensor.clone() for shard in shards]
    try:
        for shard in shards:
            if shard.tensor.numel():
                replacement = weights_on_device(weights[shard.name], shard.tensor.device, dtype=shard.tensor.dtype)
                shard.tensor.copy_(replacement)
        yield policy
    finally:
        policy.reshard()
        for shard, own in zip(shards, saved, strict=True):
            shard.tensor.copy_(own)
