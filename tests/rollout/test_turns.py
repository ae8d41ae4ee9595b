"""Episodes at the engines: turns, observations between them, and the same bits wherever they go on."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.identity import SampleKey, Version
from asyncflow.rollout.engines import open_engine
from asyncflow.rollout.engines.base import Completion, GenerationRequest

from .conftest import random_weights

V1, V2 = Version(0, 1), Version(0, 2)
STOP = 7
TURNS = 3


def observation(turn):
    """Return what the environment of these tests says after so many turns."""
    return [20 + turn, 30, 31 + turn, STOP]


def request(serial, **changes):
    settings = {"max_tokens": 90, "seed": 5, "stop_ids": (STOP, 0, 11), "episode": True, **changes}
    prompt = tuple((serial * 7 + i * 3) % 60 + 1 for i in range(3 + serial % 11))
    return GenerationRequest(key=SampleKey(serial, 0), prompt_ids=prompt, **settings)


async def episode(engine, asked):
    """Make a whole episode, or the rest of one; it ends with a turn that is cut off, or with the last."""
    while True:
        made = await engine.generate(asked)
        turns = sum(chosen for chosen, _ in made.segments())
        if made.finish != "stop" or turns == TURNS or len(made) + 4 >= asked.max_tokens:
            return made
        asked = replace(asked, continues=made.observed(observation(turns)))


def beginning(whole, tokens):
    """Return what an engine has of an episode after so many tokens."""
    arrays = {name: getattr(whole, name)[:tokens] for name in ("ids", "logprobs", "versions")}
    mask = None if whole.loss_mask is None else whole.loss_mask[:tokens]
    return Completion(**arrays, loss_mask=mask, finish="aborted")


def same(a, b):
    columns = ("ids", "logprobs", "versions", "chosen")
    return a.finish == b.finish and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in columns)


def made_engine(name, folder, **settings):
    options = {"tokens": 9, "sigma": 0.3, "vocab": 50} if name == "simulated" else {}
    return open_engine(name, folder=folder, slots=6, max_length=120, options=options, **settings)


@pytest.mark.parametrize("name", ["transformers", "simulated"])
async def test_an_episode_goes_on_elsewhere_from_any_token_to_the_same_bits(tiny, name):
    weights = random_weights(tiny, seed=1)
    first, second = (made_engine(name, tiny) for _ in range(2))
    for engine in (first, second):
        await engine.start()
        await engine.load(V1, weights)
    whole = await asyncio.gather(*(episode(first, request(s)) for s in range(8)))
    assert sum(sum(chosen for chosen, _ in each.segments()) == TURNS for each in whole) >= 4
    for serial, each in enumerate(whole):
        assert not each.logprobs[~each.chosen].any()
        assert set(each.versions.tolist()) == {V1.packed}
        ends = np.flatnonzero(np.diff(each.chosen.astype(int)) < 0)
        cuts = {*ends, *(ends + 5), len(each) - 1, *np.flatnonzero(each.chosen)[1::7]}  # behind them the model goes on
        rest = await asyncio.gather(
            *(episode(second, request(serial, continues=beginning(each, int(cut)))) for cut in cuts)
        )
        assert all(same(each, other) for other in rest), cuts
    for engine in (first, second):
        await engine.close()


async def test_what_was_computed_of_an_episode_is_kept_until_other_weights_come(tiny):
    old, new = random_weights(tiny, seed=1), random_weights(tiny, seed=2)
    engine, other = made_engine("transformers", tiny), made_engine("transformers", tiny)
    for each in (engine, other):
        await each.start()
        await each.load(V1, old)
    turn = await engine.generate(request(3))
    assert turn.finish == "stop"
    before = engine.stats()
    asked = request(3, continues=turn.observed(observation(1)), max_tokens=len(turn) + 8, stop_ids=())
    rest = await engine.generate(asked)
    steps = engine.stats().steps - before.steps
    assert (engine.stats().prefilled, steps) == (before.prefilled, 1 + 4 + 4), "one step a token that is new"
    assert same(await other.generate(asked), rest)
    turn = await engine.generate(request(3))
    await engine.load(V2, new)
    mixed = await engine.generate(replace(asked, continues=turn.observed(observation(1))))
    assert mixed.versions.tolist() == [V1.packed] * (len(turn) + 4) + [V2.packed] * 4
    await other.load(V2, new)
    assert same(await other.generate(replace(asked, continues=turn.observed(observation(1)))), mixed)
    for each in (engine, other):
        await each.close()


async def test_no_more_is_kept_than_there_are_slots(tiny):
    engine, other = made_engine("transformers", tiny), made_engine("transformers", tiny)
    for each in (engine, other):
        await each.start()
        await each.load(V1, random_weights(tiny, seed=1))
    turns = await asyncio.gather(*(engine.generate(request(s)) for s in range(9)))
    asked = [request(s, continues=turn.observed(observation(1))) for s, turn in enumerate(turns)]
    kept, anew = [await asyncio.gather(*map(each.generate, asked)) for each in (engine, other)]
    assert all(map(same, kept, anew))
    for each in (engine, other):
        await each.close()


async def test_a_stop_text_does_not_begin_in_an_observation(tiny):
    engine = made_engine("transformers", tiny, decode=lambda ids: "".join(f"<{i}>" for i in ids))
    await engine.start()
    await engine.load(V1, random_weights(tiny, seed=1))
    turn = await engine.generate(request(3))
    said = turn.observed([4, 5, 6])
    asked = request(3, continues=said, stop_ids=(), max_tokens=len(said) + 6)
    rest = await engine.generate(asked)
    next_id = rest.ids[len(said)]
    begins_there = await engine.generate(replace(asked, stop_texts=("<5><6>", f"<6><{next_id}>")))
    assert same(begins_there, rest)
    stopped = await engine.generate(replace(asked, stop_texts=(f"<{next_id}>",)))
    assert (len(stopped), stopped.finish) == (len(said) + 1, "stop")
    await engine.close()


ids = st.lists(st.integers(0, 50), min_size=1, max_size=5)


@given(st.lists(st.tuples(ids, ids), min_size=1, max_size=4), ids)
def test_segments_are_what_was_put_together(pairs, last):
    def turn(tokens):
        count = len(tokens)
        return Completion(
            ids=np.array(tokens, np.int32),
            logprobs=np.full(count, -1.0, np.float32),
            versions=np.full(count, 5, np.int64),
            finish="stop",
        )

    whole = turn(pairs[0][0])
    for index, (_, said) in enumerate(pairs):
        whole = whole.observed(said)
        assert whole.turn == len(whole)
        assert whole.finish == "aborted"
        whole = whole.extended_by(turn(pairs[index + 1][0] if index + 1 < len(pairs) else last))
    expected = [part for pair in pairs for part in pair] + [last]
    assert [(chosen, part.tolist()) for chosen, part in whole.segments()] == [
        (index % 2 == 0, part) for index, part in enumerate(expected)
    ]
    assert np.array_equal(whole.logprobs, np.where(whole.chosen, -1, 0))
    assert set(whole.versions.tolist()) == {5}
    assert whole.turn == len(whole) - len(last)
    assert len(whole.without_last()) == len(whole) - 1 == len(whole.without_last().chosen)
