"""LoRA adapters as tensors: their names, merging into a model's weights, and export as a folder.

Adapters have the names of peft's adapter_model.safetensors.

Invariant: a merged weight is W + scale * B A, computed in float32 and rounded once. Every other weight is the model's
own. So an engine that receives ``MergedWeights`` needs no knowledge of adapters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from asyncflow.api.workers import LoraSpec
from asyncflow.errors import ManifestError
from asyncflow.models.folder import export_folder, model_class, named_weights, whole_folder
from asyncflow.models.source import materialize_config

if TYPE_CHECKING:
    import torch

PREFIX = "base_model.model."
"""The prefix that peft adds to every module name."""
PARTS = ("lora_A", "lora_B")
INSTALL = "Run pip install 'asyncflow[torch,lora]'"
TARGETS = "spec.trainer.lora.targets"
_CONFIG = "adapter_config.json"
_TENSORS = "adapter_model.safetensors"
_SHOWN = 40
"""Most layer names in an error."""


def chosen_layers(lora: LoraSpec, layers: Iterable[str]) -> list[str]:
    """Return the ``layers`` that have an adapter: all, or the layers whose name ends in one of the targets.

    layers: full names of the linear layers without the output layer. Raises ManifestError for a target that matches no
    layer.
    """
    names = sorted(layers)
    chosen: set[str] = set() if lora.targets else set(names)
    for target in lora.targets:
        found = {name for name in names if name == target or name.endswith(f".{target}")}
        if not found:
            available = sorted({name.rpartition(".")[2] for name in names})
            more = f" and {len(available) - _SHOWN} more" if len(available) > _SHOWN else ""
            raise ManifestError(
                f"the model has no linear layer called {target!r} that can have an adapter",
                where=TARGETS,
                hint=f"It has {', '.join(available[:_SHOWN])}{more}" if available else "It has no linear layers",
            )
        chosen |= found
    if not chosen:
        raise ManifestError("the model has no linear layers for adapters", where=TARGETS, hint="Leave lora out")
    return sorted(chosen)


class MergedWeights:
    """The weights of the model in ``folder`` with adapters merged; called with the adapters of each version.

    dtype: dtype of the merged weights; bfloat16 is returned as uint16 bits. The model is read once and kept in host
    memory, as bfloat16 if that is lossless. Raises ManifestError if it cannot be read.
    """

    def __init__(self, folder: Path, *, scale: float, dtype: Literal["float32", "bfloat16"]) -> None:
        import torch

        self._where = str(folder)
        self._scale = scale
        self._dtype = getattr(torch, dtype)
        self._base = {name: _compact(tensor) for name, tensor in _read(folder).items()}
        self._unmerged: dict[str, NDArray[Any]] = {}

    def __call__(self, adapters: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return all weights by name; weights without an adapter are the same arrays each time. Blocks.

        Raises ManifestError for adapters of another model.
        """
        pairs = self._pairs(adapters)
        return {
            name: self._merged(weight, *pairs[name]) if name in pairs else self._rounded(name, weight)
            for name, weight in self._base.items()
        }

    def _pairs(self, adapters: Mapping[str, NDArray[Any]]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return A and B by the name of the weight that they belong to."""
        import torch

        names = {weight_of(name) for name in adapters}
        pairs, misfits = {}, sorted(names - self._base.keys())
        for name in names & self._base.keys():
            # Received arrays are read-only, and torch warns about such arrays unless it copies them.
            pair = [torch.tensor(adapters[adapter]) for adapter in adapters_of(name) if adapter in adapters]
            fits = len(pair) == len(PARTS) and pair[1].shape[1:] == pair[0].shape[:1]
            if fits and (pair[1].shape[0], pair[0].shape[1]) == tuple(self._base[name].shape):
                pairs[name] = (pair[0], pair[1])
            else:
                misfits.append(name)
        if misfits:
            raise ManifestError(
                f"adapters do not fit the model, for example the adapter of {misfits[0]}",
                where=self._where,
                hint="Trainer and rollout must use the same model.source",
            )
        return pairs

    def _merged(self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> NDArray[Any]:
        import torch

        return _array(torch.addmm(weight.float(), b, a, alpha=self._scale).to(self._dtype))

    def _rounded(self, name: str, weight: torch.Tensor) -> NDArray[Any]:
        if name not in self._unmerged:
            self._unmerged[name] = _array(weight.to(self._dtype) if weight.is_floating_point() else weight)
        return self._unmerged[name]


def weight_of(adapter: str) -> str:
    """Return the name of the weight that an adapter's tensor is added to."""
    module, _, _ = adapter.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
    return f"{module}.weight"


def adapters_of(weight: str) -> tuple[str, ...]:
    """Return the names of the adapter tensors A and B of a weight."""
    module = weight.removesuffix(".weight")
    return tuple(f"{PREFIX}{module}.{part}.weight" for part in PARTS)


def export_adapters(adapters: Mapping[str, NDArray[Any]], lora: LoraSpec, *, base: str, target: Path) -> None:
    """Write the folder that peft loads: adapter_model.safetensors and adapter_config.json.

    base: the model, an absolute folder, ORG/NAME or ORG/NAME@REVISION. An existing ``target`` is replaced by renames.
    """
    from peft import LoraConfig
    from safetensors.numpy import save_file

    modules = {weight_of(name).removesuffix(".weight").rpartition(".")[2] for name in adapters}
    named, _, revision = (base, "", "") if Path(base).is_absolute() else base.partition("@")
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=sorted(lora.targets or modules),
        base_model_name_or_path=named,
        revision=revision or None,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    with whole_folder(target, replace=True) as folder:
        config.save_pretrained(str(folder))
        contiguous = {name: np.ascontiguousarray(array) for name, array in adapters.items()}
        save_file(contiguous, folder / _TENSORS, metadata={"format": "pt"})


def merge_folder(adapters: Path, target: Path) -> Path:
    """Write the model folder ``target`` by merging a folder of adapters into its base model; return the base's folder.

    Raises ManifestError if either cannot be read, peft is not installed or does not load all adapters, or ``target``
    exists.
    """
    where = "model merge"
    if target.exists():
        raise ManifestError(f"{target} exists", where=where, hint="Remove it first, or pass another folder")
    if not (adapters / _CONFIG).is_file():
        raise ManifestError(f"there is no {_CONFIG}", where=str(adapters), hint="Pass the export of a job with lora")
    try:
        from peft import PeftConfig, PeftModel, get_peft_model_state_dict
    except ImportError as error:
        raise ManifestError(str(error), where=where, hint=INSTALL) from error
    try:
        config = PeftConfig.from_pretrained(str(adapters))
        named = config.base_model_name_or_path or ""
        revision = f"@{config.revision}" if config.revision else ""
        base = materialize_config(named if named.startswith("/") else f"hf://{named}{revision}", target)
        opened = PeftModel.from_pretrained(_open(base), str(adapters))
        lost = _stored(adapters) - get_peft_model_state_dict(opened).keys()
        if lost:
            raise ManifestError(
                f"peft does not load {len(lost)} of the adapters' tensors, for example {min(lost)}",
                where=str(adapters),
                hint="In models of this type peft treats names of dense layers as experts: train other lora.targets",
            )
        merged = opened.merge_and_unload()
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ManifestError(f"cannot be merged: {error}", where=str(adapters)) from error
    export_folder(dict(named_weights(merged)), base, target)
    return base


def _stored(adapters: Path) -> set[str]:
    from safetensors import safe_open

    with safe_open(adapters / _TENSORS, framework="np") as stored:
        return set(stored.keys())


def _open(folder: Path) -> Any:
    import torch
    from transformers import AutoConfig

    try:
        kind = model_class(AutoConfig.from_pretrained(folder, local_files_only=True))
        return kind.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ManifestError(f"no model can be opened: {error}", where=str(folder)) from error


def _read(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights under the names that a trainer publishes; tied weights appear once."""
    return {name: tensor.detach() for name, tensor in named_weights(_open(folder))}


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as bfloat16 if that is lossless, for example if the model was stored in bfloat16."""
    import torch

    if tensor.dtype != torch.float32:
        return tensor
    half = tensor.bfloat16()
    return half if half.float().equal(tensor) else tensor


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    import torch

    array: NDArray[Any] = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array
