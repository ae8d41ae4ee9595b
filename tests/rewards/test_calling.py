"""Tests of how a reward function is called by its signature, and what becomes of what it returns."""

import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from asyncflow.data.base import Message
from asyncflow.errors import ManifestError
from asyncflow.rewards.calling import RewardFunction
from asyncflow.rewards.endpoint import Endpoint
from asyncflow.rewards.functions import boxed
from asyncflow.rewards.shaping import LengthPenalty
from asyncflow.rewards.wire import MOST_DETAILS, Example, Question, Score, frame

EXAMPLES = [
    Example(prompt="p", response=f"so {n} \\boxed{{{n}}}", answer=n, meta={"n": n}, length=n + 1) for n in range(3)
]


def read(found: Any, config: dict[str, Any] | None = None) -> RewardFunction:
    return RewardFunction.of(found, name="mine:score", config=config)


def scores(found: Callable[..., Any], examples: list[Example] = EXAMPLES) -> list[Score]:
    function = read(found)
    returned = function.call(**function.arguments(examples, extractor=str))
    return function.judge(returned, samples=len(examples)).scores


def score(value: object) -> Score:
    return scores(lambda *, response: value, EXAMPLES[:1])[0]


def of_sample(*, response, prompt, answer, meta, length, config):
    return 0.0


def of_batch(*, responses, prompts, answers, metas, lengths, config):
    return []


async def of_group(responses, lengths, prompt, answer, meta, config):
    return []


def test_a_function_may_reward_the_turns_of_a_transcript() -> None:
    said = [Message("assistant", "calc(2)"), Message("environment", "2"), Message("assistant", "so 2")]
    example = Example(prompt="p", response="so 2", transcript=said)

    def by_turn(*, transcript: list[dict[str, str]]) -> Any:
        turns = [float("calc" in turn["content"]) for turn in transcript if turn["role"] == "assistant"]
        return {"turns": [*turns[:-1], 0.5], "details": {"of": len(turns)}}

    (found,) = scores(by_turn, [example])
    assert (found.value, found.turns, json.loads(found.details)) == (1.5, [1.0, 0.5], {"of": 2})
    (found, _) = scores(lambda *, transcripts, prompts: [{"turns": [len(each)]} for each in transcripts], [example] * 2)
    assert found.turns == [3.0]


@pytest.mark.parametrize("turns", [[], [1.0, None], "12", 1.0, [float("nan")], [True, "x"]])
def test_rewards_of_turns_that_are_none_are_refused(turns: object) -> None:
    assert score({"turns": turns}).failure == "invalid"


@pytest.mark.parametrize(("function", "takes"), [(of_sample, "sample"), (of_batch, "batch"), (of_group, "group")])
def test_plural_parameters_are_lists_and_the_others_are_of_the_one_prompt(function: Any, takes: str) -> None:
    found = read(function, {"a": 1})
    assert (found.takes, found.concurrent) == (takes, function is of_group)
    arguments = found.arguments(EXAMPLES, extractor=boxed)
    assert set(arguments) == set(function.__kwdefaults__ or {}) | set(function.__code__.co_varnames)
    many = {"responses": ["0", "1", "2"], "lengths": [1, 2, 3], "prompts": ["p"] * 3, "answers": [0, 1, 2]}
    one = {"response": "0", "length": 1, "prompt": "p", "answer": 0, "meta": {"n": 0}, "config": {"a": 1}}
    for name, value in arguments.items():
        assert value == {**many, **one, "metas": [{"n": n} for n in range(3)]}[name], name


def test_a_function_has_the_parameters_that_it_needs_and_may_have_others_with_a_default() -> None:
    assert read(lambda first=0, /, *more, response, answer, scale=2.0: 0.0).names == {"response", "answer"}
    every = {"response", "prompt", "answer", "meta", "length", "transcript", "config"}
    assert read(lambda **everything: 0.0).names == every
    assert read(LengthPenalty, {"target": 1}).names == {"length"}


class Scorer:
    def __init__(self, *, config):
        self.factor = config["factor"]

    async def __call__(self, *, responses, prompts):
        return [self.factor] * len(responses)


def test_a_class_is_made_once_with_its_config_and_called() -> None:
    found = read(Scorer, {"factor": 3})
    assert (found.takes, found.concurrent, found.call.factor) == ("batch", True, 3)
    assert found.names == {"responses", "prompts"}
    with pytest.raises(KeyError, match="factor"):
        read(Scorer)


class Placed:
    def __init__(self, *, extractor="text", device="mine", share=1.0):
        self.told = (extractor, device, share)

    def __call__(self, *, response):
        return 0.0


