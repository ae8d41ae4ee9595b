"""Attention of packs, document by document.

All layers but attention see a pack as T tokens. On CUDA, in half precision, attention sees it as sequences of any
length (``varlen``). Elsewhere it sees a batch of documents, [D, L], gathered from the T rows and scattered back:
no token is computed against another document, so the cost is D * L^2 and not T^2, and any pack fits any kernel that
``scaled_dot_product_attention`` has.

Invariant: row i of the output is softmax attention of token i over exactly the tokens that ``Pack.mask`` allows. A
model whose attention wants more than that (soft capping, sinks, sliding windows, biases) is refused, never
approximated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from asyncflow.models.supported import check_attention
from asyncflow.train.backends.torch.copies import on_device
from asyncflow.train.backends.torch.npu import NpuSequences, attend_on_npu
from asyncflow.train.backends.torch.varlen import FlashKernel, Sequences, attend_sequences
from asyncflow.train.packing import Pack

ATTENTION = "asyncflow_documents"
"""Name under which transformers knows this attention (``attn_implementation``)."""

_FLASH = FlashKernel()
_LARGEST_HEAD = 256
"""Most dimensions of a head that the kernel for sequences takes."""


class Documents(NamedTuple):
    """A pack as documents. places [D * L]: the row of each token, padded; rows [T]: back again; mask [D, 1, L, L] or
    None: who sees whom, None where every document is plainly causal; number: D.
    """

    places: Tensor
    rows: Tensor
    mask: Tensor | None
    number: int

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return len(self.places) // self.number

    @classmethod
    def of(cls, pack: Pack, device: torch.device) -> Documents:
        """Lay ``pack`` out."""
        table = pack.table()
        mask = None if table.mask is None else on_device(table.mask, device)[:, None]
        places, rows = (on_device(array, device) for array in (table.places.reshape(-1), table.rows))
        return cls(places, rows, mask, len(table.places))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # mypy does not read torch
def attend(
    module: nn.Module,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    *,
    documents: Documents | Sequences | NpuSequences | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attend within documents: query [1, H, T, d], key and value [1, H / groups, T, d] -> [1, T, H, d].

    The signature is that of transformers' attention functions; ``documents`` comes from the caller of the model.
    """
    if documents is None:
        raise TypeError("its layers do not pass on what they are called with")
    check_attention({"dropout": dropout, **more}, longest=documents.longest)
    if isinstance(documents, NpuSequences):
        # Norms and rotary embeddings leave queries and keys in float32 under autocast; the kernel wants one dtype.
        rows = (part[0].transpose(0, 1).to(value.dtype).contiguous() for part in (query, key, value))
        out = attend_on_npu(*rows, sequences=documents, scale=scaling or query.shape[-1] ** -0.5)
        return out[None], None
    heads = query.shape[1]
    if isinstance(documents, Sequences):
        # Norms and rotary embeddings leave queries and keys in float32 under autocast.
        query, key, value = (part[0].transpose(0, 1).to(value.dtype).contiguous() for part in (query, key, value))
        scale = scaling or query.shape[-1] ** -0.5
        return attend_sequences(query, key, value, documents, scale=scale, kernel=_FLASH)[None], None

    def by_document(states: Tensor) -> Tensor:
        rows = states[0].transpose(0, 1).index_select(0, documents.places)
        rows = rows.repeat_interleave(heads // rows.shape[1], dim=1)
        return rows.unflatten(0, (documents.number, -1)).transpose(1, 2)

    out = F.scaled_dot_product_attention(
        by_document(query),
        by_document(key),
        by_document(value),
        attn_mask=documents.mask,
        is_causal=documents.mask is None,
        scale=scaling,
    )
    return out.transpose(1, 2).flatten(0, 1).index_select(0, documents.rows)[None], None


def takes_sequences(config: PretrainedConfig, *, device: torch.device, compute: torch.dtype) -> bool:
    """Return whether attention over sequences of any length has a kernel for this model on this device."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    alike = getattr(config, "v_head_dim", None) is None  # latent attention has values of another size
    return device.type == "cuda" and compute in (torch.bfloat16, torch.float16) and alike and head <= _LARGEST_HEAD


AttentionInterface.register(ATTENTION, attend)
