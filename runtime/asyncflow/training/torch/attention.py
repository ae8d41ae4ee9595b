"""Attention of packs: document by document, or over sequences of any length with a kernel for CUDA and one for Ascend.

All layers except attention compute on a pack as T tokens. On CUDA in half precision, if its kernel supports the model
(``takes_sequences``), and on an NPU, attention computes on sequences of any length, without padding. Otherwise it
computes on a batch of documents, [D, L], gathered from the T rows and scattered back. No token is computed against
another document, so the cost is D * L^2 and not T^2, and any kernel of ``scaled_dot_product_attention`` can be used.

If responses share a prompt, the prompt and each response are separate sequences. On CUDA the responses attend to the
prompt in a second, non-causal part, and the two parts are merged by their log-sum-exp. In the backward pass each part
receives the merged output and the merged log-sum-exp, from which its kernel computes its own part of the exact
gradient, so the merge itself needs no derivative. The NPU's kernel, ``npu_fusion_attention`` with layout TND, supports
sequences with at least as many keys as queries. In its mode 3, "right down causal", query i of n attends to keys 0 to
K - n + i of the K keys of its sequence. The call follows the documentation of torch_npu 2.13 and CANN; it has not been
run on an NPU.

Layers with a sliding window see the newest tokens only: token i attends to token j if j > i - window by position. Packs
with a longer sequence than the window are computed document by document, with that mask.

Invariants: row i of the output is softmax attention of token i over exactly the tokens that ``Pack.mask`` and the
window allow. A model whose attention needs more (soft capping, sinks, biases) is refused, never approximated.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention import varlen
from transformers import AttentionInterface, PretrainedConfig

from asyncflow.models.device import load_npu
from asyncflow.models.source import check_attention
from asyncflow.training.packing import Pack
from asyncflow.training.torch.device import on_device

_RIGHT_DOWN_CAUSAL = 3
_MASK_SIDE = 2048
"""Side of the mask that represents any causal mask."""
_MOST_SEQUENCES = 1024
"""Most sequences of one call."""

ATTENTION = "asyncflow_documents"
"""Name under which transformers knows this attention (``attn_implementation``)."""

_LARGEST_HEAD, _HEADS_BY = 256, 8
"""Largest head dimension that the kernel for sequences supports, and the number that must divide it."""
_AMPERE = (8, 0)
"""Compute capability of the oldest GPUs that the kernel supports."""


class NpuSequences(NamedTuple):
    """A pack as S sequences. query_ends, key_ends: end of each sequence's queries and keys.

    keys: the row of the pack for each key, None if the keys are the rows in order; longest: tokens of the longest
    sequence, including a shared prompt.
    """

    query_ends: list[int]
    key_ends: list[int]
    keys: Tensor | None
    longest: int

    @classmethod
    def of(cls, pack: Pack, device: torch.device) -> NpuSequences:
        """Return the layout of ``pack``."""
        query_ends, key_ends, keys = sequences_of(pack)
        longest = int(np.diff(key_ends, prepend=0).max())
        return cls(query_ends, key_ends, None if keys is None else on_device(keys, device), longest)


def sequences_of(pack: Pack) -> tuple[list[int], list[int], NDArray[np.int64] | None]:
    """Return a pack as the ends of the sequences' queries, the ends of their keys, and the rows of the keys.

    A document with one response is one sequence. If responses share a prompt, the prompt and each response are separate
    sequences, and the keys of a response are those of the prompt and its own. The rows are None if they are 0, 1, 2...
    """
    documents, segments = pack.documents, pack.segments
    begins = np.flatnonzero((np.diff(documents, prepend=-1) != 0) | (np.diff(segments, prepend=-1) != 0))
    ends = np.r_[begins[1:], len(documents)]
    responses = np.bincount(documents[begins], weights=segments[begins] > 0)
    queries: list[int] = []
    keys: list[NDArray[np.int64]] = []
    prompt = np.zeros(0, dtype=np.int64)
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        rows = np.arange(begin, end)
        if segments[begin] == 0:
            prompt = rows
            queries.append(end)
            keys.append(rows)
        elif responses[documents[begin]] == 1:
            queries[-1] = end
            keys[-1] = np.r_[prompt, rows]
        else:
            queries.append(end)
            keys.append(np.r_[prompt, rows])
    rows = np.concatenate(keys)
    shared = len(rows) > len(documents)
    return queries, np.cumsum([len(part) for part in keys]).tolist(), rows if shared else None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # mypy does not read torch
def attend_on_npu(query: Tensor, key: Tensor, value: Tensor, *, sequences: NpuSequences, scale: float) -> Tensor:
    """Attend within sequences: query [T, H, d], key and value [T, H / groups, d] -> [T, H, d], all of one dtype."""
    if sequences.keys is not None:
        key, value = (states.index_select(0, sequences.keys) for states in (key, value))
    attention, mask = load_npu().npu_fusion_attention, _causal(query.device)
    parts, first_query, first_key = [], 0, 0
    for begin in range(0, len(sequences.query_ends), _MOST_SEQUENCES):
        query_ends, key_ends = (ends[begin : begin + _MOST_SEQUENCES] for ends in sequences[:2])
        queries, keys = slice(first_query, query_ends[-1]), slice(first_key, key_ends[-1])
        out = attention(
            query[queries],
            key[keys],
            value[keys],
            query.shape[1],
            "TND",
            atten_mask=mask,
            scale=scale,
            actual_seq_qlen=[end - first_query for end in query_ends],
            actual_seq_kvlen=[end - first_key for end in key_ends],
            sparse_mode=_RIGHT_DOWN_CAUSAL,
        )
        parts.append(out[0])
        first_query, first_key = query_ends[-1], key_ends[-1]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


@cache
def _causal(device: torch.device) -> Tensor:
    """Return the mask that the kernel requires for every causal mask: True at masked positions."""
    return torch.ones(_MASK_SIDE, _MASK_SIDE, dtype=torch.bool, device=device).triu(1)


class AttentionPart(NamedTuple):
    """Attention of queries to keys, sequence by sequence. query_starts, key_starts: int32 [S + 1], on the device.

    longest_query, longest_key: of one sequence; causal: whether a query attends to earlier keys only.
    """

    query_starts: Tensor
    key_starts: Tensor
    longest_query: int
    longest_key: int
    causal: bool

    @classmethod
    def of(
        cls, queries: NDArray[np.int64], keys: NDArray[np.int64], *, causal: bool, device: torch.device
    ) -> AttentionPart:
        """Return the part with sequences that start at ``queries`` and ``keys``."""
        return cls(
            query_starts=on_device(queries.astype(np.int32), device),
            key_starts=on_device(keys.astype(np.int32), device),
            longest_query=int(np.diff(queries).max()),
            longest_key=int(np.diff(keys).max()),
            causal=causal,
        )


class KernelSequences(NamedTuple):
    """A pack for this attention. own: each sequence over itself; prompt: responses over their shared prompts.

    rows, prompts: rows of these responses and prompts in the pack. All three are None if no prompt is shared. longest:
    tokens of the longest sequence, including a shared prompt.
    """

    own: AttentionPart
    prompt: AttentionPart | None
    rows: Tensor | None
    prompts: Tensor | None
    longest: int

    @classmethod
    def of(cls, pack: Pack, device: torch.device) -> KernelSequences:
        """Return the layout of ``pack``."""
        sequences = pack.sequences()
        own = AttentionPart.of(sequences.starts, sequences.starts, causal=True, device=device)
        if not len(sequences.rows):
            return cls(own, None, None, None, longest_of(pack))
        prompt = AttentionPart.of(sequences.row_starts, sequences.prompt_starts, causal=False, device=device)
        rows, prompts = on_device(sequences.rows, device), on_device(sequences.prompts, device)
        return cls(own, prompt, rows, prompts, longest_of(pack))


class Kernel(Protocol):
    """Attention of one part: query [Q, H, d], key and value [K, H / groups, d], out [Q, H, d], lse float32 [H, Q]."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, part: AttentionPart, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp."""

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, part: AttentionPart, *,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the gradients of query, key and value from ``grad`` of an output whose softmax had this ``lse``."""


class FlashKernel:
    """torch's flash attention over sequences of any length; requires ``takes_sequences``."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, part: AttentionPart, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See ``Kernel``."""
        grouped = query.shape[1] != key.shape[1]
        out, lse, _ = varlen._varlen_attn(  # noqa: SLF001  the public function has no separate backward
            query, key, value, *part[:4], part.causal, scale, _window(part), grouped
        )
        return out, lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, part: AttentionPart, *,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """See ``Kernel``. There is no dropout, so its generator state is zeros."""
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)
        gradients: tuple[Tensor, Tensor, Tensor] = varlen._varlen_attn_backward(  # noqa: SLF001
            grad, query, key, value, out, lse, *part[:4], part.causal, state, scale, _window(part)
        )
        return gradients


