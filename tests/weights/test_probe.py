import numpy as np
import pytest

from asyncflow.weights.probe import TOKENS, Proved, WeightProbe, probe_ids, refuted, split_probe


def test_a_probe_travels_beside_the_weights_and_is_no_weight() -> None:
    weights = {"a": np.ones(3, np.float32)}
    probe = WeightProbe(probe_ids(vocabulary=50, most=512), np.linspace(-3, -1, TOKENS - 1, dtype=np.float32))
    found, again = split_probe({**weights, **probe.tensors})
    assert found.keys() == weights.keys()
    assert again is not None
    assert np.array_equal(again.ids, probe.ids)
    assert np.array_equal(again.logprobs, probe.logprobs)
    assert split_probe(weights) == (weights, None)


def test_a_shorter_probe_says_the_same_of_its_tokens() -> None:
    ids = probe_ids(vocabulary=50, most=512)
    probe = WeightProbe(ids, np.arange(len(ids) - 1, dtype=np.float32))
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


@pytest.mark.parametrize(
    ("off", "noise", "stale", "words"),
    [
        (0.0, 1e-6, False, None),
        (0.0, 1e-6, True, "those of the version before"),
        (0.01, 1e-6, False, "differ by 0.01"),
        (0.0, 1e-4, False, None),
        (0.0, 1e-4, True, None),
    ],
    ids=["right", "the version before", "a tensor is missing", "rounding", "a change that drowns in rounding"],
)
def test_a_model_is_refuted_that_lacks_a_tensor_or_has_the_version_before(
    off: float, noise: float, stale: bool, words: str | None
) -> None:
    rng = np.random.default_rng(1)
    ids = probe_ids(vocabulary=50, most=512)
    first = rng.normal(-4, 1, len(ids) - 1).astype(np.float32)
    second = first + rng.normal(0, 2e-4, len(first)).astype(np.float32)
    found = (first if stale else second) + off + rng.normal(0, noise, len(first)).astype(np.float32)
    before = Proved(WeightProbe(ids, first), gap=noise)
    said = refuted(found, WeightProbe(ids, second), before=before, limit=1e-3)
    assert (said is None) if words is None else (said is not None and words in said)
    assert (refuted(found, WeightProbe(ids, second), before=None, limit=1e-3) is None) == (off == 0)
