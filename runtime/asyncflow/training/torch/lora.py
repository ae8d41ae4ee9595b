"""LoRA by peft inside the model that is trained.

Invariant: with adapters, what is published, saved and restored are their tensors and nothing else, under the names
of peft's files; without, all weights under their own names. A fresh adapter changes nothing, since its B is 0.
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
from asyncflow.models.lora import INSTALL, PARTS, PREFIX, chosen_layers
from asyncflow.training.slice_files import within
from asyncflow.training.torch.model import named_weights
from asyncflow.training.torch.shards import TensorShard, tensor_shard
from asyncflow.weights.slices import Box

_ADAPTER = "default"


def add_adapters(model: nn.Module, lora: LoraSpec) -> None:
    """Put adapters of arbitrary content into ``model``, which alone are trainable from then on.

    Raises ManifestError where peft is missing or a target names no linear layer.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ManifestError(f"adapters need peft: {error}", where="spec.trainer.lora", hint=INSTALL) from error
    head = model.get_output_embeddings()
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=chosen_layers(lora, layers))
    # In a model whose type it knows, peft would take names of dense layers for those of fused experts.
    inject_adapter_in_model(config, nn.Sequential(model), adapter_name=_ADAPTER)


def begin_adapters(model: nn.Module, *, seed: int) -> None:
    """Set the first weights of adapters as peft does, but as a function of ``seed`` alone: B is 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if _is_adapter(name):
            shard = tensor_shard(name, parameter)
            whole = torch.zeros(shard.shape)
            if f".{PARTS[0]}." in name:
                nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
            shard.tensor.copy_(whole[within(shard.box, Box.whole(shard.shape))])


def base_shards(model: nn.Module) -> list[TensorShard]:
    """Return what this rank holds of the weights that a model folder has, by their names there."""
    named = ((name.replace(".base_layer.", "."), tensor) for name, tensor in named_weights(model))
    return [tensor_shard(name, tensor) for name, tensor in named if not _is_adapter(name)]


def trained_shards(model: nn.Module) -> list[TensorShard]:
    """Return what this rank holds of what a run changes, sharing its memory."""
    return [tensor_shard(name, tensor) for name, tensor in trained_weights(model)]


def trained_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what a run changes: the adapters where there are some, else all weights, by their published names."""
    adapters = [(name, tensor) for name, tensor in model.named_parameters() if _is_adapter(name)]
    yield from ((_published(name), tensor) for name, tensor in adapters) if adapters else named_weights(model)


def own_names(model: nn.Module) -> dict[str, str]:
    """Return the name of each trained weight in ``model`` by its published name."""
    return {_published(name) if _is_adapter(name) else name: name for name, _ in named_weights(model)}


def without_adapters(model: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, which computes with ``model``, as it would be without adapters."""

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
