"""Samples as padded tensors."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from asyncflow.identity import SampleKey, Version  # noqa: E402
from asyncflow.rpc.columns import Jagged  # noqa: E402
from asyncflow.session.experience import Experience  # noqa: E402
from asyncflow.training.batch import MicroBatch  # noqa: E402


def batch(**more):
    version = Version(3, 7).packed
    return MicroBatch(
        keys=[SampleKey(5, 0), SampleKey(5, 1)],
        prompts=Jagged.from_rows([[11, 12], [13]], "int32"),
        responses=Jagged.from_rows([[21], [22, 23, 24]], "int32"),
        logprobs=Jagged.from_rows([[-0.5], [-1.0, -2.0, -3.0]], "float32"),
        versions=Jagged.from_rows([[version], [version] * 3], "int64"),
        advantages=np.array([1.0, -1.0], np.float32),
        rewards=np.array([1.0, 0.0], np.float32),
        **more,
    )


def test_prompts_and_responses_lie_one_behind_the_other_and_are_filled_up_on_the_right():
    made = Experience.of(batch(), step=8)
    assert (made.step, len(made), list(made.keys)) == (8, 2, [(5, 0), (5, 1)])
    assert made.ids.tolist() == [[11, 12, 21, 0], [13, 22, 23, 24]]
    assert made.attention.tolist() == [[True, True, True, False], [True] * 4]
    assert made.mask.tolist() == [[False, False, True, False], [False, True, True, True]]
    assert made.logprobs.tolist() == [[0.0, 0.0, -0.5, 0.0], [0.0, -1.0, -2.0, -3.0]]
    assert made.versions.tolist() == [[-1, -1, 7, -1], [-1, 7, 7, 7]]
    assert (made.rewards.tolist(), made.advantages.tolist()) == ([1.0, 0.0], [1.0, -1.0])


def test_tokens_that_the_policy_did_not_choose_do_not_count():
    masked = batch(loss_mask=Jagged.from_rows([[True], [True, False, True]], "bool"))
    assert Experience.of(masked, step=1).mask.tolist() == [[False, False, True, False], [False, True, False, True]]


def test_tensors_may_be_changed():
    made = Experience.of(batch(), step=1).to("cpu")
    for tensor in (made.ids, made.logprobs, made.rewards, made.advantages):
        tensor.add_(1)
    assert made.advantages.tolist() == [2.0, 0.0]


def test_what_tasks_of_the_users_wrote_comes_with_the_samples():
    made = Experience.of(batch(extra={"mark": Jagged.from_rows([[0.5], [1.0, 2.0]], "float32")}), step=1).to("cpu")
    assert {name: column.tolist() for name, column in made.extra.items()} == {"mark": [[0.5, 0.0], [1.0, 2.0]]}


def test_an_empty_batch_has_no_samples():
    assert len(Experience.of(MicroBatch.empty(), step=1)) == 0
