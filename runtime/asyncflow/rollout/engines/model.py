"""A causal language model that prefills prompts and decodes slots: a Hugging Face module with AsyncFlow's own cache.

The cache has ``slots`` rows of ``max_length`` positions, allocated once. The rows of one decode step are at different
positions: the cache writes each row's new key and value at the row's own length, and the mask marks the valid part of
each row. A prefilled prompt is copied into a slot to start a row.

Invariants:
* Weights are never read from disk; all come through ``load``, which checks every name and shape before it overwrites
  the first byte.
* A prompt is prefilled alone, so its cache is a function of its ids and the weights.
* The shapes of a decode step never change (all slots, all positions, masked), so the result for one row depends neither
  on its slot nor on the other rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.initialization import no_init_weights
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from asyncflow.errors import ManifestError
from asyncflow.models.folder import model_class
from asyncflow.models.source import check_attention, check_dtype, check_length, check_packs, positions

ATTENTION = "asyncflow_slots"
"""The name under which ``slot_attention`` is registered with transformers."""

_EXPERTS = "batched_mm"
"""Transformers' implementation of experts that computes each token by itself, independently of the other tokens."""
_PREFILL_MULTIPLE = 8


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """A prefilled prompt: keys and values [layer][heads, length, head_dim], logits float32[vocab] at its end."""

    keys: list[Tensor]
    values: list[Tensor]
    logits: Tensor

    @property
    def length(self) -> int:
        """Number of tokens of the prompt."""
        return int(self.keys[0].shape[1])


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer: keys and values [slots, heads, max_length, head_dim], written at the rows that the cache selects."""

    is_sliding = False

    def __init__(self, cache: SlotCache, *, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self._cache = cache
        self.keys, self.values = (
            torch.zeros(cache.slots, heads, cache.max_length, head_dim, dtype=states.dtype)
            for states in (keys, values)
            for heads, _, head_dim in (states.shape,)
        )
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the tensors exist from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write one token per row, [slots, heads, 1, head_dim], and return all keys and values."""
        for kept, states in ((self.keys, key_states), (self.values, value_states)):
            head_dim = states.shape[-1]
            kept.view(-1, head_dim).index_copy_(0, self._cache.rows, states.reshape(-1, head_dim))
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002 - the shape never depends on it
        """Return (KV length, offset)."""
        return self._cache.max_length, 0

    def get_seq_length(self) -> int:
        """Return 0: rows have their own lengths, and positions are passed to the model."""
        return 0

    def get_max_length(self) -> int:
        """Return the number of positions of a row."""
        return self._cache.max_length