def attend_sequences(
    query: Tensor, key: Tensor, value: Tensor, sequences: KernelSequences, *, scale: float, kernel: Kernel
) -> Tensor:
    """Attend within sequences and over shared prompts: [T, H, d] and [T, H / groups, d] -> [T, H, d]."""
    out: Tensor = _Attention.apply(query, key, value, sequences, scale, kernel)
    return out


class _Attention(torch.autograd.Function):  # type: ignore[misc]  # mypy does not read torch
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sequences: KernelSequences, scale: float, kernel: Kernel
    ) -> Tensor:
        out, lse = kernel.forward(query, key, value, sequences.own, scale=scale)
        rows, prompts = sequences.rows, sequences.prompts
        if sequences.prompt is not None:
            shared, shared_lse = kernel.forward(
                query[rows], key[prompts], value[prompts], sequences.prompt, scale=scale
            )
            own_lse = lse[:, rows]
            both = torch.logaddexp(own_lse, shared_lse)
            of_own, of_shared = ((part - both).exp().t()[..., None] for part in (own_lse, shared_lse))
            out = out.index_copy(0, rows, (out[rows] * of_own + shared * of_shared).to(out.dtype))
            lse = lse.index_copy(1, rows, both)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.sequences, ctx.scale, ctx.kernel = sequences, scale, kernel
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        sequences, scale, kernel = ctx.sequences, ctx.scale, ctx.kernel
        grad = grad.contiguous()
        of_query, of_key, of_value = kernel.backward(grad, query, key, value, out, lse, sequences.own, scale=scale)
        rows, prompts = sequences.rows, sequences.prompts
        if sequences.prompt is not None:
            more = kernel.backward(
                grad[rows], query[rows], key[prompts], value[prompts], out[rows], lse[:, rows].contiguous(),
                sequences.prompt, scale=scale,
            )  # fmt: skip
            of_query = of_query.index_add(0, rows, more[0])
            of_key, of_value = (
                whole.index_add(0, prompts, part) for whole, part in ((of_key, more[1]), (of_value, more[2]))
            )
        return of_query, of_key, of_value, None, None, None


