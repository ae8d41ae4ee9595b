"""Changes of a run's files for the page: each line once, and everything again when a file was replaced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from count_work import bytecodes

from asyncflow.driver.sample_files import SampleText, write_samples
from asyncflow.view.page import changes as module
from asyncflow.view.page.changes import FileCursor, changes
from asyncflow.view.page.texts import samples


def step(number: int, **figures: object) -> bytes:
    line = {"at": 100.0 + number, "step": number, "reward": 0.1234567891, "keys": "abc", "published": True, **figures}
    return json.dumps(line).encode() + b"\n"


def sample(**fields: object) -> SampleText:
    known: dict[str, object] = {
        "purpose": "train", "step": 1, "serial": 0, "sample": 0, "drawn": True, "prompt": "ask", "response": "secret",
        "answer": '"yes"', "reward": 1.0, "advantage": 0.5, "prompt_tokens": 3, "response_tokens": 1,
        "version_min": 0, "version_max": 1, "finish": "stop", "details": {"said": "secret"},
    }  # fmt: skip
    return SampleText(**{**known, **fields})  # type: ignore[arg-type]


def test_a_line_is_told_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    metrics, events = tmp_path / "metrics.jsonl", tmp_path / "events.jsonl"
    metrics.write_bytes(step(1, reward_components={"right": 0.5}))
    events.write_bytes(b'{"event":"driver started","at":1.0}\n{"event":"eval')
    first = changes(tmp_path, "")
    assert first["steps"] == {
        "at": [101.0], "step": [1], "reward": [0.123457], "component right": [0.5],
    }  # fmt: skip
    assert [event["event"] for event in first["events"]] == ["driver started"]
    again = changes(tmp_path, first["cursor"])
    assert (again["anew"], again["steps"], again["events"]) == (False, {}, [])
    with events.open("ab") as file:
        file.write(b'uation","at":2.0}\n')
    metrics.write_bytes(metrics.read_bytes() + step(2) + step(3, loss=1.0))
    later = changes(tmp_path, first["cursor"])
    assert later["steps"]["step"] == [2, 3]
    assert later["steps"]["loss"] == [None, 1.0]
    assert [event["event"] for event in later["events"]] == ["evaluation"]


def test_a_run_that_took_the_place_of_another_is_told_again(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(step(1) + step(2))
    cursor = changes(tmp_path, "")["cursor"]
    (tmp_path / "metrics.jsonl").rename(tmp_path / "old")
    (tmp_path / "metrics.jsonl").write_bytes(step(1) + step(2) + step(3))
    found = changes(tmp_path, cursor)
    assert (found["anew"], found["steps"]["step"]) == (True, [1, 2, 3])


def test_of_a_very_long_run_every_nth_step_is_told_and_the_newest(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "MOST_STEPS", 10)
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(step(number) for number in range(1, 36)))
    found = changes(tmp_path, "")
    assert found["every"] == 4
    assert found["steps"]["step"] == [3, 7, 11, 15, 19, 23, 27, 31, 35]
    work = bytecodes(lambda: changes(tmp_path, ""))
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(step(number) for number in range(1, 351)))
    assert changes(tmp_path, "")["every"] == 35
    assert bytecodes(lambda: changes(tmp_path, "")) < 1.3 * work, "the others are not read"


@pytest.mark.parametrize("text", ["", "x", "1-2-x", "-1-2", "1.5", "9" * 5000, "1-2-3-4-5-6-7-8", "\u0663-\u0664"])
def test_a_cursor_that_nobody_gave_out_is_one_that_can_be_read(text: str) -> None:
    assert FileCursor.parse(str(FileCursor.parse(text))) == FileCursor.parse(text)


def test_a_cursor_is_read_as_it_was_written() -> None:
    assert FileCursor.parse(str(FileCursor(1, 2, 3, 4, 5))) == FileCursor(1, 2, 3, 4, 5)


def test_steps_with_samples_are_told_when_some_were_added(tmp_path: Path) -> None:
    assert changes(tmp_path, "").get("samples") is None
    write_samples(tmp_path, [sample()], purpose="train", step=1, form="jsonl")
    found = changes(tmp_path, "")
    assert found["samples"] == {"train": [1], "eval": []}
    assert "samples" not in changes(tmp_path, found["cursor"])


def test_without_texts_nothing_that_a_model_or_a_reward_function_wrote_is_told(tmp_path: Path) -> None:
    write_samples(tmp_path, [sample()], purpose="train", step=1, form="jsonl")
    [shown] = samples(tmp_path, purpose="train", step=1, texts=True)
    assert shown["response"] == "secret"
    [bare] = samples(tmp_path, purpose="train", step=1, texts=False)
    assert set(shown) - set(bare) == {"prompt", "response", "answer", "details"}
    assert "secret" not in str(bare)
    assert samples(tmp_path, purpose="eval", step=1, texts=True) == []
