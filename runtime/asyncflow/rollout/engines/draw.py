"""From logits to tokens: temperature, log-softmax, and the inverse of the cumulative distribution at a given uniform.

Invariant: a row's token and log-probability are functions of that row's logits, temperature and uniform alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 256


def draw(logits: Tensor, *, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token a row.

    logits [rows, vocab]; temperatures float32[rows], 0 = greedy; uniforms float64[rows] in [0, 1).
    Gives ids int64[rows] and float32[rows] log-probabilities: of logits / temperature, for greedy rows of the logits.
    """
    greedy = temperatures == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperatures)[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    if bool(greedy.all()):
        ids = logprobs.argmax(dim=-1)
    else:
        ids = _inverse(logprobs.exp(), uniforms)
        if bool(greedy.any()):
            ids = torch.where(greedy, logprobs.argmax(dim=-1), ids)
    return ids, logprobs.gather(1, ids[:, None])[:, 0]


def _inverse(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first index whose cumulative weight, in float64, exceeds uniform * total.

    Two levels keep it cheap for a wide vocabulary: a block is found by the blocks' sums, then the index in the block;
    where the sums' rounding leaves the target past the block's end, its last index of positive weight is taken.
    """
    rows, vocab = weights.shape
    if vocab % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, -vocab % _BLOCK))
    blocks = weights.view(rows, -1, _BLOCK)
    ends = blocks.sum(dim=-1).double().cumsum(dim=-1)
    total = ends[:, -1:]
    target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    block = torch.searchsorted(ends, target, right=True)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, 1, _BLOCK))[:, 0]
    within = torch.searchsorted(before + inside.double().cumsum(dim=-1), target, right=True)
    last = _BLOCK - 1 - (inside > 0).int().flip(-1).argmax(dim=-1, keepdim=True)
    return (block * _BLOCK + torch.minimum(within, last))[:, 0]
