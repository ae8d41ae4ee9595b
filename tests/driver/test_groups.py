"""What becomes of a finished group: an advantage, or a reason."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from asyncflow.driver.groups import DROPPED_REWARD_TIMEOUT, FILTERED_ZERO_VARIANCE, GroupPolicy, Groups
from asyncflow.errors import ManifestError
from asyncflow.queue.protocol.messages import LeasedRow, RowMeta


def policy(**changes: object) -> GroupPolicy:
    settings = {"estimator": "grpo", "drop_zero_variance": False, "most_filtered": 1, "drop_timeouts": False} | changes
    return GroupPolicy(**settings)  # type: ignore[arg-type]


def test_a_group_without_variance_is_kept_or_filtered() -> None:
    rewards = np.ones(4)
    assert policy().refusal(rewards, [""] * 4) is None
    assert policy(drop_zero_variance=True).refusal(rewards, [""] * 4) == FILTERED_ZERO_VARIANCE
    assert policy(drop_zero_variance=True).refusal(np.array([0.0, 1.0]), ["", ""]) is None


def test_a_reward_that_timed_out_drops_its_group_only_where_that_is_asked_for() -> None:
    rewards = np.array([0.0, 1.0])
    assert policy().refusal(rewards, ["timeout", ""]) is None
    assert policy(drop_timeouts=True).refusal(rewards, ["timeout", ""]) == DROPPED_REWARD_TIMEOUT


def test_shuffling_permutes_within_the_group_and_is_a_function_of_the_serial() -> None:
    rewards = np.array([0.0, 0.0, 0.0, 1.0, 1.0, 2.0])
    plain, shuffled = policy(), policy(shuffle_seed=3)
    once = shuffled.advantages(7, rewards)
    assert np.array_equal(once, shuffled.advantages(7, rewards))
    assert np.allclose(np.sort(once), np.sort(plain.advantages(7, rewards)))
    different = [not np.array_equal(shuffled.advantages(serial, rewards), once) for serial in range(20)]
    assert any(different)


def test_advantages_are_the_estimators() -> None:
    assert policy(estimator="dr-grpo").advantages(0, np.array([0.0, 1.0])).tolist() == pytest.approx([-0.5, 0.5])


class Finished:
    """A queue with finished groups of one step, which all have one reward but those of ``varied``."""

    def __init__(self, *, reward: float, varied: frozenset[int] = frozenset(), groups: int = 1000) -> None:
        self._groups = self._rows(reward, varied, groups)
        self.dropped: list[str] = []

    def _rows(self, reward: float, varied: frozenset[int], groups: int) -> Iterator[list[LeasedRow]]:
        for serial in range(groups):
            values = [reward, reward + (serial in varied)]
            metas = [
                RowMeta(partition="train", serial=serial, sample=sample, step=1 + serial % 2, tags={"reward": value})
                for sample, value in enumerate(values)
            ]
            yield [
                LeasedRow(row=meta.sample, meta=meta, attempt=0, lease="l", until=1, unit=0, bytes={}) for meta in metas
            ]

    async def claim(self, **_: Any) -> list[LeasedRow]:
        group = next(self._groups, None)
        if group is None:
            raise TimeoutError
        return group

    async def complete(self, *_: Any, **__: Any) -> None:
        """Every advantage is taken."""

    async def drop(self, _rows: Any, *, reason: str, timeout: float) -> None:
        self.dropped.append(reason)


def groups_of(queue: Finished, limit: int) -> Groups:
    drop = policy(drop_zero_variance=True, most_filtered=limit)
    return Groups(queue=queue, policy=drop, finished=lambda _: None, excluded=lambda _: None)  # type: ignore[arg-type]


def test_a_task_whose_rewards_are_all_the_same_ends_the_job_with_that_reason() -> None:
    queue = Finished(reward=0.25)
    with pytest.raises(
        ManifestError, match=r"21 groups of step 1 .* within each, all rewards were equal, the last time 0\.25"
    ) as said:
        asyncio.run(groups_of(queue, limit=20).run())
    assert said.value.where == "spec.algorithm.filterZeroVariance"
    assert queue.dropped == [FILTERED_ZERO_VARIANCE] * 41


def test_what_an_earlier_driver_filtered_counts() -> None:
    queue = Finished(reward=1.0)
    groups = groups_of(queue, limit=20)
    groups.filtered[2] = 20
    with pytest.raises(ManifestError, match="21 groups of step 2"):
        asyncio.run(groups.run())
    assert len(queue.dropped) == 2


def test_steps_that_stay_below_the_limit_go_on() -> None:
    queue = Finished(reward=0.0, varied=frozenset(range(40, 1000)), groups=60)
    with pytest.raises(TimeoutError):
        asyncio.run(groups_of(queue, limit=20).run())
    assert len(queue.dropped) == 40