@pytest.mark.parametrize(
    ("device", "told"), [("cpu", ("boxed", "mine", 1.0)), ("cuda", ("boxed", "cuda", 0.5))], ids=["cpu", "cuda"]
)
def test_on_the_cpu_a_class_keeps_its_own_device_and_is_told_its_extractor(device: str, told: tuple[str, ...]) -> None:
    place = {"device": device, "share": 0.5, "extractor": "boxed"}
    found = RewardFunction.of(Placed, name="mine:Placed", config=None, place=place)
    assert found.call.told == told

    class Needy(Placed):
        def __init__(self, device, **rest):
            super().__init__(device=device, **rest)

    assert RewardFunction.of(Needy, name="mine:Needy", config=None, place=place).call.told == ("text", device, 1.0)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda *, completions, **rest: 0.0, "has the parameter 'completions', which is none of answer, config"),
        (lambda *, answer: 0.0, "has no parameter response"),
        (lambda *, response, responses: 0.0, "takes response and responses"),
        (lambda *, responses: [], "must have exactly one of the parameters prompt"),
        (lambda *, responses, prompt, prompts: [], "must have exactly one of the parameters prompt"),
        (lambda *, responses, prompts, answer: [], "has the parameter 'answer', which is none of answers"),
        (lambda response, /: 0.0, "takes 'response' by position"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_in_words(function: Any, why: str) -> None:
    with pytest.raises(ManifestError, match=rf"reward\.function: .*{why}"):
        read(function)


def test_settings_that_nobody_reads_are_refused() -> None:
    with pytest.raises(ManifestError, match=r"reward\.config: .*has no parameter config"):
        read(lambda *, response: 0.0, {"a": 1})


class Told(NamedTuple):
    reward: float
    details: dict[str, Any]


@pytest.mark.parametrize(
    "value",
    [
        {"reward": 1, "details": {"steps": 2}},
        SimpleNamespace(reward=1, details={"steps": 2}),
        Told(1.0, {"steps": np.int64(2)}),
        Told(True, {"steps": 2.0}),
    ],
)
def test_details_are_kept_as_json(value: object) -> None:
    told = score(value)
    assert (told.value, told.failure, json.loads(told.details)) == (1.0, "", {"steps": 2})
    assert score(SimpleNamespace(reward=1)) == Score(value=1.0)


@given(st.dictionaries(st.text(max_size=20), st.text(max_size=600), max_size=12))
def test_details_are_bounded(details: dict[str, str]) -> None:
    kept = score({"reward": 0.5, "details": details})
    size = len(json.dumps(details, ensure_ascii=False, separators=(",", ":")).encode()) if details else 0
    assert kept.value == 0.5
    assert len(kept.details) <= MOST_DETAILS
    if size > 2 * MOST_DETAILS:
        assert set(json.loads(kept.details)) == {"omitted_bytes"}
    elif details and size < MOST_DETAILS / 2:
        assert json.loads(kept.details) == details


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (None, "returned a NoneType"),
        ("1.0", "returned a str"),
        ({"score": 1.0}, "returned a dict with 'score'; it must have 'reward' or 'turns'"),
        ({"reward": 1.0, "other": 2}, "returned a dict with 'reward', 'other'"),
        ({"reward": None}, "returned a NoneType"),
        ({"reward": math.nan}, "returned nan"),
        (10**400, "returned inf"),
        ({"reward": 1.0, "details": "text"}, "details of the reward are a str"),
        ({"reward": 1.0, "details": {"x": object()}}, "cannot be written as JSON"),
    ],
)
def test_what_is_no_reward_is_invalid(value: object, why: str) -> None:
    told = score(value)
    assert (told.value, told.failure) == (0.0, "invalid")
    assert why in told.detail


def test_each_of_many_values_is_judged_alone() -> None:
    class Odd(float):
        def __float__(self):
            raise LookupError("no float")

    for values in ([1.0, None, {"reward": 3, "details": {"a": 1}}], [1, math.nan, 3.0], [1.0, Odd(), 3.0]):
        told = scores(lambda *, responses, prompts, values=values: values)
        assert [each.value for each in told] == [1.0, 0.0, 3.0]
        assert [bool(each.failure) for each in told] == [False, True, False]
    for array in (np.arange(3.0), np.arange(3) > 0):
        told = scores(lambda *, responses, prompt, array=array: array)
        assert [each.value for each in told] == [float(each) for each in array]
    assert score({"turns": np.array([True, False])}).turns == [1.0, 0.0]


@pytest.mark.parametrize("value", [True, np.True_, np.float32(1), np.array(1)])
def test_a_number_may_be_that_of_an_array(value: object) -> None:
    assert score(value).value == score({"reward": value}).value == 1.0


@pytest.mark.parametrize(
    ("value", "count"),
    [
        ([1.0], "a list of 1;"),
        (1.0, "a float"),
        ("abc", "a str"),
        (None, "NoneType"),
        (Told(1.0, {}), "a Told"),
        (np.ones((3, 1)), "a ndarray"),
        (np.array(1.0), "a ndarray"),
    ],
)
def test_of_many_a_list_is_wanted_as_long_as_they_are(value: object, count: str) -> None:
    function = read(lambda *, responses, prompts: value)
    answer = function.judge(function.call(responses=[], prompts=[]), samples=3)
    assert answer.failure == "invalid"
    assert count in answer.detail
    assert "a list of 3" in answer.detail


@given(st.integers(0, 5000), st.integers(0, 2000), st.integers(0, 2000))
def test_the_penalty_falls_linearly_beyond_its_target(length: int, target: int, width: int) -> None:
    assume(target or width)
    penalty = LengthPenalty(config={"target": target, "width": width})(length=length)
    if length <= target:
        assert penalty == 0.0
    elif length >= target + width:
        assert penalty == -1.0
    else:
        assert penalty == pytest.approx(-(length - target) / width)


@pytest.mark.parametrize("value", [object(), 10**30, "\ud800"])
def test_what_no_message_can_say_is_a_wrong_value(value: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        frame(Question(nonce=b"", examples=[Example(prompt="", response="", answer=value)], seconds=1.0))


def test_settings_of_the_penalty_are_checked() -> None:
    with pytest.raises(ManifestError, match=r"reward\.config: unknown option targets"):
        LengthPenalty(config={"targets": 3})
    with pytest.raises(ManifestError, match=r"reward\.config: .*>= 0.*width"):
        LengthPenalty(config={"width": -1})
    with pytest.raises(ManifestError, match=r"every response would have the reward -1\. Set target"):
        LengthPenalty(config={})


def test_a_server_is_not_asked_with_settings_that_have_no_meaning() -> None:
    for settings in ({"cache": -1}, {"retry_seconds": -1.0}):
        with pytest.raises(ManifestError, match=rf"reward\.config: .*>= 0.*{next(iter(settings))}"):
            Endpoint(config={"url": "http://judge", **settings})
