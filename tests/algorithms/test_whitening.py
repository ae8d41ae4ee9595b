"""Whitened advantages: their mean and deviation, and what does not count."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.algorithms.whitening import whitened


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(-10, 10), st.booleans()), max_size=20))
def test_what_counts_has_mean_0_and_the_unbiased_deviation_1_and_the_rest_is_0(tokens: list[tuple[int, bool]]) -> None:
    values, counted = (
        np.array([value for value, _ in tokens], dtype=float),
        np.array([each for _, each in tokens], bool),
    )
    found = whitened(values, counted, all_gather=np.copy)
    assert not found[~counted].any()
    if len(set(values[counted])) > 1:
        assert found[counted].mean() == pytest.approx(0, abs=1e-6)
        assert found[counted].std(ddof=1) == pytest.approx(1, abs=1e-6)
    else:
        assert np.abs(found).max(initial=0) < 1e-6, "of equal ones none is better, and one alone is no better either"


def test_tokens_of_all_ranks_count_and_a_rank_without_any_takes_part() -> None:
    def with_others(array: np.ndarray) -> np.ndarray:
        return np.concatenate([others.pop(0), array])

    others = [np.array([[1.0, 6.0]]), np.array([[9.0]])]
    own = np.array([1.0, 2.0])
    assert whitened(own, own > 0, all_gather=with_others) == pytest.approx((own - 3) / 7**0.5)
    others = [np.array([[3.0, 9.0]]), np.array([[14.0]])]
    assert whitened(np.zeros(0), np.zeros(0, bool), all_gather=with_others).tolist() == []
    assert others == []
