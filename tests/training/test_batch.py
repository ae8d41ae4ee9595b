"""Tests of what a trainer makes of fetched columns: advantages by sample, by token, or the outcomes to make them of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncflow.errors import ProtocolError
from asyncflow.identity import SampleKey
from asyncflow.rpc.columns import Jagged
from asyncflow.training.batch import MicroBatch

LENGTHS = (3, 1, 0, 2)


def columns(**more: list[list[float]]) -> dict[str, Jagged]:
    kinds = {"prompt_ids": "int32", "response_ids": "int32", "logprobs": "float32", "versions": "int64"}
    made = {name: Jagged.from_rows([np.zeros(length) for length in LENGTHS], kind) for name, kind in kinds.items()}
    dtypes = {"loss_mask": "bool"}
    return made | {name: Jagged.from_rows(rows, dtypes.get(name, "float32")) for name, rows in more.items()}


def batch(first: int = 0, **more: list[list[float]]) -> MicroBatch:
    return MicroBatch.of([SampleKey(first + serial, 0) for serial in range(len(LENGTHS))], columns(**more))


def test_an_advantage_may_be_given_for_the_sample_or_for_each_of_its_tokens() -> None:
    by_sample = batch(advantage=[[1], [-2], [3], [0]])
    assert by_sample.credit().tolist() == [1, 1, 1, -2, 0, 0]
    assert by_sample.largest_advantages().tolist() == [1, 2, 3, 0]
    by_token = batch(advantage=[[1, -4, 0], [-2], [3], [0, 0]])
    assert by_token.credit().tolist() == [1, -4, 0, -2, 0, 0]
    assert by_token.largest_advantages().tolist() == [4, 2, 0, 0]
    assert by_token.take([3, 0]).credit().tolist() == [0, 0, 1, -4, 0]
    with pytest.raises(ProtocolError, match="have no advantages"):
        by_token.by_sample()


def test_only_tokens_that_count_make_a_sample_strong() -> None:
    mask = Jagged.from_rows([[True, False, True], [True], [], [False, True]], "bool")
    given = columns(advantage=[[1, -4, 0], [-2], [], [7, 0]]) | {"loss_mask": mask}
    found = MicroBatch.of([SampleKey(serial, 0) for serial in range(4)], given)
    assert found.largest_advantages().tolist() == [1, 2, 0, 0]


def test_an_advantage_of_a_turn_is_that_of_its_tokens() -> None:
    def turns(*advantages: list[float]) -> MicroBatch:
        lengths = (6, 1, 3)
        mask = [[True, True, False, False, True, True], [True], [True, False, True]]
        kinds = {"prompt_ids": "int32", "response_ids": "int32", "logprobs": "float32", "versions": "int64"}
        made = {name: Jagged.from_rows([np.zeros(length) for length in lengths], kind) for name, kind in kinds.items()}
        made |= {"loss_mask": Jagged.from_rows(mask, "bool"), "advantage": Jagged.from_rows(advantages, "float32")}
        return MicroBatch.of([SampleKey(serial, 0) for serial in range(3)], made)

    found = turns([3, -1], [2], [5])
    assert found.credit()[found.counted()].tolist() == [3, 3, -1, -1, 2, 5, 5]
    assert found.largest_advantages().tolist() == [3, 2, 5]
    assert turns([3, -1], [2], [5, 1, 4]).credit()[-3:].tolist() == [5, 1, 4], "one for each token"
    with pytest.raises(ProtocolError, match=r"sample \(0, 0\): advantage has 3 entries, not 6"):
        turns([3, -1, 1], [2], [5])


def test_batches_of_both_forms_are_joined() -> None:
    joined = MicroBatch.joined([batch(4, advantage=[[1, -4, 0], [-2], [3], [5, 6]]), batch(advantage=[[1]] * 4)])
    assert joined.credit().tolist() == [1, 1, 1, 1, 1, 1, 1, -4, 0, -2, 5, 6]
    assert joined.advantages is None


def test_what_is_learned_from_an_outcome_is_not_known_before_a_critic_has_seen_it() -> None:
    found = MicroBatch.joined([batch(outcome=[[1], [0], [1], [0]]), MicroBatch.empty()])
    assert found.required_outcomes().tolist() == [1, 0, 1, 0]
    assert np.isinf(found.largest_advantages()).all()
    with pytest.raises(ProtocolError, match="have no advantages"):
        found.credit()
    assert found.with_advantages(np.arange(6, dtype=np.float32)).credit().tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ProtocolError, match="have no outcomes"):
        batch(advantage=[[1]] * 4).required_outcomes()


def test_samples_of_a_group_with_the_same_strength_are_a_pair() -> None:
    keys = [SampleKey(1, 0), SampleKey(1, 1), SampleKey(2, 0), SampleKey(1, 2)]
    pairs = MicroBatch.of(keys, columns(advantage=[[0.5], [2], [-0.5], [-0.5]])).pairs()
    assert pairs[0] == pairs[3]
    assert len({*pairs.tolist()}) == 3
    assert MicroBatch.empty().pairs().tolist() == []


def test_the_maker_of_a_sample_is_the_version_of_all_its_tokens() -> None:
    made = columns() | {"versions": Jagged.from_rows([[7, 7, 8], [7], [], [0, 0]], "int64")}
    assert MicroBatch.of([SampleKey(serial, 0) for serial in range(4)], made).sole_versions().tolist() == [-1, 7, -1, 0]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"advantage": [[1, 2], [1], [1], [1]]}, r"sample \(0, 0\): advantage has 2 entries, not 3"),
        ({"advantage": [[1], [], [1], [1]]}, r"sample \(1, 0\): advantage has 0 entries, not 1"),
        ({"outcome": [[1], [1], [], [1]]}, r"sample \(2, 0\): outcome has 0 entries, not 1"),
        ({"advantage": [[1]] * 3}, "column advantage has 3 rows for 4 samples"),
        ({"advantage": [[1, 2]] * 3}, "column advantage has 3 rows for 4 samples"),
        (
            {"advantage": [[1, 2, 3], [1], [], [1, 2, 3]], "loss_mask": [[1, 1, 1], [1], []]},
            r"sample \(3, 0\): advantage has 3 entries, not 2",
        ),
        (
            {"advantage": [[1], [1], [1, 2], [1]], "loss_mask": [[1, 1, 1], [1], [], [1, 1]]},
            r"sample \(2, 0\): advantage has 2 entries, not 0",
        ),
        ({"reward": [[1], [np.nan], [1], [1]]}, r"sample \(1, 0\): reward is nan"),
    ],
)
def test_columns_that_disagree_are_refused(more: dict[str, Any], why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        batch(**more)
