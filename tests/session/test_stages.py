"""The tasks of a job that are left to the user's process, and what may be written of their rows."""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from asyncflow.api.load import load_job  # noqa: E402
from asyncflow.errors import Refused  # noqa: E402
from asyncflow.session.stages import check_stage, written  # noqa: E402

COUNTING = Path(__file__).parents[2] / "examples" / "counting.yaml"
TASKS = (
    "tasks=[{name: mark, reads: [response_ids],"
    " writes: [{name: novelty, most: 2}, {name: right, dtype: bool, most: 1}]},"
    " {name: theirs, function: 'm:f', reads: [response_ids], writes: [{name: length}]}]"
)
SPEC = load_job(COUNTING, [TASKS, "trainer.external=true"]).spec


@pytest.mark.parametrize("stage", ["rollout", "advantage", "theirs", "experience", ""])
def test_what_the_job_does_itself_is_refused(stage):
    with pytest.raises(Refused, match=f"does not leave the task '{stage}' to you.*there is mark"):
        check_stage(SPEC, stage, ["response_ids"], where="here")


def test_what_a_task_does_not_read_is_refused():
    check_stage(SPEC, "mark", ["response_ids"], where="here")
    with pytest.raises(Refused, match=r"mark does not read 'reward'.*It reads response_ids"):
        check_stage(SPEC, "mark", ["response_ids", "reward"], where="here")


def test_values_become_columns_of_the_dtypes_of_the_manifest():
    made = written(SPEC, {"novelty": torch.tensor([[1, 2], [3, 4]]), "right": [True, False]}, 2, where="here")
    assert {name: (column.dtype, column.values.tolist()) for name, column in made.items()} == {
        "novelty": ("float32", [1.0, 2.0, 3.0, 4.0]),
        "right": ("bool", [True, False]),
    }
    assert made["novelty"].lengths.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"novelty": [1.0]}, r"writes \['novelty'\].*mark: novelty, right"),
        ({"novelty": [1.0], "right": [True], "length": [1]}, "no task that is left to you writes"),
        ({"length": [1.0]}, "no task that is left to you writes"),
        ({}, "no task that is left to you writes"),
        ({"novelty": [1.0, 2.0], "right": [True]}, "novelty has 2 values for 1 rows"),
        ({"novelty": torch.tensor(1.0), "right": [True]}, "novelty has a Tensor for 1 rows"),
        ({"novelty": [[1.0, 2.0, 3.0]], "right": [True]}, "3 entries, more than 2"),
        ({"novelty": [1.0], "right": [0.5]}, "no bool"),
        ({"novelty": ["far"], "right": [True]}, "no float32"),
        ({"novelty": np.array([None]), "right": [True]}, "no float32"),
    ],
)
def test_what_a_task_does_not_write_is_refused(data, why):
    with pytest.raises(Refused, match=why):
        written(SPEC, data, 1, where="here")
