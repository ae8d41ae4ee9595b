"""The samples of a micro-batch as padded torch tensors, the form in which a loop of one's own computes.

Invariant: every tensor of two dimensions has one entry for each token of prompt and response, filled up on the right;
``mask`` is True exactly where a token of the response counts in the loss. A column of ``extra`` has its own length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncflow.identity import SampleKey, Version
from asyncflow.queue.torch.batch import Column
from asyncflow.training.batch import MicroBatch


@dataclass(frozen=True, kw_only=True)
class Experience:
    """n samples of one optimizer step; length: tokens of the longest, prompt and response.

    ids int64[n, length]; attention bool[n, length], False where it is filled up; mask bool[n, length], the tokens that
    count in the loss; logprobs float32[n, length], of the response's tokens by the engine that drew them, else 0;
    versions int64[n, length], the steps of the weights that drew them, else -1; rewards, advantages float32[n]; keys:
    the samples' names, (prompt serial, number in the group); extra: what tasks of the user's wrote, by column
    [n, longest], filled up with 0 on the right.
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
        """Make it of what a trainer is given for ``step``."""
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
        versions[in_response] = [Version.unpack(packed).step for packed in batch.versions.values.tolist()]
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
        """Return it with its tensors on another device."""
        held: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        moved = {name: one.to(device) for name, one in held.items() if isinstance(one, Tensor)}
        return replace(self, **moved, extra={name: one.to(device) for name, one in self.extra.items()})
