"""A reward that is a sum: values, failures, details and bounds of its components, in real processes."""

import json
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from scoring_one import one

from asyncflow.api.rewards import RewardSpec
from asyncflow.data.base import Message
from asyncflow.errors import ManifestError
from asyncflow.rewards.components import Component, WeightedRewards
from asyncflow.rewards.wire import MOST_DETAILS, Example, RewardResult, Score

FUNCTIONS = """
    def right(*, response, answer):
        if response == "raise":
            raise KeyError(response)
        return {"reward": float(response == answer), "details": {"said": response[:3000]}}

    def share(*, responses, prompt, config):
        if "nan" in responses:
            return [float("nan")] * len(responses)
        longest = max(map(len, responses))
        return [{"reward": len(each) / longest, "details": {"of": len(responses), **config}} for each in responses]

    def by_turn(*, transcript, answer):
        turns = [turn["content"] for turn in transcript if turn["role"] == "assistant"]
        return {"turns": [0.25] * (len(turns) - (answer == "miscounted"))}
"""
COMPONENTS = [
    {"name": "right", "function": "mine:right", "weight": 2.0, "extractor": "last_number"},
    {"name": "share", "function": "mine:share", "weight": 0.5, "config": {"unit": "characters"}},
    {"name": "length", "function": "length", "config": {"target": 2, "width": 4}},
]


def spec(**said: Any) -> RewardSpec:
    return RewardSpec.model_validate({"components": COMPONENTS, "timeout_seconds": 5.0, **said})


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(textwrap.dedent(FUNCTIONS))
    return tmp_path


async def score(workdir: Path, wanted: RewardSpec, *responses: str) -> list[RewardResult]:
    rewards = WeightedRewards.of(wanted, workdir=workdir)
    try:
        await rewards.start()
        assert rewards.by_group
        examples = [Example(prompt="p", response=each, answer="7", length=len(each)) for each in responses]
        return await rewards.score(examples)
    finally:
        await rewards.close()


async def test_components_are_summed_by_their_weights_and_kept(workdir: Path) -> None:
    right, wrong = await score(workdir, spec(), "it is 7", "8")
    assert right.components == {"right": 1.0, "share": 1.0, "length": -1.0}
    assert right.value == 2.0 + 0.5 - 1.0
    assert wrong.components == {"right": 0.0, "share": 1 / 7, "length": 0.0}
    assert wrong.value == pytest.approx(0.5 / 7)
    assert json.loads(right.details) == {"right": {"said": "7"}, "share": {"of": 2, "unit": "characters"}}


async def test_rewards_of_turns_are_summed_and_what_is_for_the_sample_goes_to_the_last(workdir: Path) -> None:
    components = [{"name": "by-turn", "function": "mine:by_turn", "weight": 2.0}, COMPONENTS[2]]
    rewards = WeightedRewards.of(spec(components=components), workdir=workdir)
    said = [Message("assistant", "a"), Message("environment", "b"), Message("assistant", "c")]
    examples = [
        Example(prompt="p", response="c", answer=answer, length=6, transcript=said) for answer in ("7", "miscounted")
    ]
    try:
        await rewards.start()
        right, wrong = await rewards.score(examples)
    finally:
        await rewards.close()
    assert (right.value, right.turns) == (0.0, [0.5, -0.5])
    assert right.tags["turn_rewards"] == "[0.5,-0.5]"
    assert (wrong.failure, wrong.turns) == ("invalid", [])
    assert "rewards of 1 turns; there are 2" in wrong.detail


async def test_a_component_without_a_value_leaves_the_sample_without_a_reward(workdir: Path) -> None:
    failing = [{**COMPONENTS[0], "extractor": None}, *COMPONENTS[1:]]
    raised, fine = await score(workdir, spec(components=failing), "raise", "7")
    assert (raised.value, raised.failure) == (0.0, "raised")
    assert raised.detail.startswith("component right: Traceback")
    assert set(raised.components) == {"share", "length"}
    assert (fine.failure, fine.components["right"]) == ("", 1.0)
    invalid = await score(workdir, spec(), "nan", "7")
    assert [(each.failure, each.detail) for each in invalid] == [
        ("invalid", "component share: the reward function returned nan; it must return a finite number")
    ] * 2


async def test_bounds_are_those_of_the_sum(workdir: Path) -> None:
    over, fine = await score(workdir, spec(max=2.0), "7", "12")
    assert (over.failure, over.detail) == ("out_of_range", "2.25 is not between reward.min -1e+06 and reward.max 2")
    assert over.components["right"] == 1.0
    assert fine.failure == ""


