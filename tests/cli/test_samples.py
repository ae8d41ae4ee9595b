"""``asyncflow samples``: what is shown of a run's folder, and what is said where nothing is."""

import json
from pathlib import Path

import pytest

from asyncflow import cli
from asyncflow.driver.sample_files import SAMPLES, SampleText, write_samples


def sample(
    serial: int, reward: float | None, *, drawn: bool = True, response: str = "yes", **more: object
) -> SampleText:
    fields: dict[str, object] = {
        "purpose": "train", "step": 1, "serial": serial, "sample": 0, "drawn": drawn, "prompt": "ask",
        "response": response, "answer": '"yes"', "reward": reward, "advantage": 0.5, "prompt_tokens": 3,
        "response_tokens": 1, "version_min": 0, "version_max": 1, "finish": "stop",
    }  # fmt: skip
    return SampleText(**{**fields, **more})  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").touch()
    kept = [sample(0, 0.25), sample(1, None, failure="raised"), sample(2, 0.5), sample(3, 9.0, drawn=False)]
    write_samples(tmp_path, kept, purpose="train", step=2, form="jsonl")
    hostile = sample(7, 1.0, response="\x1b[2Jred\u202e", details={"style": 0.75, "why": "[bold]none"})
    write_samples(tmp_path, [hostile], purpose="train", step=10, form="parquet")
    write_samples(tmp_path, [sample(4, 1.0, purpose="eval", advantage=None)], purpose="eval", step=5, form="jsonl")
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> list[int]:
    assert cli.invoke(["samples", *words, "--json"]) == 0
    return [one["serial"] for one in json.loads(capsys.readouterr().out)]


def test_the_newest_step_is_shown_or_the_one_that_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, str(run)) == [7]
    assert shown(capsys, str(run), "--step", "2") == [0, 1, 2]
    assert shown(capsys, str(run), "--step", "2", "-n", "2") == [0, 1]
    assert shown(capsys, str(run), "--eval") == [4]


def test_the_best_and_the_worst_come_first(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, str(run), "--step", "2", "--best") == [3, 2, 0]
    assert shown(capsys, str(run), "--step", "2", "--worst", "-n", "2") == [0, 2]


def test_texts_cannot_command_the_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.invoke(["samples", str(run)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\u202e" not in out
    for words in (r"\x1b[2Jred\u202e", "[bold]none", "0.75", "reward 1.000", "θ0 to θ1", "1 of the 1 kept samples"):
        assert words in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--step", "3"], "no samples are kept of step 3. Of 2, there are 2, 10"),
        (["--eval", "--step", "0"], "no samples are kept of evaluation 0. Of 1, there are 5"),
    ],
)
def test_a_step_without_samples_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert cli.invoke(["samples", str(run), *words]) == 2
    assert said in capsys.readouterr().err


def test_where_there_are_none_it_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.invoke(["samples", str(tmp_path)]) == 2
    assert "there is no run" in capsys.readouterr().err
    (tmp_path / "job.yaml").touch()
    assert cli.invoke(["samples", str(tmp_path)]) == 2
    assert "storage.samples.perStep is 0" in capsys.readouterr().err
    (tmp_path / SAMPLES).mkdir()
    (tmp_path / SAMPLES / "step-000001.jsonl").write_text('{"half')
    assert cli.invoke(["samples", str(tmp_path)]) == 1
    assert "step-000001.jsonl: cannot be read" in capsys.readouterr().err
