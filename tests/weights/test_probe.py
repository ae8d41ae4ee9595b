import numpy as np

from asyncflow.weights.probe import TOKENS, Probe, probe_ids, split_probe


def test_a_probe_travels_beside_the_weights_and_is_no_weight() -> None:
    weights = {"a": np.ones(3, np.float32)}
    probe = Probe(probe_ids(vocabulary=50, most=512), np.linspace(-3, -1, TOKENS - 1, dtype=np.float32))
    found, again = split_probe({**weights, **probe.tensors})
    assert found.keys() == weights.keys()
    assert again is not None
    assert np.array_equal(again.ids, probe.ids)
    assert np.array_equal(again.logprobs, probe.logprobs)
    assert split_probe(weights) == (weights, None)


def test_a_shorter_probe_says_the_same_of_its_tokens() -> None:
    ids = probe_ids(vocabulary=50, most=512)
    probe = Probe(ids, np.arange(len(ids) - 1, dtype=np.float32))
    short = probe.shortened(5)
    assert (short.ids.tolist(), short.logprobs.tolist()) == (ids[:5].tolist(), [0.0, 1.0, 2.0, 3.0])
    assert len(probe.shortened(1000).logprobs) == len(ids) - 1
    assert len(probe.shortened(0).logprobs) == 0


def test_the_tokens_of_a_probe_fit_the_model() -> None:
    ids = probe_ids(vocabulary=7, most=10)
    assert ids.dtype == np.int32
    assert len(ids) == 10
    assert set(ids.tolist()) <= set(range(7))
    assert np.array_equal(ids, probe_ids(vocabulary=7, most=10))