class Says:
    """A pool whose process says these scores."""

    takes = "sample"

    def __init__(self, *scores: Score) -> None:
        self._scores = scores

    async def score(self, examples: Sequence[Example]) -> Sequence[Score]:
        assert len(examples) == len(self._scores)
        return self._scores


async def weighed(*scores: Score, transcript: Sequence[Message] = (), name: str = "") -> list[RewardResult]:
    rewards = WeightedRewards([Component(name, 2.0, Says(*scores))], low=-1.0, high=3.0)  # type: ignore[arg-type]
    return await rewards.score([Example(prompt="p", response="r", transcript=[*transcript])] * len(scores))


async def test_a_sum_may_be_as_low_and_as_high_as_its_bounds() -> None:
    values = (-0.5, 1.5, -0.51, 1.51)
    found = await weighed(*(Score(value=value) for value in values))
    assert [(each.value, each.failure) for each in found] == [
        (-1.0, ""),
        (3.0, ""),
        (0.0, "out_of_range"),
        (0.0, "out_of_range"),
    ]


async def test_sums_that_differ_only_by_rounding_are_equal() -> None:
    weights = {"right": 0.7, "format": 0.2, "short": 0.1}
    yes, no = Score(value=1.0), Score(value=0.0)
    scores = {"right": (yes, no, Score(value=3 / 7)), "format": (yes, yes, no), "short": (yes, yes, no)}
    components = [Component(name, weight, Says(*scores[name])) for name, weight in weights.items()]  # type: ignore[arg-type]
    rewards = WeightedRewards(components, low=-1.0, high=1.0)
    found = await rewards.score([Example(prompt="p", response="r")] * 3)
    assert [each.value for each in found] == [1.0, 0.3, 0.3], "0.7 + 0.2 + 0.1 is 0.9999999999999999 in float64"


async def test_rewards_of_turns_that_do_not_add_up_to_the_samples_are_none() -> None:
    said = [Message("assistant", "a"), Message("environment", "b"), Message("assistant", "c")]
    turns = [[0.5, 0.25], [0.5, 0.5], [math.inf, -math.inf], [1e308, 1e308], [math.nan, 0.0]]
    right, *wrong = await weighed(*(Score(value=0.75, turns=each) for each in turns), transcript=said)
    assert (right.failure, right.turns) == ("", [1.0, 0.5])
    assert [(each.failure, each.turns) for each in wrong] == [("invalid", [])] * 4


async def test_no_details_of_a_process_end_the_one_that_asks() -> None:
    nested = [b'{"a":' + b"[" * depth + b"]" * depth + b"}" for depth in range(1, 1020)]
    wrong = [b"\xff", b"[]", b'{"a":1e999}', b'{"a":"\\ud800"}']
    found = await weighed(*(Score(details=each) for each in [*nested, *wrong]), name="x")
    assert found[0].details == b'{"x":{"a":[]}}'
    assert [each.details for each in found[-len(wrong) :]] == [b""] * len(wrong)
    deepest = found[len(nested) - 1].details
    assert deepest in (b"", b'{"omitted_bytes":2050}'), "how deep JSON may be depends on the recursion limit"


def test_of_a_long_traceback_the_end_travels_with_the_sample() -> None:
    failed = RewardResult(value=0.0, failure="raised", detail="Traceback\n" + "  File\n" * 1000 + "KeyError: 'x'")
    told = str(failed.tags["detail"])
    assert told.endswith("KeyError: 'x'")
    assert len(told) < 2000


async def test_details_of_all_components_together_are_bounded(workdir: Path) -> None:
    plain = [{"name": name, "function": "mine:right"} for name in ("a", "b")]
    rewards = WeightedRewards.of(spec(components=plain), workdir=workdir)
    await rewards.start()
    fits, large = [await one(rewards, Example(prompt="", response="x" * size)) for size in (900, 1500)]
    await rewards.close()
    assert json.loads(fits.details) == {name: {"said": "x" * 900} for name in "ab"}
    assert len(large.details) <= MOST_DETAILS
    assert set(json.loads(large.details)) == {"omitted_bytes"}


async def test_a_component_that_cannot_be_loaded_is_named(workdir: Path) -> None:
    absent = [*COMPONENTS, {"name": "absent", "function": "mine:absent"}]
    with pytest.raises(ManifestError, match="'mine:absent' cannot be loaded"):
        await score(workdir, spec(components=absent), "7")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"components": []}, "one function or components"),
        ({"function": "task"}, "one function or components"),
        ({"config": {"a": 1}}, "each component has its own config"),
        ({"components": [COMPONENTS[0]] * 2}, "the same name"),
        ({"components": [{"name": "a", "function": "http"}]}, "opens network connections"),
        ({"components": [], "function": "http"}, "opens network connections"),
    ],
)
def test_a_reward_is_one_function_or_components(said: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        spec(**said)
