"""Repeated generation of samples: the same prompts and random numbers, under the versions of their original tokens.

Invariant: the requests to the engine equal those of a rollout (``rollout.job``): a response of one version is one
request; a response whose weights changed is one request per version, each continuing after the previous tokens.
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


class ReplayedSample(NamedTuple):
    """A sample that was generated again, and the record of the original."""

    record: SampleRecord
    prompt_ids: tuple[int, ...]
    response: Completion

    @property
    def same_tokens(self) -> bool:
        """True if the response has the recorded tokens."""
        return digest(self.response.ids) == self.record.ids

    @property
    def same(self) -> bool:
        """True if tokens and log-probs equal the recorded ones bit for bit."""
        return self.same_tokens and digest(self.response.logprobs) == self.record.logprobs


class SampleMaker:
    """Generates samples with a started ``engine``. weights: returns a step's weights in the form that it loads."""

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

    async def make(self, records: Sequence[SampleRecord]) -> dict[SampleKey, ReplayedSample]:
        """Return the samples of a step, by key."""
        prompts = {serial: tuple(self._prompts.ids(serial)) for serial in {record.serial for record in records}}
        results = dict.fromkeys(range(len(records)), NOTHING)
        indices: defaultdict[int, list[int]] = defaultdict(list)
        for index, record in enumerate(records):
            for run in record.runs:
                indices[run.step].append(index)
        for step in sorted(indices):
            await self._engine.load(Version(0, step), await self._weights(step))
            requests = {
                index: self._request(records[index], prompts[records[index].serial], results[index], step)
                for index in indices[step]
                if results[index].finish != "stop"
            }
            results |= zip(requests, await asyncio.gather(*map(self._engine.generate, requests.values())), strict=True)
        return {
            record.key: ReplayedSample(record, prompts[record.serial], results[index])
            for index, record in enumerate(records)
        }

    def _request(
        self, record: SampleRecord, prompt_ids: tuple[int, ...], prefix: Completion, step: int
    ) -> GenerationRequest:
        """Return the request to the version of ``step``: its part of a response, or the rest for the last version."""
        settings, limit = self._settings, sum(run.tokens for run in record.runs if run.step <= step)
        return GenerationRequest(
            key=record.key,
            prompt_ids=prompt_ids,
            max_tokens=settings.max_tokens if step == record.runs[-1].step else limit,
            temperature=settings.temperature,
            stop_ids=settings.stop_ids,
            stop_texts=settings.stop_texts,
            seed=settings.seed,
            continues=prefix,
        )


def columns_of(samples: Sequence[ReplayedSample], *, decided: str) -> dict[str, Jagged]:
    """Return the columns that a trainer fetches: rewards and the column ``decided`` are the recorded ones."""
    rewards = [[0.0 if sample.record.reward is None else sample.record.reward] for sample in samples]
    return {
        "prompt_ids": Jagged.from_rows([sample.prompt_ids for sample in samples], np.int32),
        **response_columns([sample.response for sample in samples], names=RESPONSE),
        "reward": Jagged.from_rows(rewards, np.float32),
        decided: Jagged.from_rows([[sample.record.decided] for sample in samples], np.float32),
    }
