"""Episodes of a worker: what is delivered, what an environment ends or breaks, and what goes on elsewhere."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from asyncflow.environments.pool import EnvironmentAnswer
from asyncflow.models.tokenizer import Tokenizer

from .conftest import random_weights, write_config
from .rollout_world import OF_TURNS, VOCAB, running_world, until

LONG = {"swap_at": "quota", "engine": "simulated", "max_tokens": 40, "tokens": 5, "sigma": 0.4, "vocab": VOCAB}


class Counting:
    """Answers each turn with its number; stops answering where it is told to hold."""

    def __init__(self):
        self.held = asyncio.Event()
        self.held.set()
        self.asked = []

    async def answer(self, example):
        self.asked.append(example)
        await self.held.wait()
        turns = [turn for turn in example.transcript if turn.role == "assistant"]
        return EnvironmentAnswer(f"w{10 + len(turns)} w3")


class Ending:
    """Ends, breaks or floods an episode, as its question says."""

    async def answer(self, example):
        serial = int(example.answer)
        if serial == 1:
            return EnvironmentAnswer(failure="timeout", detail="the environment: slow")
        return EnvironmentAnswer(None if serial == 0 else "w5 " * 40)


@pytest.fixture
async def world(tmp_path):
    async with running_world(tmp_path, columns=OF_TURNS) as world:
        yield world


async def killed(rollout):
    """End a worker as a process is that is killed: it tells nobody, and what was saved before is all that is left."""
    await until(lambda: not rollout.worker._in_flight.unsaved(), "what there is to be saved")

    async def nothing_is_told():
        for task in rollout.worker._tasks:
            task.cancel()
        await asyncio.wait(rollout.worker._tasks)

    rollout.worker._leave = nothing_is_told
    await rollout.leave()


def segments(ids, mask):
    cuts = np.flatnonzero(np.diff(mask.astype(int))) + 1
    return [part.tolist() for part in np.split(ids, cuts)]


async def test_a_sample_of_several_turns_is_delivered_with_its_mask(world):
    environment = Counting()
    await world.rollout("r0", reward="rollout_reward:words", environment=environment, **LONG)
    await world.put([0, 1], step=1, oldest=0)
    await world.publish(0)
    rows, columns = await world.made(8)
    for row, ids, logprobs, versions, reward, mask in zip(rows, *columns.values(), strict=True):
        tags = row.meta.tags
        _, *rest = segments(ids, mask)
        assert [rest[0], rest[2]] == [[11, 3], [12, 3]], "observations"
        assert mask.dtype == np.bool_
        assert len(ids) == len(logprobs) == len(versions) == len(mask) == tags["tokens"]
        assert (tags["response_tokens"], tags["turns"]) == (mask.sum(), 3)
        assert not logprobs[~mask].any()
        assert set(versions.tolist()) == {0}
        assert (tags["version_min"], tags["version_max"]) == (0, 0)
        last = rest[-1]
        assert reward.tolist() == [len(last) - (last[-1] == 1) + 0.5], "of the last turn"
    transcripts = [example.transcript for example in environment.asked]
    assert sorted(map(len, transcripts)) == [1] * 8 + [3] * 8
    assert all(example.response == example.transcript[-1].content for example in environment.asked)


async def test_an_environment_ends_breaks_or_fills_a_sample(world, monkeypatch):
    loop, encode = asyncio.get_running_loop(), Tokenizer.encode

    def encode_beside(tokenizer, text):
        runs = threading.Event()
        loop.call_soon_threadsafe(runs.set)
        assert runs.wait(5), "a long observation stops no heartbeats"
        return encode(tokenizer, text)

    monkeypatch.setattr(Tokenizer, "encode", encode_beside)
    await world.rollout("r0", reward="rollout_reward:one", environment=Ending(), **LONG)
    await world.put([0, 1, 2], step=1, oldest=0)
    await world.publish(0)
    rows, columns = await world.made(12)
    assert all(mask.all() for mask in columns["loss_mask"]), "no observation was taken in"
    tags = [row.meta.tags for row in rows]
    assert [each["finish"] for each in tags] == ["stop"] * 8 + ["length"] * 4
    assert [each.get("failure") for each in tags] == [None] * 4 + ["timeout"] * 4 + [None] * 4
    assert [each["reward"] for each in tags] == [1.0] * 4 + [0.0] * 4 + [1.0] * 4


async def made_by(folder, settings, *, weights, disturbed=None):
    """Return the samples of two groups; where their rollout is ``disturbed`` while it waits, another goes on."""
    async with running_world(folder, columns=OF_TURNS, lease_s=2.0) as world:
        environment = Counting()
        await world.publish(0, weights)
        await world.put([0, 1], step=1, oldest=0)
        first = await world.rollout("r0", environment=environment, **settings)
        if disturbed is not None:
            environment.held.clear()
            await until(lambda: len(environment.asked) >= 3, "episodes between two turns")
            await disturbed(first)
            assert first.worker.meter.delivered < 8
            await world.rollout("r1", environment=Counting(), **settings)
        return await world.made(8)


async def drained(rollout):
    await asyncio.wait_for(rollout.leave(), 20)


@pytest.mark.parametrize("engine", ["simulated", "transformers"])
@pytest.mark.parametrize("way", [drained, killed])
async def test_an_episode_that_waits_for_its_environment_goes_on_elsewhere_to_the_same_bits(tmp_path, engine, way):
    """Episodes that a drain hands on, or a killed instance leaves, become what they would have been there."""
    settings, weights = LONG, None
    if engine == "transformers":
        model = write_config(tmp_path / "model", vocab_size=VOCAB)
        weights = random_weights(model, seed=1)
        settings = {"engine": engine, "max_tokens": 40, "model": model, "stop_ids": tuple(range(1, 12))}
    rows, whole = await made_by(tmp_path / "whole", settings, weights=weights)
    others, parts = await made_by(tmp_path / "parts", settings, weights=weights, disturbed=way)
    assert [row.meta.key for row in rows] == [row.meta.key for row in others]
    for name in OF_TURNS:
        assert all(np.array_equal(a, b) for a, b in zip(whole[name], parts[name], strict=True)), name
    assert [row.meta.tags for row in rows] == [row.meta.tags for row in others]
