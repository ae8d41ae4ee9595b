"""Samples that are made again from the record of who made their tokens."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from asyncflow.data.prompter import Prompter
from asyncflow.identity import SampleKey, Version
from asyncflow.replay.samples import SampleMaker, columns_of
from asyncflow.rollout.engines import open_engine
from asyncflow.rollout.engines.base import Completion, GenerationRequest
from asyncflow.rollout.job import RolloutSettings
from asyncflow.training.recording import SampleRecord, digest, runs_of

from .conftest import random_weights

SETTINGS = RolloutSettings(temperature=1.0, max_tokens=60, stop_ids=(7,), seed=5)
KEYS = [SampleKey(serial, sample) for serial in range(5) for sample in range(2)]
V1, V2 = Version(0, 1), Version(3, 2)


class Prompts:
    def ids(self, serial: int) -> list[int]:
        return [(serial * 7 + i * 3) % 60 + 1 for i in range(3 + serial)]


def engine_of(folder: Path) -> Any:
    return open_engine("transformers", folder=folder, slots=4, max_length=80)


def record(key: SampleKey, made: Completion) -> SampleRecord:
    return SampleRecord(*key, runs_of(made.versions), 1.0, 0.5, digest(made.ids), digest(made.logprobs))


@pytest.fixture
async def recorded(tiny: Path) -> list[SampleRecord]:
    """Samples of which the first were made by one version, the last by the next, and some by both."""
    engine = engine_of(tiny)
    await engine.start()
    await engine.load(V1, random_weights(tiny, seed=1))
    asked = [
        GenerationRequest(
            key=key, prompt_ids=tuple(Prompts().ids(key.serial)), max_tokens=60, stop_ids=(7,), seed=SETTINGS.seed
        )
        for key in KEYS
    ]
    running = [asyncio.create_task(engine.generate(one)) for one in asked]
    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    await engine.load(V2, random_weights(tiny, seed=2))
    made = await asyncio.gather(*running)
    await engine.close()
    return [record(key, one) for key, one in zip(KEYS, made, strict=True)]


async def again(tiny: Path, records: list[SampleRecord], *, seed: int = 5) -> list[Any]:
    engine = engine_of(tiny)
    await engine.start()

    async def weights(step: int) -> Any:
        return random_weights(tiny, seed=step)

    maker = SampleMaker(
        engine, prompts=cast(Prompter, Prompts()), settings=replace(SETTINGS, seed=seed), weights=weights
    )
    made = await maker.make(records)
    await engine.close()
    return [made[each.key] for each in records]


async def test_samples_that_weights_changed_under_have_the_same_bits_again(
    tiny: Path, recorded: list[SampleRecord]
) -> None:
    assert {1, 2} == {len(sample.runs) for sample in recorded}
    made = await again(tiny, recorded[::-1])
    assert all(sample.same for sample in made)
    columns = columns_of(made, decided="advantage")
    assert columns["response_ids"].lengths.tolist() == [sample.tokens for sample in recorded[::-1]]
    assert set(columns["advantage"].values) == {0.5}


async def test_samples_that_are_others_are_found(tiny: Path, recorded: list[SampleRecord]) -> None:
    made = await again(tiny, recorded, seed=6)
    assert not any(sample.same_tokens for sample in made)
