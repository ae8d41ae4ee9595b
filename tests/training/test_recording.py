"""Tests of what a rank writes down of its steps, and what is read of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from asyncflow.errors import AsyncFlowError
from asyncflow.identity import SampleKey, Version
from asyncflow.rpc.columns import Jagged
from asyncflow.training.batch import MicroBatch
from asyncflow.training.recording import (
    BeginRecord,
    StepRecord,
    StepRecorder,
    TokenRun,
    digest,
    ranks_of,
    read_records,
    runs_of,
    step_file,
)

MADE = [[(3, Version(0, 1))], [(2, Version(0, 1)), (4, Version(1, 2))], []]
"""Tokens by version of three responses, the last of which has none."""


def batch(**more: object) -> MicroBatch:
    lengths = [sum(tokens for tokens, _ in runs) for runs in MADE]
    columns = {
        "prompt_ids": Jagged.from_rows([[1, 2]] * 3, "int32"),
        "response_ids": Jagged.from_rows([np.arange(n) for n in lengths], "int32"),
        "logprobs": Jagged.from_rows([np.full(n, -0.1) for n in lengths], "float32"),
        "versions": Jagged.from_rows([[by.packed for n, by in runs for _ in range(n)] for runs in MADE], "int64"),
        "reward": Jagged.from_rows([[0.1], [0.0], [1.0]], "float32"),
        "advantage": Jagged.from_rows([[1 / 3], [-1.0], [0.0]], "float32"),
    }
    return MicroBatch.of([SampleKey(7, 0), SampleKey(7, 1), SampleKey(9, 0)], columns | more)


def test_what_was_trained_is_read_back_with_the_bits_of_its_numbers(tmp_path: Path) -> None:
    recorder = StepRecorder(tmp_path, rank=2, attempt=1, decided="advantage")
    recorder.begin(3, ranks=4)
    recorder.add(batch())
    recorder.add(MicroBatch.empty())
    recorder.finish(4)
    begun, made = read_records(tmp_path, 2)
    assert begun == BeginRecord(attempt=1, step=3, ranks=4)
    assert isinstance(made, StepRecord)
    assert (made.attempt, made.step, len(made.slots), made.slots[1]) == (1, 4, 2, [])
    assert made.decided == "advantage"
    samples = made.slots[0]
    assert [sample.key for sample in samples] == [(7, 0), (7, 1), (9, 0)]
    assert [[(run.tokens, run.version) for run in sample.runs] for sample in samples] == MADE
    assert [np.float32(sample.decided) for sample in samples] == [np.float32(1 / 3), -1, 0]
    assert np.float32(samples[0].reward) == np.float32(0.1)
    assert samples[1].ids == digest(np.arange(6, dtype=np.int32))
    assert ranks_of(tmp_path) == [2]


def test_advantages_of_tokens_are_left_out(tmp_path: Path) -> None:
    recorder = StepRecorder(tmp_path, rank=0, attempt=0, decided="advantage")
    recorder.add(batch(advantage=Jagged.from_rows([np.zeros(3), np.ones(6), []], "float32")))
    recorder.finish(1)
    (made,) = read_records(tmp_path, 0)
    assert isinstance(made, StepRecord)
    assert {sample.decided for sample in made.slots[0]} == {None}


def test_a_line_that_a_killed_process_left_costs_itself_alone(tmp_path: Path) -> None:
    recorder = StepRecorder(tmp_path, rank=0, attempt=0, decided="advantage")
    recorder.begin(0, ranks=1)
    with step_file(tmp_path, 0).open("ab") as file:
        file.write(b'{"type":"step","attempt":0,"st')
    StepRecorder(tmp_path, rank=0, attempt=1, decided="advantage").begin(0, ranks=1)
    assert [record.attempt for record in read_records(tmp_path, 0)] == [0, 1]


def test_a_disk_that_fails_stops_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "steps").write_text("in the way")
    recorder = StepRecorder(tmp_path, rank=0, attempt=0, decided="advantage")
    recorder.begin(0, ranks=1)
    recorder.finish(1)
    assert len(caplog.records) == 1
    (tmp_path / "steps").unlink()
    recorder.finish(2)
    assert [record.step for record in read_records(tmp_path, 0)] == [2]
    with pytest.raises(AsyncFlowError, match="no record of steps"):
        list(read_records(tmp_path, 5))


def test_tokens_of_one_version_in_a_row_are_one_run() -> None:
    first, second = Version(0, 3), Version(0, 4)
    versions = np.array([first.packed, first.packed, second.packed, first.packed])
    assert runs_of(versions) == [TokenRun(2, 0, 3), TokenRun(1, 0, 4), TokenRun(1, 0, 3)]
    assert runs_of(versions[:0]) == []
