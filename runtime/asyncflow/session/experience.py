"""The samples of a micro-batch as padded torch tensors, the input of a user's training loop.

Invariants: each tensor with two dimensions has one entry for each token of prompt and response, padded on the right;
``mask`` is True exactly for the response tokens that count in the loss. A column of ``extra`` has its own length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncflow.identity import SampleKey, steps_of
from asyncflow.queue.torch.batch import Column
from asyncflow.training.batch import MicroBatch


@dataclass(frozen=True, kw_only=True)
class Experience:
    """n samples of one optimizer step; length: number of tokens of the longest one, prompt and response.

    ids int64[n, length]; attention bool[n, length], False for padding; mask bool[n, length], True for tokens that count
    in the loss; logprobs float32[n, length], log-probs of the response tokens from the engine that sampled them, 0 for
    other positions; versions int64[n, length], steps of the weights that sampled them, -1 for other positions; rewards,
    advantages float32[n]; keys: the samples' keys (prompt serial, number in the group); extra: columns that tasks of
    the user wrote, [n, longest], padded with 0 on the right.
    """

    step: int
    keys: Sequence[SampleKey]
    ids: Tensor
    attention: Tensor
    mask: Tensor
    logprobs: Tensor
    versions: Tensor
    rewards: Tensor
    advantages: Tensor
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: MicroBatch, *, step: int) -> Experience:
        """Convert a micro-batch of ``step``."""
        prompts, responses = batch.prompts.lengths, batch.responses.lengths
        shape = (len(batch), int((prompts + responses).max(initial=0)))
        place = np.arange(shape[1])
        attention = place < (prompts + responses)[:, None]
        in_prompt = place < prompts[:, None]
        in_response = attention & ~in_prompt
        ids, mask = np.zeros(shape, np.int64), in_response.copy()
        logprobs, versions = np.zeros(shape, np.float32), np.full(shape, -1, np.int64)
        ids[in_prompt], ids[in_response] = batch.prompts.values, batch.responses.values
        logprobs[in_response] = batch.logprobs.values
        versions[in_response] = steps_of(batch.versions.values)
        if batch.loss_mask is not None:
            mask[in_response] = batch.loss_mask.values
        rewards = np.zeros(len(batch), np.float32) if batch.rewards is None else batch.rewards
        arrays = {"ids": ids, "attention": attention, "mask": mask, "logprobs": logprobs, "versions": versions}
        arrays |= {"rewards": rewards, "advantages": batch.by_sample()}
        tensors = {name: torch.from_numpy(np.require(array, requirements="W")) for name, array in arrays.items()}
        extra = {name: Column.of(column).padded() for name, column in batch.extra.items()}
        return cls(step=step, keys=batch.keys, extra=extra, **tensors)

    def __len__(self) -> int:
        return len(self.keys)

    def to(self, device: torch.device | str) -> Experience:
        """Return a copy with its tensors on another device."""
        values: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        moved = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **moved, extra={name: column.to(device) for name, column in self.extra.items()})
