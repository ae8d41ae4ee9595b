from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.identity import SampleKey
from asyncflow.rollout.sampling import purpose_seed, stream, uniform, uniforms, words


def test_words_are_splitmix64_of_the_reference_implementation():
    state = np.full(5, 1234567, dtype=np.uint64)
    assert words(state, np.arange(5)).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_fixed_vectors():
    streams = np.array([stream(seed=1, key=SampleKey(0, 0)), stream(seed=1, key=SampleKey(7, 3))], dtype=np.uint64)
    assert streams.tolist() == VECTORS["streams"]
    assert uniforms(streams[:, None], np.arange(3)).tolist() == VECTORS["uniforms"]


def test_neighbours_share_no_stream():
    keys = {stream(seed=s, key=SampleKey(k, j)) for s in range(5) for k in range(100) for j in range(8)}
    assert len(keys) == 5 * 100 * 8
    assert purpose_seed(5, "train") == 5
    assert len({purpose_seed(5, p) for p in ("train", "eval", "probe")}) == 3


def test_uniform_mean_variance_and_correlation_over_samples_and_positions():
    streams = np.array([stream(seed=9, key=SampleKey(s, j)) for s in range(200) for j in range(4)], dtype=np.uint64)
    numbers = uniforms(streams[:, None], np.arange(50))
    assert abs(numbers.mean() - 0.5) < 0.005
    assert abs(numbers.var() - 1 / 12) < 0.002
    assert abs(np.corrcoef(numbers[:, 0], numbers[:, 1])[0, 1]) < 0.1
    assert abs(np.corrcoef(numbers[:-1, 0], numbers[1:, 0])[0, 1]) < 0.1


@given(st.integers(0, 2**63), st.integers(0, 2**40), st.integers(0, 2**16), st.integers(0, 2**20))
def test_uniform_is_a_function_of_its_four_arguments(seed, serial, sample, position):
    state = np.array([stream(seed=seed, key=SampleKey(serial, sample))], dtype=np.uint64)
    alone = uniforms(state, np.array([position]))[0]
    beside = uniforms(np.array([3, int(state[0]), 5], dtype=np.uint64), np.array([1, position, 2]))[1]
    assert alone == beside == uniform(int(state[0]), position)
    assert 0.0 <= alone < 1.0


VECTORS = {
    "streams": [4180771121987373314, 3983504204714191952],
    "uniforms": [
        [0.8530299350855918, 0.3639600927998061, 0.695880282293591],
        [0.4611277968615267, 0.6741676769255789, 0.4453876833491005],
    ],
}
