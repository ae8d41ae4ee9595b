"""Samples made again: the same prompts and random numbers, under the versions that made their tokens the first time.

Invariant: what an engine is asked for is what a rollout asked for (``rollout.job``): a response that one version made
is made in one piece, one that weights changed under in as many pieces as it had, each behind the tokens before it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncflow.data.prompter import Prompter
from asyncflow.identity import SampleKey, Version
from asyncflow.rollout.engines.base import NOTHING, Completion, GenerationRequest, RolloutEngine
from asyncflow.rollout.job import RESPONSE, RolloutSettings, response_columns
from asyncflow.rpc.columns import Jagged
from asyncflow.training.recording import SampleRecord, digest

Weights: TypeAlias = Mapping[str, NDArray[Any]]


class MadeSample(NamedTuple):
    """A sample that was made again, beside the record of it."""

    record: SampleRecord
    prompt_ids: tuple[int, ...]
    response: Completion

    @property
    def same_tokens(self) -> bool:
        """True where the response has the tokens that were recorded."""
        return digest(self.response.ids) == self.record.ids

    @property
    def same(self) -> bool:
        """True where log-probs are those recorded, too, to the bit."""
        return self.same_tokens and digest(self.response.logprobs) == self.record.logprobs


class SampleMaker:
    """Makes samples with ``engine``, which is started. weights: gives those of a step as the engine loads them."""

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        prompts: Prompter,
        settings: RolloutSettings,
        weights: Callable[[int], Awaitable[Weights]],
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._settings = settings
        self._weights = weights

    async def make(self, records: Sequence[SampleRecord]) -> dict[SampleKey, MadeSample]:
        """Return the samples of a step, by name."""
        prompts = {serial: tuple(self._prompts.ids(serial)) for serial in {record.serial for record in records}}
        made = dict.fromkeys(range(len(records)), NOTHING)
        pieces: defaultdict[int, list[int]] = defaultdict(list)
        for index, record in enumerate(records):
            for run in record.runs:
                pieces[run.step].append(index)
        for step in sorted(pieces):
            await self._engine.load(Version(0, step), await self._weights(step))
            asked = {
                index: self._request(records[index], prompts[records[index].serial], made[index], step)
                for index in pieces[step]
                if made[index].finish != "stop"
            }
            made |= zip(asked, await asyncio.gather(*map(self._engine.generate, asked.values())), strict=True)
        return {
            record.key: MadeSample(record, prompts[record.serial], made[index]) for index, record in enumerate(records)
        }

    def _request(
        self, record: SampleRecord, prompt_ids: tuple[int, ...], begun: Completion, step: int
    ) -> GenerationRequest:
        """Return what is asked of the version of ``step``: its piece of a response, the last one to its end."""
        settings, upto = self._settings, sum(run.tokens for run in record.runs if run.step <= step)
        return GenerationRequest(
            key=record.key,
            prompt_ids=prompt_ids,
            max_tokens=settings.max_tokens if step == record.runs[-1].step else upto,
            temperature=settings.temperature,
            stop_ids=settings.stop_ids,
            stop_texts=settings.stop_texts,
            seed=settings.seed,
            continues=begun,
        )


def columns_of(made: Sequence[MadeSample], *, decided: str) -> dict[str, Jagged]:
    """Return what a trainer fetches of samples: rewards and what the driver ``decided`` are those recorded."""
    rewards = [[0.0 if sample.record.reward is None else sample.record.reward] for sample in made]
    return {
        "prompt_ids": Jagged.from_rows([sample.prompt_ids for sample in made], np.int32),
        **response_columns([sample.response for sample in made], names=RESPONSE),
        "reward": Jagged.from_rows(rewards, np.float32),
        decided: Jagged.from_rows([[sample.record.decided] for sample in made], np.float32),
    }
