"""Weights of a run become an ordinary Hugging Face folder: model.safetensors, config and tokenizer.

Invariant: the folder has the tensors that transformers saves for this config, bit for bit as given, and no more: a tied
output embedding is left out, since loading ties it again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from asyncflow.errors import CheckpointError
from asyncflow.models.folders import whole_folder

if TYPE_CHECKING:
    import numpy as np
    import torch

    Tensor: TypeAlias = np.ndarray[Any, Any] | torch.Tensor

TIED = "lm_head.weight"
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
"""The files that are copied from the model's folder, where it has them."""


def export_folder(tensors: Mapping[str, Tensor], source: Path, target: Path) -> None:
    """Write ``target`` from ``tensors``, by their names in transformers' state dict, and the folder ``source``.

    tensors: torch tensors, or numpy arrays (uint16: the bits of bfloat16); a ``target`` that exists is replaced at
    once. Raises CheckpointError where a tensor of a safetensors source is missing or has another shape.
    """
    import torch
    from safetensors.torch import save_file

    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    given = {name: torch.as_tensor(tensor).detach().cpu().contiguous() for name, tensor in tensors.items()}
    plain = {name: t.view(torch.bfloat16) if t.dtype == torch.uint16 else t for name, t in given.items()}
    if config.get("tie_word_embeddings", False):
        plain.pop(TIED, None)
    plain = _as_saved(plain, source)
    _check(plain, source)
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in plain.values() if tensor.is_floating_point()}
    if len(dtypes) == 1:
        config["dtype"] = dtypes.pop()
    with whole_folder(target, replace=True) as made:
        for name in COMPANIONS:
            if (source / name).is_file():
                shutil.copyfile(source / name, made / name)
        (made / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        save_file(plain, made / "model.safetensors", metadata={"format": "pt"})


def _as_saved(tensors: dict[str, torch.Tensor], source: Path) -> dict[str, torch.Tensor]:
    """Return the tensors by the names that the files of ``source`` have, where transformers has other ones in memory.

    Newer versions rename weights when they read them, and put those of all experts into one tensor.
    """
    from safetensors import safe_open

    stored: set[str] = set()
    for file in source.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            stored |= set(opened.keys())
    if stored - {TIED} <= tensors.keys():
        return tensors
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source, local_files_only=True))
    except ValueError:  # no model of transformers: what is missing is said by name
        return tensors
    reverted = revert_weight_conversion(model, tensors)
    return {name: tensor.contiguous() for name, tensor in reverted.items()}


def _check(tensors: Mapping[str, torch.Tensor], source: Path) -> None:
    from safetensors import safe_open

    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  a safetensors file is no mapping
                shape = list(tensors[name].shape) if name in tensors else None
                if shape != stored.get_slice(name).get_shape() and name != TIED:
                    raise CheckpointError(
                        f"{name} is {shape or 'missing'}, not {stored.get_slice(name).get_shape()}", where=str(source)
                    )
