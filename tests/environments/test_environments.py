"""Environments in their processes: answers, ends, failures as outcomes, and state made again from the transcript."""

from __future__ import annotations

import asyncio
import io
import re
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.api.load import load_job
from asyncflow.api.names import REWARD_SOCKET_ENV
from asyncflow.api.rewards import EnvironmentSpec, RewardSpec
from asyncflow.data.base import Message
from asyncflow.environments.calculator import answer as calculator
from asyncflow.environments.functions import check, load
from asyncflow.environments.pool import EnvironmentAnswer, open_environment
from asyncflow.environments.service import pools_by_socket
from asyncflow.errors import ManifestError
from asyncflow.rewards.service import open_rewards
from asyncflow.rewards.wire import Example

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GUIDE = ROOT / "docs" / "guide" / "multi-turn.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)


def example(*said: str, prompt: str = "", answer: object = None) -> Example:
    roles = ("assistant", "environment")
    transcript = [Message(role=roles[number % 2], content=text) for number, text in enumerate(said)]
    return Example(prompt=prompt, response=said[-1], answer=answer, meta={"n": 3}, transcript=transcript)


async def answers(function: str, examples: list[Example], **settings: object) -> list[EnvironmentAnswer]:
    spec = EnvironmentSpec(function=function, **settings)
    reward = RewardSpec.model_validate({"function": "task", "workers": {"min": 1, "max": 2}})
    environment = open_environment(spec, reward, workdir=HERE, run=HERE / "nowhere", within_s=20.0)
    await environment.start()
    try:
        return await asyncio.gather(*map(environment.answer, examples))
    finally:
        await environment.close()


async def test_an_environment_answers_ends_or_fails_and_that_is_the_outcome() -> None:
    prompts = ("say", "end", "raise", "number", "empty", "die")
    asked = [example("a", "b", "c", prompt=prompt, answer=["right"]) for prompt in prompts]
    said, ended, *failed = await answers("played:mood", asked, timeout_seconds=5.0, config={"before": "\n"})
    assert said == EnvironmentAnswer("\n3 assistant c ['right'] 3")
    assert ended == EnvironmentAnswer(None)
    assert [each.failure for each in failed] == ["raised", "invalid", "invalid", "died"]
    assert all(each.text is None and each.detail.startswith("the environment: ") for each in failed)
    assert "there is no door" in failed[0].detail


async def test_an_environment_may_be_async() -> None:
    assert await answers("played:awaited", [example("a"), example("b")]) == [
        EnvironmentAnswer("after a"),
        EnvironmentAnswer("after b"),
    ]


async def test_an_environment_that_hangs_is_ended_and_the_next_question_is_answered() -> None:
    asked = [example("a", prompt="hang"), example("a", prompt="end")]
    hung, ended = await answers("played:mood", asked, timeout_seconds=0.5)
    assert (hung.failure, ended) == ("timeout", EnvironmentAnswer(None))
    assert hung.detail == "the environment: a call took longer than environment.timeoutSeconds, 0.5 s"


async def test_an_object_is_made_again_from_the_transcript_for_each_question() -> None:
    turns = ["2", "5 left", "3", "2 left", "2"]
    asked = [example(*turns[:length], answer=7) for length in (1, 3, 5, 3)]
    found = await answers("played:Countdown", asked)
    assert found == [EnvironmentAnswer(text) for text in ("5 left", "2 left", None, "2 left")]


async def test_beside_a_rollout_turns_are_answered_where_samples_are_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a pod: one process listens at two sockets, and who asks loads nobody's code."""
    (tmp_path / "reward.yaml").write_text("function: task")
    (tmp_path / "environment.yaml").write_text("{function: calculator, config: {reply: '<{value}>'}}")
    sections = [f"--{name}={tmp_path / name}.yaml" for name in ("reward", "environment")]
    command = [sys.executable, "-m", "asyncflow", "rewards", *sections, f"--socket={tmp_path / 'socket'}"]
    monkeypatch.setenv(REWARD_SOCKET_ENV, str(tmp_path / "socket"))
    reward = RewardSpec(function="task")
    places = {"workdir": tmp_path, "run": tmp_path / "run", "within_s": 30.0}
    environment = open_environment(EnvironmentSpec(function="calculator"), reward, **places)
    rewards = open_rewards(reward, **places)
    process = await asyncio.create_subprocess_exec(*command)
    try:
        await environment.start()
        await rewards.start()
        asked = [environment.answer(example(text)) for text in ("calc(6*7)", "42")]
        assert await asyncio.gather(*asked) == [EnvironmentAnswer("<42>"), EnvironmentAnswer(None)]
        assert (await rewards.score([example("42", answer="42")]))[0].value == 1
    finally:
        await environment.close()
        await rewards.close()
        process.terminate()
        await process.wait()


