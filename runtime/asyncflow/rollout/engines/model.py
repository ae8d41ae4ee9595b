"""A causal language model that prefills prompts and decodes slots: Hugging Face's module, our cache, any weights.

Invariants: no weight is read from disk, all come through ``load``; ``load`` checks every name and shape before the
first byte is overwritten; a prompt is prefilled alone, so that its cache is a function of its ids and the weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.initialization import no_init_weights

from asyncflow.errors import ManifestError
from asyncflow.models.supported import check_dtype, check_length, check_model, positions
from asyncflow.rollout.engines.kv import ATTENTION, Prefix, SlotCache

_EXPERTS = "batched_mm"
"""Transformers' computation of experts: for each token by itself, so that no token depends on who else is computed."""
_PREFILL_MULTIPLE = 8


class CausalModel:
    """One model in one dtype, on the CPU.

    folder: holds ``config.json``; longest: most tokens of a sequence. Raises ManifestError for a folder or dtype that
    is wrong, NotYetError for a model whose rows would influence each other or whose attention is not full.
    """

    def __init__(self, folder: Path, *, dtype: str, longest: int) -> None:
        if not (folder / "config.json").is_file():
            raise ManifestError("no config.json", where=str(folder), hint="Give a Hugging Face model folder")
        check_dtype(dtype, where=str(folder))
        check_model(json.loads((folder / "config.json").read_text()), longest=longest, where=str(folder))
        self.config = AutoConfig.from_pretrained(folder, local_files_only=True)
        check_model(self.config.to_dict(), longest=longest, where=str(folder))  # with what config.json leaves out
        self.dtype: torch.dtype = getattr(torch, dtype)
        self._where = str(folder)
        with no_init_weights():
            self._module = AutoModelForCausalLM.from_config(
                self.config, attn_implementation=ATTENTION, experts_implementation=_EXPERTS, dtype=self.dtype
            )
        self._module.tie_weights()
        self._module.eval().requires_grad_(False)
        self._names: dict[int, list[str]] = {}
        self._parameters: dict[int, Tensor] = {}
        kept = self._module.state_dict().keys()
        buffers = ((name, buffer) for name, buffer in self._module.named_buffers() if name in kept)
        for name, parameter in (*self._module.named_parameters(remove_duplicate=False), *buffers):
            self._names.setdefault(id(parameter), []).append(name)
            self._parameters[id(parameter)] = parameter

    def cache(self, *, slots: int, max_length: int) -> SlotCache:
        """Allocate the cache of ``slots`` rows."""
        if (limit := positions(self.config.to_dict())) is not None:
            check_length(max_length, limit, where=self._where)
        with torch.inference_mode():
            shapes = self.prefill([0])
        return SlotCache(prefix=shapes, slots=slots, max_length=max_length)

    def load(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Overwrite all parameters, and the buffers that are saved with them.

        tensors: float32, or bfloat16 as uint16 bits; a tied parameter may come under any or all of its names.
        """
        sources = self._sources(tensors)
        for key, parameter in self._parameters.items():
            parameter.copy_(_tensor(sources[key]))

    def prefill(self, prompt_ids: Sequence[int]) -> Prefix:
        """Run one prompt by itself; it is padded at the end, where causal attention does not see."""
        length = len(prompt_ids)
        ids = torch.zeros(1, -(-length // _PREFILL_MULTIPLE) * _PREFILL_MULTIPLE, dtype=torch.int64)
        ids[0, :length] = torch.tensor(prompt_ids)
        cache = DynamicCache()
        logits = self._module(
            input_ids=ids,
            position_ids=torch.arange(ids.shape[1])[None].clamp(max=length - 1),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=torch.tensor([length - 1]),
        ).logits
        return Prefix(
            keys=[layer.keys[0, :, :length] for layer in cache.layers],
            values=[layer.values[0, :, :length] for layer in cache.layers],
            logits=logits[0, 0].float(),
        )

    def decode(self, cache: SlotCache, tokens: Tensor) -> Tensor:
        """Run one token a slot, int64[slots]; gives logits [slots, vocab]. ``cache.open`` came before."""
        logits: Tensor = self._module(
            input_ids=tokens[:, None],
            attention_mask=cache.mask,
            position_ids=cache.lengths[:, None],
            past_key_values=cache,
            use_cache=True,
        ).logits
        return logits[:, 0]

    def _sources(self, tensors: Mapping[str, NDArray[Any]]) -> dict[int, NDArray[Any]]:
        """Match arrays with parameters; raises ManifestError that names all that is wrong."""
        wrong: list[str] = []
        sources: dict[int, NDArray[Any]] = {}
        known = {name for names in self._names.values() for name in names}
        wrong += [f"unexpected {name}" for name in sorted(set(tensors) - known)]
        for key, names in self._names.items():
            given = [name for name in names if name in tensors]
            if not given:
                wrong.append(f"missing {names[0]}")
                continue
            shape = tuple(self._parameters[key].shape)
            for name in given:
                if tensors[name].shape != shape:
                    wrong.append(f"{name} is {tensors[name].shape}, not {shape}")
                elif tensors[name].dtype not in (np.float32, np.uint16):
                    wrong.append(f"{name} is {tensors[name].dtype}, not float32 or bfloat16 bits")
                elif key in sources and not np.array_equal(sources[key], tensors[name]):
                    wrong.append(f"{name} differs from {given[0]}, to which it is tied")
                else:
                    sources.setdefault(key, tensors[name])
        if wrong:
            more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            raise ManifestError(
                f"weights do not fit the model: {'; '.join(wrong[:8])}{more}",
                where=self._where,
                hint="Trainer and rollout must use the same model.source",
            )
        return sources


def _tensor(array: NDArray[Any]) -> Tensor:
    """View an array as a tensor; one that torch may not alias (read-only memory) is copied."""
    owned = array if array.flags.writeable else array.copy()
    tensor = torch.from_numpy(owned)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
