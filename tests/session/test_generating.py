"""An engine whose generating is a function of the user's."""

import asyncio
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from asyncflow.errors import ManifestError, Refused  # noqa: E402
from asyncflow.identity import SampleKey, Version  # noqa: E402
from asyncflow.rollout.engines.base import Completion, GenerationRequest  # noqa: E402
from asyncflow.session.generating import UserEngine  # noqa: E402


def request(serial, **more):
    more = {"max_tokens": 3, "stop_ids": (9,), **more}
    return GenerationRequest(key=SampleKey(serial, 0), prompt_ids=(serial, 1), **more)


async def opened(generate, loads=None):
    engine = UserEngine(
        generate=generate, load=(loads if loads is not None else []).append, folder=None, slots=8, max_length=16
    )
    await engine.start()
    return engine


async def test_prompts_that_are_wanted_together_are_generated_together():
    batches, loads = [], []

    def generate(prompts):
        batches.append([prompt.key.serial for prompt in prompts])
        return [([prompt.prompt_ids[0], 9], [-0.5, -0.25]) for prompt in prompts]

    engine = await opened(generate, loads)
    with pytest.raises(Refused, match="no weights"):
        await engine.generate(request(1))
    await engine.load(Version(0, 2), {"w": np.ones(1)})
    made = await asyncio.gather(*(engine.generate(request(serial)) for serial in (4, 5, 6)))
    await engine.close()
    assert batches == [[4, 5, 6]]
    assert [load["w"].tolist() for load in loads] == [[1.0]]
    assert [completion.ids.tolist() for completion in made] == [[4, 9], [5, 9], [6, 9]]
    assert {completion.finish for completion in made} == {"stop"}
    assert made[0].versions.tolist() == [Version(0, 2).packed] * 2
    assert engine.stats().tokens == {"train": 6}


async def test_what_another_engine_began_is_gone_on_behind():
    begun = Completion(
        ids=np.array([7], np.int32), logprobs=np.array([-1.0], np.float32), versions=np.array([1]), finish="aborted"
    )
    engine = await opened(lambda prompts: [([8, 8], [-2.0, -3.0]) for _ in prompts])
    await engine.load(Version(0, 1), {})
    made = await engine.generate(request(1, continues=begun))
    await engine.close()
    assert (made.ids.tolist(), made.logprobs.tolist(), made.finish) == ([7, 8, 8], [-1.0, -2.0, -3.0], "length")


@pytest.mark.parametrize(
    ("turns", "made", "ids", "finish"),
    [
        ([], [1, 0, 7, 2], [1, 0, 7], "stop"),
        ([], [1, 9, 2], [1, 9], "stop"),
        ([], [1, 2, 3], [1, 2, 3], "length"),
        ([0], [7, 2], [0, 7], "stop"),
        ([0, 7, 5], [2], [0, 7, 5, 2], "length"),
    ],
)
async def test_a_response_ends_with_what_ends_it_and_that_is_of_its_last_turn(turns, made, ids, finish):
    """Token 9 ends a response, and so does the text of 0 and 7; 5 is an observation, behind the turn that these end."""
    begun = Completion(
        ids=np.array(turns, np.int32),
        logprobs=np.zeros(len(turns), np.float32),
        versions=np.ones(len(turns), np.int64),
        finish="aborted",
        loss_mask=np.array([id_ != 5 for id_ in turns], np.bool_),
    )
    engine = UserEngine(
        generate=lambda prompts: [(made, [-1.0] * len(made)) for _ in prompts],
        load=lambda _: None,
        decode=lambda given: "".join(map(str, given)),
        folder=None,
        slots=8,
        max_length=16,
    )
    await engine.start()
    await engine.load(Version(0, 1), {})
    found = await engine.generate(request(1, continues=begun, stop_texts=("07",), max_tokens=8))
    await engine.close()
    assert (found.ids.tolist(), found.finish) == (ids, finish)


@pytest.mark.parametrize(
    ("made", "wrong"),
    [
        ([([1, 2], [-0.5])], "log-probs"),
        ([([1, 2, 3, 4], [-0.5] * 4)], "1 to 3 tokens"),
        ([([1], [float("nan")])], "not finite"),
        ([], "0 responses for 1 prompts"),
    ],
)
async def test_what_cannot_be_a_response_ends_the_engine(made, wrong):
    engine = await opened(lambda _: made)
    await engine.load(Version(0, 0), {})
    asked = asyncio.create_task(engine.generate(request(1)))
    with pytest.raises(ManifestError, match=wrong):
        await engine.ended()
    asked.cancel()
    await engine.close()


async def test_ending_a_sequence_ends_what_is_here_and_nothing_that_is_asked_for_later():
    begun, going_on, rounds = threading.Event(), threading.Event(), []

    def generate(prompts):
        rounds.append([prompt.key.serial for prompt in prompts])
        begun.set()
        assert going_on.wait(30)
        return [([8, 9], [-0.5, -0.5]) for _ in prompts]

    engine = await opened(generate)
    await engine.load(Version(0, 0), {})
    await engine.abort([SampleKey(1, 0)])
    running = [asyncio.create_task(engine.generate(request(serial))) for serial in (1, 2)]
    await asyncio.to_thread(begun.wait, 30)
    waiting = asyncio.create_task(engine.generate(request(3)))
    await asyncio.sleep(0)
    await engine.abort([SampleKey(serial, 0) for serial in (2, 3, 4)])
    assert len(await waiting) == 0, "it waits for no batch"
    going_on.set()
    first, second = await asyncio.gather(*running)
    assert (first.ids.tolist(), second.ids.tolist(), second.finish) == ([8, 9], [], "aborted")
    again = await asyncio.gather(*(engine.generate(request(serial)) for serial in (2, 3, 4)))
    await engine.close()
    assert [each.ids.tolist() for each in again] == [[8, 9]] * 3
    assert rounds == [[1, 2], [2, 3, 4]]
