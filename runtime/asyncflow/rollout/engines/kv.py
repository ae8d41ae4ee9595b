"""The KV cache of an engine: ``slots`` rows of ``max_length`` positions, allocated once.

The rows of one decode step stand at different positions: the cache writes each row's new key and value at that row's
own length, and the mask says how much of each row is real. A row joins by copying a prefilled prompt into its slot.

Invariant: the shapes of a decode step never change while the engine lives (all slots, all positions, masked), so that
what is computed for one row does not depend on which slot it sits in nor on who else is running.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from asyncflow.models.supported import check_attention

ATTENTION = "asyncflow_slots"
"""The name under which ``slot_attention`` is registered with transformers."""


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """A prefilled prompt: keys and values [layer][heads, length, head_dim], logits float32[vocab] at its end."""

    keys: list[Tensor]
    values: list[Tensor]
    logits: Tensor

    @property
    def length(self) -> int:
        """The prompt's tokens."""
        return int(self.keys[0].shape[1])


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer: keys and values [slots, heads, max_length, head_dim], written at the rows that the cache names."""

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
        """Write one token a row, [slots, heads, 1, head_dim], and give the whole of both."""
        for kept, states in ((self.keys, key_states), (self.values, value_states)):
            head_dim = states.shape[-1]
            kept.view(-1, head_dim).index_copy_(0, self._cache.rows, states.reshape(-1, head_dim))
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002 - the shape never depends on it
        """Return (KV length, offset)."""
        return self._cache.max_length, 0

    def get_seq_length(self) -> int:
        """Return 0: rows have lengths of their own, positions are passed to the model."""
        return 0

    def get_max_length(self) -> int:
        """Return the positions of a row."""
        return self._cache.max_length


class SlotCache(Cache):  # type: ignore[misc]
    """The cache of all layers, the length of every row, and the additive float32 mask [slots, 1, 1, max_length].

    prefix: any prompt that was prefilled; it tells shapes and dtype of keys and values.
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

    def seat(self, slot: int, prefix: Prefix) -> None:
        """Copy a prefilled prompt into ``slot``."""
        for layer, keys, values in zip(self.layers, prefix.keys, prefix.values, strict=True):
            layer.keys[slot, :, : prefix.length] = keys
            layer.values[slot, :, : prefix.length] = values
        self.mask[slot, ..., : prefix.length] = 0.0
        self.mask[slot, ..., prefix.length :] = float("-inf")
        self.lengths[slot] = prefix.length

    def leave(self, slot: int) -> None:
        """Free ``slot``: the row stands at position 0 and writes only there, which whoever comes next overwrites."""
        self.mask[slot, ..., 1:] = float("-inf")
        self.lengths[slot] = 0

    def open(self) -> None:
        """Point every row at its next position; a decode step follows."""
        self.rows = (self._bases + self.lengths[:, None]).view(-1)
        self.mask[self._slots, 0, 0, self.lengths] = 0.0

    def close(self, active: Tensor) -> None:
        """Count the token that the step wrote for the rows in ``active`` (int64)."""
        self.lengths[active] += 1


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks: a decode step has a mask, a prefill has none and is causal.

    Decoding treats the query heads that share a KV head as rows of one product, so that the cache is never repeated.
    """
    check_attention(options, longest=key.shape[2])
    if attention_mask is None:
        prefilled: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, None, scaling=scaling, **options
        )
        return prefilled
    slots, heads, _, head_dim = query.shape
    shared = query.view(slots, key.shape[1], heads // key.shape[1], head_dim)
    scores = torch.matmul(shared, key.transpose(2, 3)).float() * scaling + attention_mask
    attended = torch.matmul(torch.softmax(scores, dim=-1).to(value.dtype), value)
    return attended.reshape(slots, 1, heads, value.shape[-1]), None


AttentionInterface.register(ATTENTION, slot_attention)
