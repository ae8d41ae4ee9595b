"""LoRA adapters as tensors: what they are called, what they make of a model's weights, and their folder.

Adapters have the names that they have in peft's adapter_model.safetensors.

Invariant: a merged weight is W + scale * B A, computed in float32 and rounded once; every other weight is the model's
own, so an engine that is given ``MergedWeights`` needs to know nothing of adapters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from asyncflow.api.workers import LoraSpec
from asyncflow.errors import ManifestError
from asyncflow.models.folder import export_folder, whole_folder
from asyncflow.models.source import materialize_config

if TYPE_CHECKING:
    import torch

PREFIX = "base_model.model."
"""Prefix that peft puts before the name of every module."""
PARTS = ("lora_A", "lora_B")
INSTALL = "pip install 'asyncflow[torch,lora]'"
TARGETS = "spec.trainer.lora.targets"
_CONFIG = "adapter_config.json"
_TENSORS = "adapter_model.safetensors"
_SHOWN = 40
"""Most names of layers in an error."""


def chosen_layers(lora: LoraSpec, layers: Iterable[str]) -> list[str]:
    """Return those of ``layers`` that have an adapter: all, or those whose name ends in one of the targets.

    layers: full names of the linear layers without the output layer. Raises ManifestError for a target that none of
    them is called.
    """
    named = sorted(layers)
    chosen: set[str] = set() if lora.targets else set(named)
    for target in lora.targets:
        found = {name for name in named if name == target or name.endswith(f".{target}")}
        if not found:
            there = sorted({name.rpartition(".")[2] for name in named})
            more = f" and {len(there) - _SHOWN} more" if len(there) > _SHOWN else ""
            raise ManifestError(
                f"the model has no linear layer called {target!r} that can have an adapter",
                where=TARGETS,
                hint=f"It has {', '.join(there[:_SHOWN])}{more}" if there else "It has no linear layers",
            )
        chosen |= found
    if not chosen:
        raise ManifestError("the model has no linear layers for adapters", where=TARGETS, hint="Leave lora out")
    return sorted(chosen)


class MergedWeights:
    """The weights of the model in ``folder`` with adapters added in; called with each version's adapters.

    dtype: to which weights are rounded, bfloat16 given as its uint16 bits. The model is read once and kept in host
    memory, without adapters in the precision that it needs. Raises ManifestError where it cannot be read.
    """

    def __init__(self, folder: Path, *, scale: float, dtype: Literal["float32", "bfloat16"]) -> None:
        import torch

        self._where = str(folder)
        self._scale = scale
        self._dtype = getattr(torch, dtype)
        self._base = {name: _compact(tensor) for name, tensor in _read(folder).items()}
        self._untouched: dict[str, NDArray[Any]] = {}

    def __call__(self, adapters: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return all weights by name; those without an adapter are the same arrays each time. Blocks for a while.

        Raises ManifestError for adapters of another model.
        """
        pairs = self._pairs(adapters)
        return {
            name: self._merged(weight, *pairs[name]) if name in pairs else self._rounded(name, weight)
            for name, weight in self._base.items()
        }

    def _pairs(self, adapters: Mapping[str, NDArray[Any]]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return A and B by the name of the weight that they change."""
        import torch

        names = {weight_of(name) for name in adapters}
        pairs, wrong = {}, sorted(names - self._base.keys())
        for name in names & self._base.keys():
            # Arrays that were received are read-only, which torch would warn about.
            pair = [torch.tensor(adapters[adapter]) for adapter in adapters_of(name) if adapter in adapters]
            fits = len(pair) == len(PARTS) and pair[1].shape[1:] == pair[0].shape[:1]
            if fits and (pair[1].shape[0], pair[0].shape[1]) == tuple(self._base[name].shape):
                pairs[name] = (pair[0], pair[1])
            else:
                wrong.append(name)
        if wrong:
            raise ManifestError(
                f"adapters do not fit the model, first that of {wrong[0]}",
                where=self._where,
                hint="Trainer and rollout must use the same model.source",
            )
        return pairs

    def _merged(self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> NDArray[Any]:
        import torch

        return _array(torch.addmm(weight.float(), b, a, alpha=self._scale).to(self._dtype))

    def _rounded(self, name: str, weight: torch.Tensor) -> NDArray[Any]:
        if name not in self._untouched:
            self._untouched[name] = _array(weight.to(self._dtype) if weight.is_floating_point() else weight)
        return self._untouched[name]


def weight_of(adapter: str) -> str:
    """Return the name of the weight that an adapter's tensor changes."""
    module, _, _ = adapter.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
    return f"{module}.weight"


def adapters_of(weight: str) -> tuple[str, ...]:
    """Return the names of A and B that change a weight."""
    module = weight.removesuffix(".weight")
    return tuple(f"{PREFIX}{module}.{part}.weight" for part in PARTS)


def export_adapters(adapters: Mapping[str, NDArray[Any]], lora: LoraSpec, *, base: str, target: Path) -> None:
    """Write the folder that peft loads: adapter_model.safetensors and adapter_config.json.

    base: where the model is, a folder or ORG/NAME; a ``target`` that exists is replaced at once.
    """
    from peft import LoraConfig
    from safetensors.numpy import save_file

    modules = {weight_of(name).removesuffix(".weight").rpartition(".")[2] for name in adapters}
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=sorted(lora.targets or modules),
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    with whole_folder(target, replace=True) as made:
        config.save_pretrained(str(made))
        contiguous = {name: np.ascontiguousarray(array) for name, array in adapters.items()}
        save_file(contiguous, made / _TENSORS, metadata={"format": "pt"})


def merge_folder(adapters: Path, target: Path) -> Path:
    """Write the ordinary model folder ``target`` of a folder of adapters and the model that it names; return the model.

    Raises ManifestError where either cannot be read, peft is not installed or leaves adapters out, or ``target`` is
    there already.
    """
    where = "model merge"
    if target.exists():
        raise ManifestError(f"{target} exists", where=where, hint="Remove it first, or give another folder")
    try:
        from peft import PeftConfig, PeftModel, get_peft_model_state_dict
    except ImportError as error:
        raise ManifestError(str(error), where=where, hint=INSTALL) from error
    if not (adapters / _CONFIG).is_file():
        raise ManifestError(f"there is no {_CONFIG}", where=str(adapters), hint="Give the export of a job with lora")
    try:
        named = PeftConfig.from_pretrained(str(adapters)).base_model_name_or_path or ""
        base = materialize_config(named if named.startswith("/") else f"hf://{named}", target)
        opened = PeftModel.from_pretrained(_open(base), str(adapters))
        lost = _stored(adapters) - get_peft_model_state_dict(opened).keys()
        if lost:
            raise ManifestError(
                f"peft does not load {len(lost)} of the adapters' tensors, first {min(lost)}",
                where=str(adapters),
                hint="In models of this type it takes names of dense layers for experts: train with other lora.targets",
            )
        whole = opened.merge_and_unload()
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as wrong:
        raise ManifestError(f"cannot be merged: {wrong}", where=str(adapters)) from wrong
    export_folder(whole.state_dict(), base, target)
    return base


def _stored(adapters: Path) -> set[str]:
    from safetensors import safe_open

    with safe_open(adapters / _TENSORS, framework="np") as stored:
        return set(stored.keys())


def _open(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError, KeyError) as wrong:
        raise ManifestError(f"no model can be opened: {wrong}", where=str(folder)) from wrong


def _read(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights under the names that a trainer publishes them by: tied ones once."""
    model = _open(folder)
    kept = model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return {name: parameter.detach() for name, parameter in model.named_parameters()} | buffers


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` in half the memory where that loses nothing, as with a model that was stored in bfloat16."""
    import torch

    if tensor.dtype != torch.float32:
        return tensor
    half = tensor.bfloat16()
    return half if half.float().equal(tensor) else tensor


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    import torch

    array: NDArray[Any] = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array
