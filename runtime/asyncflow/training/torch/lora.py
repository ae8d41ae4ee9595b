"""LoRA by peft inside the trained model.

Invariants: with adapters, only their tensors are published, saved and restored, under the names of peft's files.
Without adapters, these are all weights under their own names. A new adapter changes nothing, because its B is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from asyncflow.api.workers import LoraSpec
from asyncflow.errors import ManifestError
from asyncflow.models.folder import named_weights
from asyncflow.models.lora import INSTALL, PARTS, PREFIX, chosen_layers
from asyncflow.training.slice_files import within
from asyncflow.training.torch.shards import TensorShard, tensor_shard
from asyncflow.weights.slices import Box

_ADAPTER = "default"


def add_adapters(model: nn.Module, lora: LoraSpec) -> None:
    """Add adapters with arbitrary content to trained layers of ``model``; then they are its only trained parameters.

    Raises ManifestError if peft is not installed or a target matches no linear layer.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ManifestError(f"adapters need peft: {error}", where="spec.trainer.lora", hint=INSTALL) from error
    head = model.get_output_embeddings()
    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and module.weight.requires_grad
    ]
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=chosen_layers(lora, layers))
    # In a model whose type it knows, peft would take names of dense layers for names of fused experts.
    inject_adapter_in_model(config, nn.Sequential(model), adapter_name=_ADAPTER)


def initialise_adapters(model: nn.Module, *, seed: int) -> None:
    """Set the initial weights of adapters as peft does, but as a function of ``seed`` alone: B is 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if _is_adapter(name):
            shard = tensor_shard(name, parameter)
            whole = torch.zeros(shard.shape)
            if f".{PARTS[0]}." in name:
                nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
            shard.tensor.copy_(whole[within(shard.box, Box.whole(shard.shape))])


def base_shards(model: nn.Module) -> list[TensorShard]:
    """Return this rank's part of the weights that are in a model folder, by their names there."""
    named = ((name.replace(".base_layer.", "."), tensor) for name, tensor in named_weights(model))
    return [tensor_shard(name, tensor) for name, tensor in named if not _is_adapter(name)]


def trained_shards(model: nn.Module) -> list[TensorShard]:
    """Return this rank's part of the trained weights, sharing their memory."""
    return [tensor_shard(name, tensor) for name, tensor in trained_weights(model)]


def trained_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the trained weights by their published names: the adapters if there are any, otherwise all weights."""
    adapters = [(name, tensor) for name, tensor in model.named_parameters() if _is_adapter(name)]
    yield from ((_published(name), tensor) for name, tensor in adapters) if adapters else named_weights(model)


def names_in_model(model: nn.Module) -> dict[str, str]:
    """Return the name of each weight in ``model`` by its published name."""
    return {_published(name) if _is_adapter(name) else name: name for name, _ in named_weights(model)}


def without_adapters(model: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, which computes with ``model``, with the adapters disabled during each call."""

    def bare(*args: Any, **kwargs: Any) -> Any:
        with _disabled(model):
            return function(*args, **kwargs)

    return bare


@contextmanager
def _disabled(model: nn.Module) -> Iterator[None]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    try:
        for layer in layers:
            layer.enable_adapters(enabled=False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(enabled=True)


def _is_adapter(name: str) -> bool:
    return any(f".{part}.{_ADAPTER}." in name for part in PARTS)


def _published(name: str) -> str:
    return PREFIX + name.replace(f".{_ADAPTER}.", ".")
