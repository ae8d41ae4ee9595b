"""Attention over sequences of any length, without padding and without a mask.

A pack is a row of causal sequences. Where responses share a prompt, prompt and responses are sequences of their own,
and the responses see their prompt in a second, not causal piece; the two pieces are merged by their log-sum-exp.

Invariant: row i of the output is softmax attention over exactly the tokens that ``Pack.mask`` allows. Backwards, each
piece is given the merged output and the merged log-sum-exp, with which its kernel computes its own part of the exact
gradient: the merge itself needs no derivative.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import varlen

from asyncflow.train.backends.torch.copies import on_device
from asyncflow.train.packing import Pack


class Piece(NamedTuple):
    """Attention of queries to keys, sequence by sequence. query_starts, key_starts: int32 [S + 1], on the device.

    longest_query, longest_key: of one sequence; causal: whether a query sees earlier keys only.
    """

    query_starts: Tensor
    key_starts: Tensor
    longest_query: int
    longest_key: int
    causal: bool

    @classmethod
    def of(cls, queries: NDArray[np.int64], keys: NDArray[np.int64], *, causal: bool, device: torch.device) -> Piece:
        """Make the piece whose sequences begin there."""
        return cls(
            query_starts=on_device(queries.astype(np.int32), device),
            key_starts=on_device(keys.astype(np.int32), device),
            longest_query=int(np.diff(queries).max()),
            longest_key=int(np.diff(keys).max()),
            causal=causal,
        )


class Sequences(NamedTuple):
    """A pack for this attention. own: each sequence over itself; prompt: responses over the prompts that they share.

    rows, prompts: where those responses and prompts lie in the pack. The three are None where nothing is shared.
    """

    own: Piece
    prompt: Piece | None
    rows: Tensor | None
    prompts: Tensor | None

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence; a shared prompt counts by itself."""
        return self.own.longest_query

    @classmethod
    def of(cls, pack: Pack, device: torch.device) -> Sequences:
        """Lay ``pack`` out."""
        laid = pack.sequences()
        own = Piece.of(laid.starts, laid.starts, causal=True, device=device)
        if not len(laid.rows):
            return cls(own, None, None, None)
        prompt = Piece.of(laid.row_starts, laid.prompt_starts, causal=False, device=device)
        return cls(own, prompt, on_device(laid.rows, device), on_device(laid.prompts, device))


class Kernel(Protocol):
    """Attention of one piece: query [Q, H, d], key and value [K, H / groups, d], out [Q, H, d], lse float32 [H, Q]."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, piece: Piece, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp."""

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, piece: Piece, *,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the gradients of query, key and value, given ``grad`` of an output whose softmax had this ``lse``."""


class FlashKernel:
    """torch's flash attention over sequences of any length: on CUDA, in half precision, heads of at most 256."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, piece: Piece, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See ``Kernel``."""
        grouped = query.shape[1] != key.shape[1]
        out, lse, _ = varlen._varlen_attn(  # noqa: SLF001  the public function has no such backward
            query, key, value, *piece[:4], piece.causal, scale, _window(piece), grouped
        )
        return out, lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, piece: Piece, *,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """See ``Kernel``. There is no dropout, so the state of its generator is zeros."""
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)
        given: tuple[Tensor, Tensor, Tensor] = varlen._varlen_attn_backward(  # noqa: SLF001
            grad, query, key, value, out, lse, *piece[:4], piece.causal, state, scale, _window(piece)
        )
        return given


def attend_sequences(
    query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, *, scale: float, kernel: Kernel
) -> Tensor:
    """Attend within sequences and over shared prompts: [T, H, d] and [T, H / groups, d] -> [T, H, d]."""
    out: Tensor = _Attention.apply(query, key, value, sequences, scale, kernel)
    return out


class _Attention(torch.autograd.Function):  # type: ignore[misc]  # mypy does not read torch
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float, kernel: Kernel
    ) -> Tensor:
        out, lse = kernel.forward(query, key, value, sequences.own, scale=scale)
        rows, prompts = sequences.rows, sequences.prompts
        if sequences.prompt is not None:
            more, more_lse = kernel.forward(query[rows], key[prompts], value[prompts], sequences.prompt, scale=scale)
            own_lse = lse[:, rows]
            both = torch.logaddexp(own_lse, more_lse)
            kept, added = ((part - both).exp().t()[..., None] for part in (own_lse, more_lse))
            out = out.index_copy(0, rows, (out[rows] * kept + more * added).to(out.dtype))
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


def _window(piece: Piece) -> list[int]:
    return [-1, 0] if piece.causal else [-1, -1]
