"""Prompt sources: random access, pure, disjoint, distinct where held out; and every way to be wrong about one."""

import json
from itertools import islice
from pathlib import Path

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.api.learning import EvalDataSpec, TrainDataSpec
from asyncflow.data import base
from asyncflow.data.base import HELD_OUT_SHARE, GeneratedSource, Prompt, PromptSource, digest, held_out
from asyncflow.data.generated import PRODUCTS, TASKS, TinyTask
from asyncflow.data.sources import check_disjoint, open_source
from asyncflow.environments.calculator import answer as calculator
from asyncflow.errors import ManifestError

GYM = {"source": "gym://chain_sum", "config": {"max_terms": 3, "max_digits": 2}, "seed": 7}
TINY = {"source": "tiny://reverse-digits", "seed": 7}


def opened(purpose: str, workdir: Path = Path(), **spec: object) -> PromptSource:
    cache = Path(str(spec["source"]).partition("://")[2]).parent
    kind = EvalDataSpec if purpose == "eval" else TrainDataSpec
    return open_source(kind(**spec), workdir=workdir, cache=cache, where=f"data.{purpose}")


ROWS = [{"question": f"What is {n} + 1?", "answer": str(n + 1), "level": n % 3} for n in range(400)]


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    return tmp_path


@pytest.fixture(params=["gym", "tiny", "jsonl", "parquet", "dataset"])
def spec(request: pytest.FixtureRequest, jsonl: Path) -> dict[str, object]:
    if request.param in ("gym", "tiny"):
        return {"gym": GYM, "tiny": TINY}[request.param]
    path = jsonl / f"data.{request.param}"
    if request.param != "jsonl":
        rows = Dataset.from_list(ROWS)
        rows.to_parquet(path) if request.param == "parquet" else rows.save_to_disk(path)
    return {"source": f"{request.param}://{path}?prompt=question", "seed": 7, "config": {"split": "hash"}}


def test_a_prompt_is_a_pure_function_of_its_serial(spec: dict[str, object]) -> None:
    for purpose in ("train", "eval"):
        spec = {**spec, "size": 64} if purpose == "eval" else spec
        first = opened(purpose, **spec)
        prompts = [first.prompt(serial) for serial in range(40)]
        again = opened(purpose, **spec)
        assert [again.prompt(serial) for serial in reversed(range(40))] == prompts[::-1]
        other = opened(purpose, **{**spec, "seed": 8})
        assert [other.prompt(serial) for serial in range(40)] != prompts
        assert [Prompt.unpack(prompt.packed()) for prompt in prompts] == prompts


def test_training_and_held_out_are_disjoint_whatever_the_seeds(spec: dict[str, object]) -> None:
    training = opened("train", **{**spec, "seed": 1})
    trained = {training.prompt(serial).question for serial in range(1500)}
    for seed in (1, 2):
        source = opened("eval", **{**spec, "seed": seed, "size": 64})
        asked = [source.prompt(serial).question for serial in range(64)]
        assert len(set(asked)) == 64
        assert trained.isdisjoint(asked)
        with pytest.raises(IndexError, match="64 held-out"):
            source.prompt(64)


@given(st.integers(0, 2**31 - 1), st.integers(0, 10**6))
def test_no_training_prompt_of_the_tiny_task_is_ever_held_out(seed: int, serial: int) -> None:
    prompt = opened("train", **{**TINY, "seed": seed}).prompt(serial)
    assert not held_out(prompt.question)
    assert prompt.question[:5][::-1] == prompt.answer


def test_the_share_held_out_is_as_stated_and_ignores_white_space() -> None:
    kept = sum(held_out(f"question {n}") for n in range(4000)) / 4000
    assert abs(kept - HELD_OUT_SHARE) < 0.03
    assert all(held_out(f"question {n}") == held_out(f" question\n{n}  ") for n in range(100))


def test_the_next_release_splits_and_orders_prompts_as_this_one() -> None:
    assert digest("a", 1) == 4665976284724862560
    assert [n for n in range(20) if held_out(f"question {n}")] == [5, 9, 11, 16]


def solved(question: str) -> str:
    """Return the right answer to a tiny question."""
    first, _, second = question[:-1].partition("*")
    return str(int(first) * int(second)) if second else first[::-1]


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_a_lesson_never_shows_a_held_out_prompt(task: TinyTask) -> None:
    lesson = task.lesson(seed=0)
    pairs = [next(lesson) for _ in range(2000)]
    assert not any(held_out(question) for question, _ in pairs)
    right = sum(turns[-1] == solved(question) for question, turns in pairs) / 2000
    assert right == pytest.approx(task.habits[0][0], abs=0.03)
    assert sum(share for share, _ in task.habits) == pytest.approx(1)


def test_a_lesson_shows_what_the_calculator_says() -> None:
    lesson = PRODUCTS.lesson(seed=0)
    called = [turns for _, turns in islice(lesson, 200) if len(turns) > 1]
    assert len(called) > 80
    for call, value, _ in called:
        transcript = [{"role": "assistant", "content": call}]
        assert calculator(transcript=transcript, prompt="", answer=None, meta={}, config={}) == value


def test_a_generator_with_too_few_questions_is_refused() -> None:
    def generate(index: int) -> Prompt:
        return Prompt(question=f"q{index % 40}")

    few = {"name": "few", "indices": 1000, "seed": 0, "where": "data"}
    source = GeneratedSource(generate, purpose="eval", size=20, **few)
    number = sum(held_out(f"q{n}") for n in range(40))
    assert len({source.prompt(serial).question for serial in range(number)}) == number
    with pytest.raises(ManifestError, match=f"only {number} different held-out"):
        source.prompt(number)
    one = GeneratedSource(
        lambda _: next(Prompt(question=q) for q in map(str, range(99)) if held_out(q)), **few, purpose="train"
    )
    with pytest.raises(ManifestError, match="only 0 different training"):
        one.prompt(0)