class SlotCache(Cache):  # type: ignore[misc]
    """The cache of all layers, the length of every row, and the additive float32 mask [slots, 1, 1, max_length].

    prefix: any prefilled prompt; it provides the shapes and dtype of keys and values.
    """

    def __init__(self, *, prefix: Prefix, slots: int, max_length: int) -> None:
        heads = prefix.keys[0].shape[0]
        self.slots = slots
        self.max_length = max_length
        self.lengths = torch.zeros(slots, dtype=torch.int64)
        self.mask = torch.full((slots, 1, 1, max_length), float("-inf"))
        self.mask[..., 0] = 0.0
        self.rows = torch.zeros(slots * heads, dtype=torch.int64)
        self._bases = (torch.arange(slots * heads) * max_length).view(slots, heads)
        self._slots = torch.arange(slots)
        layers = zip(prefix.keys, prefix.values, strict=True)
        super().__init__(layers=[_SlotLayer(self, keys=keys, values=values) for keys, values in layers])

    def begin(self, slot: int, prefix: Prefix) -> None:
        """Copy a prefilled prompt into ``slot``."""
        for layer, keys, values in zip(self.layers, prefix.keys, prefix.values, strict=True):
            layer.keys[slot, :, : prefix.length] = keys
            layer.values[slot, :, : prefix.length] = values
        self.mask[slot, ..., : prefix.length] = 0.0
        self.mask[slot, ..., prefix.length :] = float("-inf")
        self.lengths[slot] = prefix.length

    def copy(self, slot: int, *, logits: Tensor) -> Prefix:
        """Copy the content of ``slot`` for a later ``begin``. logits: float32[vocab] after its last token."""
        length = int(self.lengths[slot])
        return Prefix(
            keys=[layer.keys[slot, :, :length].clone() for layer in self.layers],
            values=[layer.values[slot, :, :length].clone() for layer in self.layers],
            logits=logits.clone(),
        )

    def end(self, slot: int) -> None:
        """Free ``slot``: the row stays at position 0 and writes only there, and the next sequence overwrites it."""
        self.mask[slot, ..., 1:] = float("-inf")
        self.lengths[slot] = 0

    def open(self) -> None:
        """Set every row to its next position before a decode step."""
        self.rows = (self._bases + self.lengths[:, None]).view(-1)
        self.mask[self._slots, 0, 0, self.lengths] = 0.0

    def close(self, active: Tensor) -> None:
        """Count the token that the step has written for the rows in ``active`` (int64)."""
        self.lengths[active] += 1


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers. A decode step has a mask; a prefill has none and is causal.

    Decoding treats the query heads that share a KV head as rows of one product, so that the cache is never repeated.
    sliding_window: number of newest tokens that a token sees, itself included; None: all.
    """
    check_attention(options)
    length = key.shape[2]
    if attention_mask is None:
        near = None
        if sliding_window is not None and sliding_window < length:
            near = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - sliding_window)
        prefilled: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, near, scaling=scaling, **options
        )
        return prefilled
    if sliding_window is not None and sliding_window < length:
        lengths = (attention_mask == 0).sum(-1, keepdim=True)
        attention_mask = attention_mask.masked_fill(torch.arange(length) < lengths - sliding_window, float("-inf"))
    slots, heads, _, head_dim = query.shape
    shared = query.view(slots, key.shape[1], heads // key.shape[1], head_dim)
    scores = torch.matmul(shared, key.transpose(2, 3)).float() * scaling + attention_mask
    attended = torch.matmul(torch.softmax(scores, dim=-1).to(value.dtype), value)
    return attended.reshape(slots, 1, heads, value.shape[-1]), None


AttentionInterface.register(ATTENTION, slot_attention)


class CausalModel:
    """One model in one dtype, on the CPU.

    folder: contains ``config.json``; longest: length of the longest sequence. Raises ManifestError for an invalid
    folder or dtype, NotYetError for a model whose rows would influence each other or whose attention is unsupported.
    """

    def __init__(self, folder: Path, *, dtype: str, longest: int) -> None:
        if not (folder / "config.json").is_file():
            raise ManifestError("no config.json", where=str(folder), hint="Use a Hugging Face model folder")
        check_dtype(dtype, where=str(folder))
        check_packs(json.loads((folder / "config.json").read_text()), longest=longest, where=str(folder))
        self.config = AutoConfig.from_pretrained(folder, local_files_only=True)
        check_packs(self.config.to_dict(), longest=longest, where=str(folder))  # now with defaults
        self.dtype: torch.dtype = getattr(torch, dtype)
        self._where = str(folder)
        with no_init_weights():
            self._module = model_class(self.config).from_config(
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

        tensors: float32, or bfloat16 as uint16 bits; a tied parameter may appear under any or all of its names.
        """
        sources = self._sources(tensors)
        for key, parameter in self._parameters.items():
            parameter.copy_(_tensor(sources[key]))

    def prefill(self, prompt_ids: Sequence[int]) -> Prefix:
        """Run one prompt alone. It is padded at the end, which causal attention does not see."""
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
        """Run one token per slot, int64[slots]; return logits [slots, vocab]. Call ``cache.open`` before."""
        logits: Tensor = self._module(
            input_ids=tokens[:, None],
            attention_mask=cache.mask,
            position_ids=cache.lengths[:, None],
            past_key_values=cache,
            use_cache=True,
        ).logits
        return logits[:, 0]

    def _sources(self, tensors: Mapping[str, NDArray[Any]]) -> dict[int, NDArray[Any]]:
        """Match arrays with parameters. Raises ManifestError that lists the mismatches."""
        problems: list[str] = []
        sources: dict[int, NDArray[Any]] = {}
        known = {name for names in self._names.values() for name in names}
        problems += [f"unexpected {name}" for name in sorted(set(tensors) - known)]
        for key, names in self._names.items():
            present = [name for name in names if name in tensors]
            if not present:
                problems.append(f"missing {names[0]}")
                continue
            shape = tuple(self._parameters[key].shape)
            for name in present:
                if tensors[name].shape != shape:
                    problems.append(f"{name} is {tensors[name].shape}, not {shape}")
                elif tensors[name].dtype not in (np.float32, np.uint16):
                    problems.append(f"{name} is {tensors[name].dtype}, not float32 or bfloat16 bits")
                elif key in sources and not np.array_equal(sources[key], tensors[name]):
                    problems.append(f"{name} differs from {present[0]}, to which it is tied")
                else:
                    sources.setdefault(key, tensors[name])
        if problems:
            more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise ManifestError(
                f"weights do not fit the model: {'; '.join(problems[:8])}{more}",
                where=self._where,
                hint="Trainer and rollout must use the same model.source",
            )
        return sources


def _tensor(array: NDArray[Any]) -> Tensor:
    """View an array as a tensor; copy it if torch must not alias it (read-only memory)."""
    owned = array if array.flags.writeable else array.copy()
    tensor = torch.from_numpy(owned)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