def test_beside_a_rollout_nothing_is_scored_where_the_reward_is_a_role(tmp_path: Path) -> None:
    (tmp_path / "reward.yaml").write_text("{function: task, role: {}}")
    (tmp_path / "environment.yaml").write_text("function: calculator")
    reward, environment, socket = (tmp_path / name for name in ("reward.yaml", "environment.yaml", "socket"))
    assert [*pools_by_socket(reward, environment, path=socket)] == [tmp_path / "environment"]
    assert [*pools_by_socket(reward, None, path=socket)] == [socket], "as in the pods of that role"
    reward.write_text("function: task")
    assert [*pools_by_socket(reward, environment, path=socket)] == [socket, tmp_path / "environment"]


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("played:nothing", "has no function 'nothing'"),
        ("played:needs_more", "cannot be called"),
        ("played:NoStep", r"no method step\(text\).* Define it"),
        ("played:AsyncStep", "or it is async"),
    ],
)
def test_what_cannot_be_asked_is_refused_when_it_is_loaded(function: str, why: str) -> None:
    with pytest.raises(ManifestError, match=why):
        load(function, workdir=HERE)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"replay": "<{value}>"}, "unknown option replay. Known: name, reply"),
        ({"reply": "<value>"}, r"reply does not contain \{value\}"),
    ],
)
def test_settings_of_the_calculator_that_have_no_effect_are_refused(config: dict[str, str], why: str) -> None:
    with pytest.raises(ManifestError, match=rf"spec\.environment\.config: {why}"):
        load("calculator", workdir=HERE, config=config)


def test_what_is_nowhere_is_refused_without_running_code() -> None:
    check("calculator", workdir=HERE)
    check("played:mood", workdir=HERE)
    for wrong, why in {
        "calc": "is neither a built-in function nor module:function",
        "elsewhere:mood": "no module 'elsewhere'",
    }.items():
        with pytest.raises(ManifestError, match=why):
            check(wrong, workdir=HERE)


def calculated(text: str, **config: str) -> str | None:
    return calculator(
        transcript=[{"role": "assistant", "content": text}], prompt="", answer=None, meta={}, config=config
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("calc(47*86)", "4042"),
        ("first calc(1+1) and then calc((2 + 3) * -4)", "-20"),
        ("calc(1/3)", "0.3333333333"),
        ("calc(7/2) or so", "3.5"),
        ("calc(1/0)", "error"),
        ("calc(2**9)", "error"),
        ("calc(__import__('os').getpid())", "error"),
        ("calc(05*3)", "error"),
        (f"calc({'9' * 41})", "error"),
        (f"calc({'9' * 399}*{'9' * 399}/7)", "error"),
        ("calc(1) calc(2", "1"),
        ("4042", None),
        ("calc(", None),
        ("calc(" * 40_000, None),
        ("calc(2+(calc(3)) calc((4) (", "3"),
        ("(calc(2))) calc(3", "2"),
        ("miscalc(3)", None),
    ],
)
def test_the_calculator_answers_the_last_call(text: str, value: str | None) -> None:
    assert calculated(text) == (None if value is None else f"\n{value}\n")


def test_the_calculator_is_called_and_answers_as_the_manifest_says() -> None:
    assert calculated("<tool>eval(6*7)</tool>", name="eval", reply="<result>{value}</result>") == "<result>42</result>"
    assert calculated("calc(6*7)", name="eval") is None


def test_the_environments_of_the_guide_work_as_they_stand_there(tmp_path: Path) -> None:
    (code,) = (block for block in blocks("python") if block.startswith("# dungeon.py"))
    (tmp_path / "dungeon.py").write_text(code)
    asked = {"prompt": "", "answer": None, "meta": {}, "config": {"doors": 2}}
    said = ["look", "(a door)", "open door", "(another)", "I open door two"]
    turns = [{"role": ("assistant", "environment")[number % 2], "content": text} for number, text in enumerate(said)]
    for name, answers in (
        ("look", ["\nYou see a door. It is turn 1.\n", None, None]),
        ("Dungeon", ["\n2 doors are left.\n", "\n1 doors are left.\n", None]),
    ):
        environment = load(f"dungeon:{name}", workdir=tmp_path).call
        assert [environment(transcript=turns[:length], **asked) for length in (1, 3, 5)] == answers


async def test_the_judge_of_the_guide_rewards_turns_as_it_stands_there(tmp_path: Path) -> None:
    (code,) = (block for block in blocks("python") if block.startswith("# judge.py"))
    (manifest,) = (block for block in blocks("yaml") if "credit: turn" in block)
    (tmp_path / "judge.py").write_text(code)
    job = yaml.safe_load((ROOT / "examples" / "tools.yaml").read_text())
    for section, fields in yaml.safe_load(manifest).items():
        job["spec"][section] |= fields
    spec = load_job(io.StringIO(yaml.safe_dump(job))).spec
    assert spec.algorithm.credit == "turn"
    rewards = open_rewards(spec.reward, workdir=tmp_path, run=tmp_path / "run", within_s=30.0)
    await rewards.start()
    try:
        called, guessed = await rewards.score(
            [example("calc(6*7)", "\n42\n", "so 42", answer="42"), example("41", "\n", "41", answer="42")]
        )
    finally:
        await rewards.close()
    assert (called.value, called.turns) == (pytest.approx(1.1), pytest.approx([0.1, 1.0]))
    assert (guessed.value, guessed.turns) == (0.0, [0.0, 0.0])


@given(st.text(alphabet="calc()0123456789+-*/. e", max_size=40))
def test_the_calculator_always_answers(text: str) -> None:
    said = calculated(text)
    assert said is None or (len(said) < 60 and said.startswith("\n") and said.endswith("\n"))