def test_a_set_with_too_few_questions_is_named() -> None:
    few = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
    data = EvalDataSpec(source="gym://chain_sum", config=few, size=512)
    with pytest.raises(ManifestError, match=r"^data\.evalSets\[sums\]: "):
        open_source(data, workdir=Path(), cache=Path(), where="data.evalSets[sums]").prompt(511)


def test_chain_sum_of_two_digits_has_enough_held_out_prompts_and_one_digit_has_not() -> None:
    terms = {"min_terms": 2, "max_terms": 2}
    many = opened("eval", source="gym://chain_sum", config={**terms, "min_digits": 2, "max_digits": 2}, size=512)
    assert len({many.prompt(serial).question for serial in range(512)}) == 512
    few = opened("eval", source="gym://chain_sum", config={**terms, "max_digits": 1}, size=512)
    with pytest.raises(ManifestError, match="different held-out"):
        few.prompt(511)


def test_an_epoch_of_a_file_has_every_line_once_in_a_new_order(jsonl: Path) -> None:
    source = opened("train", jsonl, source="data.jsonl?prompt=question")
    assert source.size is not None
    epochs = [[source.prompt(e * source.size + n).question for n in range(source.size)] for e in range(3)]
    assert len(set(epochs[0])) == source.size
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1] != epochs[2]
    prompt = source.prompt(0)
    assert prompt.meta.keys() == {"level"}
    assert int(prompt.answer) == int(prompt.question.split()[2]) + 1


def test_a_file_is_used_whole_unless_a_split_is_asked_for_but_not_for_both(jsonl: Path) -> None:
    spec = {"source": "data.jsonl?prompt=question"}
    train, evaluation = opened("train", jsonl, **spec), opened("eval", jsonl, **spec, size=400)
    assert train.size == evaluation.size == 400
    with pytest.raises(ManifestError, match=r"400 held-out prompts are also trained on.*split: hash"):
        check_disjoint(train, evaluation)
    check_disjoint(opened("train", **TINY), evaluation)
    kept = sum(held_out(row["question"]) for row in ROWS)
    spec["config"] = {"split": "hash"}
    halves = [opened("train", jsonl, **spec), opened("eval", jsonl, **spec, size=kept)]
    assert [half.size for half in halves] == [400 - kept, kept]
    with pytest.raises(ManifestError, match=f"has {kept} held-out prompts, not {kept + 1}. Set size to {kept}, or add"):
        opened("eval", jsonl, **spec, size=kept + 1)
    check_disjoint(*halves)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"source": "gym://chain_sums"}, "similar names: chain_sum"),
        ({"source": "gym://chain_sum", "config": {"max_term": 3}}, "refuses the config"),
        ({"source": "gym://chain_sum", "config": {"max_digits": 0}}, "refuses the config"),
        (
            {"source": "gym://chain_sum", "config": {"seed": 3}},
            r"config: seed is not a setting .* Set data\.train\.seed",
        ),
        ({"source": "tiny://chess"}, "Use one of: reverse-digits"),
        ({"source": "tiny://reverse-digits", "config": {"digits": 4}}, "unknown fields"),
        ({"source": "ftp://host/file"}, "is not a source"),
        ({"source": "jsonl://"}, "does not have the form"),
        ({"source": "data.jsonl?question=q"}, "does not have the form"),
        ({"source": "absent.jsonl"}, "cannot be read"),
        ({"source": "data.jsonl"}, r"data\.jsonl:1: the row has no field 'prompt'"),
        ({"source": "data.jsonl?prompt=level"}, "neither a string nor a list of messages"),
        ({"source": "data.jsonl?prompt=question", "size": 1000}, "held-out prompts, not 1000"),
        ({"source": "data.jsonl?prompt=question", "config": {"split": "half"}}, "is invalid"),
        ({"source": "broken.jsonl"}, r"broken\.jsonl:2: the line is not JSON"),
        ({"source": "empty.jsonl"}, r"empty\.jsonl: there are no rows"),
        ({**TINY, "config": {"template": "no question"}}, "template is not a setting of the source"),
    ],
)
def test_what_is_wrong_with_a_source_is_said_when_it_is_opened(jsonl: Path, spec: dict, said: str) -> None:
    (jsonl / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt": ')
    (jsonl / "empty.jsonl").write_text("")
    with pytest.raises(ManifestError, match=said):
        opened("eval" if "size" in spec else "train", jsonl, **spec)


def test_the_share_held_out_may_be_another_but_must_be_the_same_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "allow_negation": True}

    def sums(purpose: str, **more: object) -> PromptSource:
        size = {"size": 400} if purpose == "eval" else {}
        return opened(purpose, source="gym://chain_sum", config={**config, **more}, **size)

    train, evaluation = sums("train", held_out=0.6), sums("eval", held_out=0.6)
    check_disjoint(train, evaluation)
    kept = {evaluation.prompt(serial).question for serial in range(400)}
    assert len(kept) == 400
    assert not kept & {train.prompt(serial).question for serial in range(2000)}
    with pytest.raises(ManifestError, match="holds out"):
        check_disjoint(sums("train"), evaluation)
    for share in (0, 1, 1.5, True, "half"):
        with pytest.raises(ManifestError, match=f"held_out = {share!r}"):
            sums("train", held_out=share)
    monkeypatch.setattr(base, "_TRIES", 20)
    with pytest.raises(ManifestError, match="only 0 different training"):
        sums("train", held_out=0.9999)
