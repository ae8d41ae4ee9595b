import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.algorithms.advantages import AdvantageName, group_advantages, turn_advantages, zero_variance
from asyncflow.errors import AsyncFlowError, ManifestError

NAMES: tuple[AdvantageName, ...] = ("grpo", "dr-grpo", "rloo")
rewards = st.lists(st.floats(-10, 10), min_size=2, max_size=16).map(lambda each: np.round(each, 12))


def test_formulas_by_hand() -> None:
    group = np.array([0.0, 0.0, 1.0, 1.0])
    std = np.sqrt(1 / 3)
    np.testing.assert_allclose(group_advantages(group, name="grpo"), np.array([-0.5, -0.5, 0.5, 0.5]) / (std + 1e-6))
    np.testing.assert_allclose(group_advantages(group, name="dr-grpo"), [-0.5, -0.5, 0.5, 0.5])
    np.testing.assert_allclose(group_advantages(group, name="rloo"), np.array([-2, -2, 2, 2]) / 3, rtol=1e-6)


@given(rewards)
def test_rloo_compares_with_the_others(group: np.ndarray) -> None:
    others = [np.delete(group, i).mean() for i in range(len(group))]
    np.testing.assert_allclose(group_advantages(group, name="rloo"), group - others, atol=1e-5)


@given(rewards, st.sampled_from(NAMES))
def test_advantages_sum_to_zero_and_keep_the_order(group: np.ndarray, name: AdvantageName) -> None:
    advantages = group_advantages(group, name=name)
    assert advantages.dtype == np.float32
    assert abs(advantages.sum()) < 1e-3
    assert (np.diff(advantages[np.argsort(group)]) >= 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_equal_rewards_teach_exactly_nothing(name: AdvantageName) -> None:
    assert (group_advantages(np.full(3, 0.1), name=name) == 0).all()


def by_turn(*turns: list[float], name: AdvantageName = "dr-grpo") -> list[list[float]]:
    rewards = [np.array(each) for each in turns]
    return [
        each.tolist() for each in turn_advantages(rewards, compare=lambda earned: group_advantages(earned, name=name))
    ]


def test_a_turn_is_compared_by_what_it_and_the_turns_after_it_were_given() -> None:
    assert by_turn([1, 0], [0, 2]) == [[-0.5, -1], [0.5, 1]]
    assert by_turn([1, 0, 4], [0, 2], [2]) == [[2, 1, 0], [-1, -1], [-1]], "a third turn that no other sample has"
    first, _ = zip(*by_turn([0.1, 0.2], [0.3, 0]), strict=True)
    assert first == (0, 0), "although 0.1 + 0.2 is 0.30000000000000004 in float64"


@given(rewards, st.integers(1, 4), st.sampled_from(NAMES))
def test_where_only_last_turns_are_rewarded_each_turn_has_the_advantage_of_its_sample(
    group: np.ndarray, turns: int, name: AdvantageName
) -> None:
    padded = [[0.0] * (turns - 1) + [float(reward)] for reward in group]
    expected = group_advantages(group, name=name).tolist()
    assert by_turn(*padded, name=name) == [[advantage] * turns for advantage in expected]


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ManifestError, match="no sibling"):
        group_advantages(np.array([1.0]))
    with pytest.raises(ManifestError, match="unknown advantage"):
        group_advantages(np.array([1.0, 2.0]), name="best")  # type: ignore[arg-type]
    with pytest.raises(AsyncFlowError, match="finite"):
        group_advantages(np.array([1.0, np.nan]))


def test_filter_sees_variance() -> None:
    assert zero_variance(np.full(3, 0.1))
    assert not zero_variance(np.array([0.1, 0.1, 0.2]))
    assert not zero_variance(np.array([0.1])), "a sample alone has none that it equals"
