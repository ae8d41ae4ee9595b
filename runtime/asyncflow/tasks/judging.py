"""The reward as a task: scores finished responses row by row, or group by group.

It writes the same as a rollout that scores its own responses: ``reward``, ``details``, and the tags that the driver
uses to count and decide.

Invariants: a row that failed before, for example in its environment, keeps the reason and is not given its new reward;
a function over groups is never called with a part of a group: if only some rows of a group must be scored again,
because a storage unit lost them, they get no reward (``incomplete``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Final

import numpy as np

from asyncflow.api.names import LOSS_MASK
from asyncflow.api.rewards import MOST_DETAILS
from asyncflow.data.base import Prompt
from asyncflow.environments.transcripts import Transcriber
from asyncflow.queue.protocol.messages import LeasedRow
from asyncflow.rewards.service import Rewards
from asyncflow.rewards.wire import Example, RewardResult
from asyncflow.rpc.columns import Jagged
from asyncflow.tasks.rows import OutputColumn, TaggedValues

REWARD_COLUMNS: Final = (
    OutputColumn(name="reward", dtype="float32", most=1),
    OutputColumn(name="details", dtype="uint8", most=MOST_DETAILS),
)
"""Columns that are written for each row."""


class Judge:
    """Scores rows by ``rewards``. sizes: number of samples in a group by purpose, for functions over groups."""

    def __init__(self, rewards: Rewards, *, transcriber: Transcriber, sizes: Mapping[str, int]) -> None:
        self._rewards = rewards
        self._transcriber = transcriber
        self._sizes = sizes

    async def compute(self, rows: Sequence[LeasedRow], columns: Mapping[str, Jagged]) -> list[TaggedValues]:
        """Return the reward of each row. columns: ``task``, ``response_ids`` int32, and ``LOSS_MASK`` bool of turns."""
        examples = await asyncio.to_thread(self._examples, columns)
        parts = _prompts(rows) if self._rewards.by_group else [list(range(len(rows)))]
        scored: dict[int, RewardResult] = {}
        for part, results in zip(
            parts, await asyncio.gather(*(self._score(rows, part, examples) for part in parts)), strict=True
        ):
            scored |= dict(zip(part, results, strict=True))
        return [_outcome(row, scored[index]) for index, row in enumerate(rows)]

    def _examples(self, columns: Mapping[str, Jagged]) -> list[Example]:
        examples = []
        for index in range(len(columns["task"])):
            prompt = Prompt.unpack(columns["task"].row(index).tobytes())
            ids = columns["response_ids"].row(index)
            chosen = columns[LOSS_MASK].row(index) if LOSS_MASK in columns else np.ones(len(ids), np.bool_)
            transcript = self._transcriber.transcript(ids, chosen)
            examples.append(Example.of(prompt, transcript, length=len(ids)))
        return examples

    async def _score(
        self, rows: Sequence[LeasedRow], part: Sequence[int], examples: Sequence[Example]
    ) -> list[RewardResult]:
        size = self._sizes.get(rows[part[0]].meta.purpose, 0)
        if self._rewards.by_group and len(part) < size:
            return [RewardResult.incomplete(len(part), size=size)] * len(part)
        return await self._rewards.score([examples[index] for index in part])


def _prompts(rows: Sequence[LeasedRow]) -> list[list[int]]:
    """Return the indices of the rows of each prompt, in the order of the samples."""
    order = sorted(range(len(rows)), key=lambda index: rows[index].meta.key)
    return [list(same) for _, same in groupby(order, key=lambda index: rows[index].meta.serial)]


def _outcome(row: LeasedRow, result: RewardResult) -> TaggedValues:
    result = RewardResult(value=0.0) if "failure" in row.meta.tags else result
    details = np.frombuffer(result.details, np.uint8)
    return TaggedValues({"reward": np.array([result.value], np.float32), "details": details}, result.tags)
