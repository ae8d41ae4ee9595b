"""Attention of packs, document by document.

All layers but attention see a pack as T tokens. Attention sees it as a batch of documents, [D, L], gathered from the
T rows and scattered back: no token is computed against another document, so the cost is D * L^2 and not T^2, and any
pack fits any kernel that ``scaled_dot_product_attention`` has. A kernel for variable lengths (flash attention on an
accelerator) would be another function with the same signature, under another name.

Invariant: row i of the output is softmax attention of token i over exactly the tokens that ``Pack.mask`` allows. A
model whose attention wants more than that (soft capping, sinks, sliding windows, biases) is refused, never
approximated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import AttentionInterface

from asyncflow.errors import ManifestError
from asyncflow.train.backends.torch_copies import on_device
from asyncflow.train.backends.torch_npu import NpuSequences, attend_on_npu
from asyncflow.train.packing import Pack

ATTENTION = "asyncflow_documents"
"""Name under which transformers knows this attention (``attn_implementation``)."""

_MORE_THAN_SOFTMAX = ("sliding_window", "softcap", "s_aux", "position_bias", "head_mask")


class Documents(NamedTuple):
    """A pack as documents. places [D * L]: the row of each token, padded; rows [T]: back again; mask [D, 1, L, L] or
    None: who sees whom, None where every document is plainly causal; number: D.
    """

    places: Tensor
    rows: Tensor
    mask: Tensor | None
    number: int

    @classmethod
    def of(cls, pack: Pack, device: torch.device) -> Documents:
        """Lay ``pack`` out."""
        table = pack.table()
        mask = None if table.mask is None else on_device(table.mask, device)[:, None]
        places, rows = (on_device(array, device) for array in (table.places.reshape(-1), table.rows))
        return cls(places, rows, mask, len(table.places))


def attend(
    module: nn.Module,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    *,
    documents: Documents | NpuSequences,
    scaling: float | None = None,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attend within documents: query [1, H, T, d], key and value [1, H / groups, T, d] -> [1, T, H, d].

    The signature is that of transformers' attention functions; ``documents`` comes from the caller of the model.
    """
    extra = [name for name in _MORE_THAN_SOFTMAX if more.get(name) is not None]
    if extra or dropout:
        raise ManifestError(
            f"the model's attention uses {', '.join(extra) or 'dropout'}, which packs do not support",
            where="spec.model.source",
            hint="Use a model with plain full attention.",
        )
    if isinstance(documents, NpuSequences):
        # Norms and rotary embeddings leave queries and keys in float32 under autocast; the kernel wants one dtype.
        rows = (part[0].transpose(0, 1).to(value.dtype).contiguous() for part in (query, key, value))
        out = attend_on_npu(*rows, sequences=documents, scale=scaling or query.shape[-1] ** -0.5)
        return out[None], None
    heads = query.shape[1]

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


AttentionInterface.register(ATTENTION, attend)
