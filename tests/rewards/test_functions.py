"""Extractors, the registry, and the built-in functions inside real reward processes."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scoring_one import one

from asyncflow.data.generated import open_gym
from asyncflow.errors import ManifestError
from asyncflow.rewards.functions import boxed, check, exact, last_number, load, text
from asyncflow.rewards.pool import PoolLimits, RewardPool
from asyncflow.rewards.process import Scorer
from asyncflow.rewards.wire import Example


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("The answer is 5.", "5"),
        ("5 - 7 = -2", "-2"),
        ("3-2", "2"),
        ("= \N{MINUS SIGN}4", "-4"),
        ("so 1,000 - 1 = +999.", "999"),
        ("3.50 or 3,5", "5"),
        ("1,234,567.25", "1234567.25"),
        ("(-8)", "-8"),
        ("it is .5", "0.5"),
        ("-.25", "-0.25"),
        ("and so on ...7", "7"),
        ("1.2.3", "3"),
        ("none", ""),
        ("", ""),
    ],
)
def test_last_number(response: str, number: str) -> None:
    assert last_number(response) == number


@given(st.text(alphabet="abc =.\n"), st.integers(-(10**9), 10**9))
def test_last_number_finds_any_number_at_the_end(before: str, number: int) -> None:
    assert last_number(f"{before} {number}") == str(number)
    assert last_number(f"{before} {number:,}.") == str(number)


def test_boxed() -> None:
    assert boxed(r"\boxed{1} then \boxed{\frac{1}{2} }") == r"\frac{1}{2}"
    assert boxed(r"\boxed{1") == ""
    assert boxed(r"\boxed{1}, or \boxed{2") == "1"
    assert boxed("1") == ""
    assert text(" a b\n") == "a b"


def test_the_registry_refuses_what_it_can_tell_without_running_code(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit")
    check("mine:score", "text", workdir=tmp_path)
    check("task", "last_number", workdir=tmp_path)
    for function, extractor in [("task", "nose"), ("tasks", "text"), ("a:b:c", "text"), ("absent_one:f", "text")]:
        with pytest.raises(ManifestError, match="reward"):
            check(function, extractor, workdir=tmp_path)


@pytest.mark.parametrize("answer", [None, "", " "])
def test_task_raises_where_the_source_has_no_answer(answer: object) -> None:
    for response in ("None", "", "3"):
        with pytest.raises(ValueError, match=f"the source's answer is {answer!r}: .* remove the prompt"):
            exact(response=response, answer=answer)
    assert exact(response="0", answer=0) == 1


async def test_math_verify_runs_in_the_main_thread_of_a_child(tmp_path: Path) -> None:
    pool = RewardPool(Scorer(function="math_verify", workdir=tmp_path), PoolLimits(timeout_s=30))
    await pool.start()
    responses = [r"so it is $\frac{1}{2}$", "The answer is 0.5", r"\boxed{0.50}", "it is 3", ""]
    results = [await one(pool, Example(prompt="", response=r, answer=r"\frac{1}{2}")) for r in responses]
    await pool.close()
    assert [r.value for r in results] == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert not any(r.failure for r in results)


@pytest.mark.parametrize(
    ("boxed_answer", "answer", "value"),
    [
        (r"\sqrt{3}", r"\sqrt{3}", 1.0),
        (r"\dfrac{1}{2}", "0.5", 1.0),
        ("2^{10}", "1024", 1.0),
        ("x + 1", "1 + x", 1.0),
        ("(1, 2)", "(1,2)", 1.0),
        (r"2\pi", "2", 0.0),
        ("72", "72", 1.0),
    ],
)
def test_math_verify_reads_what_was_in_a_box_as_mathematics(boxed_answer: str, answer: str, value: float) -> None:
    found = load("math_verify", workdir=Path(), place={"extractor": "boxed"})
    example = Example(prompt="", response=rf"So it is \boxed{{{boxed_answer}}}.", answer=answer)
    assert found.call(**found.arguments([example], extractor=boxed)) == value


@pytest.mark.parametrize("answer", [None, "", " ", "$$", r"\boxed{}"])
def test_math_verify_raises_where_the_source_s_answer_cannot_be_read(answer: object) -> None:
    found = load("math_verify", workdir=Path(), place={"extractor": "boxed"})
    for response in (r"\boxed{None}", r"\boxed{}", "3"):
        with pytest.raises(ValueError, match=f"the source's answer is {re.escape(repr(answer))}"):
            found.call(**found.arguments([Example(prompt="", response=response, answer=answer)], extractor=boxed))


async def test_gym_scores_with_the_datasets_own_checker(tmp_path: Path) -> None:
    source = open_gym("chain_sum", config={"max_terms": 3}, seed=1, purpose="train", size=None, where="data.train")
    prompt = source.prompt(0)
    pool = RewardPool(Scorer(function="gym", extractor="last_number", workdir=tmp_path), PoolLimits(timeout_s=30))
    await pool.start()

    async def value(response: str) -> float:
        example = Example(prompt=prompt.question, response=response, answer=prompt.answer, meta=prompt.meta)
        return (await one(pool, example)).value

    assert await value(f"I think it is {prompt.answer}.00!") == 1.0
    assert await value(f"{int(prompt.answer) + 1}") < 1.0
    assert await value("no idea") < 1.0
    assert (await one(pool, Example(prompt="", response="1", answer="1"))).failure == "raised"
    await pool.close()


def test_gym_raises_where_the_prompt_is_broken_and_not_where_the_answer_is() -> None:
    from asyncflow.rewards.gym import score

    source = open_gym("prime_factorization", config={}, seed=1, purpose="train", size=None, where="data.train")
    prompt = source.prompt(0)
    asked = {"prompt": prompt.question, "meta": prompt.meta}
    assert score(response=prompt.answer, answer=prompt.answer, **asked) == 1.0
    assert score(response="no idea", answer=prompt.answer, **asked) == 0.0
    with pytest.raises(AttributeError, match="list"):
        score(response="no idea", answer=["no", "text"], **asked)


async def test_task_compares_exactly(tmp_path: Path) -> None:
    pool = RewardPool(Scorer(function="task", workdir=tmp_path))
    await pool.start()
    values = [(await one(pool, Example(prompt="", response=r, answer="012"))).value for r in ("012", "12", "0123")]
    await pool.close()
    assert values == [1.0, 0.0, 0.0]
