"""What becomes of a finished group: an advantage, or a reason."""

import numpy as np
import pytest

from asyncflow.driver.groups import DROPPED_REWARD_TIMEOUT, FILTERED_ZERO_VARIANCE, GroupPolicy


def policy(**changes: object) -> GroupPolicy:
    settings = {"estimator": "grpo", "drop_zero_variance": False, "drop_timeouts": False} | changes
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