def _window(part: AttentionPart) -> list[int]:
    return [-1, 0] if part.causal else [-1, -1]


_FLASH = FlashKernel()


class Documents(NamedTuple):
    """A pack as documents. places [D * L]: the pack's row of each token, padded; rows [T]: the inverse; mask
    [D, 1, L, L]: which tokens attend to which, None if every document is purely causal; positions [D, L]: of each token
    in its sequence.
    """

    places: Tensor
    rows: Tensor
    mask: Tensor | None
    positions: Tensor

    def within(self, window: int | None) -> Tensor | None:
        """Return the mask of a layer whose tokens see the ``window`` newest tokens; None: purely causal."""
        length = self.positions.shape[1]
        if window is None or window >= length:
            return self.mask
        causal = torch.ones(length, length, dtype=torch.bool, device=self.positions.device).tril()
        near = self.positions[:, None, :, None] - self.positions[:, None, None, :] < window
        return near & (causal if self.mask is None else self.mask)

    @classmethod
    def of(cls, pack: Pack, device: torch.device) -> Documents:
        """Return the layout of ``pack``."""
        table = pack.table()
        mask = None if table.mask is None else on_device(table.mask, device)[:, None]
        places, rows, positions = (
            on_device(array, device) for array in (table.places.reshape(-1), table.rows, pack.positions[table.places])
        )
        return cls(places, rows, mask, positions)


def attend(
    module: nn.Module,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    *,
    documents: Documents | KernelSequences | NpuSequences | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend within documents: query [1, H, T, d], key and value [1, H / groups, T, d] -> [1, T, H, d].

    The signature is that of transformers' attention functions; the caller of the model passes ``documents``. Attention
    over sequences is compiled together with its layer. sliding_window: number of newest tokens that a token sees,
    itself included; None: all.
    """
    if documents is None:
        raise TypeError("its layers do not pass their arguments on to attention")
    scale = scaling or query.shape[-1] ** -0.5
    if isinstance(documents, Documents):
        check_attention(options)
        return _attend_documents(query, key, value, documents, window=sliding_window, scale=scale)[None], None
    check_attention({"sliding_window": sliding_window, **options}, longest=documents.longest)
    # Norms and rotary embeddings leave queries and keys in float32 under autocast; the kernels require one dtype.
    query, key, value = (part[0].transpose(0, 1).to(value.dtype).contiguous() for part in (query, key, value))
    if isinstance(documents, NpuSequences):
        return attend_on_npu(query, key, value, sequences=documents, scale=scale)[None], None
    return attend_sequences(query, key, value, documents, scale=scale, kernel=_FLASH)[None], None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # mypy does not read torch
def _attend_documents(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, *, window: int | None, scale: float
) -> Tensor:
    """Attend document by document: query [1, H, T, d], key and value [1, H / groups, T, d] -> [T, H, d]."""
    heads, number = query.shape[1], len(documents.positions)
    mask = documents.within(window)

    def by_document(states: Tensor) -> Tensor:
        rows = states[0].transpose(0, 1).index_select(0, documents.places)
        rows = rows.repeat_interleave(heads // rows.shape[1], dim=1)
        return rows.unflatten(0, (number, -1)).transpose(1, 2)

    out = F.scaled_dot_product_attention(
        by_document(query),
        by_document(key),
        by_document(value),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )
    return out.transpose(1, 2).flatten(0, 1).index_select(0, documents.rows)


def longest_of(pack: Pack) -> int:
    """Return the number of tokens of the longest sequence, including a shared prompt."""
    return int(pack.positions.max()) + 1


def takes_sequences(config: PretrainedConfig, *, device: torch.device, compute: torch.dtype) -> bool:
    """Return whether attention over sequences of any length has a kernel for this model on this device."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    same_size = getattr(config, "v_head_dim", None) is None  # latent attention has values of another size
    fits = same_size and head <= _LARGEST_HEAD and head % _HEADS_BY == 0
    half_precision = device.type == "cuda" and compute in (torch.bfloat16, torch.float16)
    return half_precision and fits and torch.cuda.get_device_capability(device) >= _AMPERE


AttentionInterface.register(ATTENTION, attend)
