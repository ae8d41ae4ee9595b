"""Importance weights: values worked out by hand, their bounds, and what they do to a loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.algorithms.correction import Correction, CorrectionTerms, effective_share
from asyncflow.algorithms.loss import Loss
from asyncflow.errors import ManifestError

RATIOS = [4.0, 0.5, 1.0, 0.1]
SEQUENCES = torch.tensor([0, 0, 1, 1])
"""Two responses."""
LEVELS = ("token", "sequence", "geometric")


def weigh(correction: Correction, ratios: list[float] = RATIOS) -> CorrectionTerms:
    behaviour = torch.full((len(ratios),), -2.0)
    return correction.terms(behaviour + torch.tensor(ratios).log(), behaviour, sequences=SEQUENCES)


@pytest.mark.parametrize(
    ("how", "weights", "above", "below"),
    [
        ({"level": "token", "high": 2.0}, [2, 0.5, 1, 0.1], [1, 0, 0, 0], [0] * 4),
        ({"level": "token", "low": 0.5, "high": 2.0}, [2, 0.5, 1, 0.5], [1, 0, 0, 0], [0, 0, 0, 1]),
        ({"kind": "mask", "low": 0.2, "high": 2.0}, [0, 0.5, 1, 0], [1, 0, 0, 0], [0, 0, 0, 1]),
        ({"level": "sequence", "high": 3.0}, [2, 2, 0.1, 0.1], [0] * 4, [0] * 4),
        ({"level": "sequence", "high": 1.5}, [1.5, 1.5, 0.1, 0.1], [1, 1, 0, 0], [0] * 4),
        ({"level": "sequence", "kind": "mask", "low": 0.2, "high": 3.0}, [2, 2, 0, 0], [0] * 4, [0, 0, 1, 1]),
        ({"level": "geometric", "high": 1.2}, [1.2, 1.2, 0.1**0.5, 0.1**0.5], [1, 1, 0, 0], [0] * 4),
        (
            {"level": "geometric", "kind": "mask", "low": 0.5, "high": 2.0},
            [2**0.5] * 2 + [0, 0],
            [0] * 4,
            [0, 0, 1, 1],
        ),
    ],
)
def test_weights_are_those_worked_out_by_hand(
    how: dict[str, Any], weights: list[float], above: list[int], below: list[int]
) -> None:
    terms = weigh(Correction(**how))
    torch.testing.assert_close(terms.weight, torch.tensor(weights, dtype=torch.float32))
    assert terms.above.int().tolist() == above
    assert terms.below.int().tolist() == below
    assert terms.unit.tolist() == [1.0 if how.get("level", "token") == "token" else 0.5] * 4


def test_divergences_are_the_usual_estimates() -> None:
    terms = weigh(Correction())
    ratios = np.array(RATIOS)
    np.testing.assert_allclose(terms.k1.numpy(), -np.log(ratios), atol=1e-6)
    np.testing.assert_allclose(terms.k3.numpy(), ratios - 1 - np.log(ratios), atol=1e-6)


def test_the_effective_share_is_one_for_equal_weights_and_one_of_n_for_a_lone_one() -> None:
    assert effective_share(units=8, weights=8 * 0.7, squares=8 * 0.49) == pytest.approx(1)
    assert effective_share(units=8, weights=3, squares=9) == pytest.approx(1 / 8)
    assert effective_share(units=8, weights=0, squares=0) == 0
    assert effective_share(units=4, weights=1 + 2 + 3, squares=1 + 4 + 9) == pytest.approx(36 / 56)


@given(
    st.sampled_from(LEVELS),
    st.sampled_from(("truncate", "mask")),
    st.floats(0, 1),
    st.floats(1, 50),
    st.lists(st.tuples(st.floats(-1e4, 1e4), st.integers(0, 3)), min_size=4, max_size=30),
)
def test_weights_lie_within_their_bounds(
    level: Any, kind: Any, low: float, high: float, tokens: list[tuple[float, int]]
) -> None:
    distance, sequences = (torch.tensor(column) for column in zip(*tokens, strict=True))
    correction = Correction(kind=kind, level=level, low=low, high=high)
    terms = correction.terms(distance, torch.zeros(len(distance)), sequences=sequences)
    weight, kept = terms.weight, ~(terms.above | terms.below)
    inside = (weight >= np.float32(low)) & (weight <= np.float32(high))
    assert (inside | ((weight == 0) & ~kept & (kind == "mask"))).all()
    assert not (terms.above & terms.below).any()
    assert torch.isfinite(torch.stack([terms.weight, terms.unit, terms.k1, terms.k3])).all()
    whole = terms.unit.sum().item()
    units = len(tokens) if level == "token" else len(set(sequences.tolist()))
    assert whole == pytest.approx(float(units), abs=1e-4)


@given(st.lists(st.tuples(st.floats(-2, 2), st.integers(0, 5)), min_size=6, max_size=40), st.randoms())
def test_the_weight_of_a_response_is_the_product_of_its_tokens_in_any_order_and_company(
    tokens: list[tuple[float, int]], order: Any
) -> None:
    distance, sequences = (np.array(column) for column in zip(*tokens, strict=True))
    correction = Correction(level="sequence", high=1e6)

    def weights(chosen: list[int]) -> dict[int, float]:
        given_ = torch.tensor(distance[chosen], dtype=torch.float32)
        _, number = np.unique(sequences[chosen], return_inverse=True)
        terms = correction.terms(given_, torch.zeros(len(chosen)), sequences=torch.from_numpy(number))
        return dict(zip(sequences[chosen].tolist(), terms.weight.tolist(), strict=True))

    shuffled = list(range(len(tokens)))
    order.shuffle(shuffled)
    whole = weights(shuffled)
    for sequence, weight in whole.items():
        own = np.flatnonzero(sequences == sequence)
        product = min(np.prod(np.exp(distance[own])), 1e6)
        assert weight == pytest.approx(product, rel=1e-4)
        assert weights(own.tolist())[sequence] == pytest.approx(weight, rel=1e-5)


def gradient(loss: Loss, logprobs: torch.Tensor, **given_: Any) -> torch.Tensor:
    own = logprobs.clone().requires_grad_()
    terms = loss.tokens(own, reference=None, entropy=None, **given_)
    (found,) = torch.autograd.grad(terms.total.sum(), own)
    return found


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_samples_of_the_old_policy_have_the_gradient_without_a_correction_to_the_bit(level: Any, kind: Any) -> None:
    rng = torch.Generator().manual_seed(0)
    logprobs, advantages = torch.randn(40, generator=rng) - 4, torch.randn(40, generator=rng)
    same = {"behaviour": logprobs, "advantages": advantages}
    more = {"sequences": torch.arange(40) // 7}
    for old in ("recompute", "lagged", "behaviour"):
        if (old, kind) == ("behaviour", "truncate"):
            continue
        bounds = Correction(kind=kind, level=level, low=1, high=1)
        plain = gradient(Loss(old=old), logprobs, **same)  # type: ignore[arg-type]
        assert torch.equal(gradient(Loss(old=old, correction=bounds), logprobs, **same, **more), plain)  # type: ignore[arg-type]


def test_the_weight_multiplies_the_policy_loss_and_nothing_else() -> None:
    logprobs, before = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.1, -2.0, -3.2])
    given_ = {"behaviour": torch.tensor([-1.5, -1.7, -6.0]), "advantages": torch.tensor([1.0, -2.0, 0.5])}
    more = {"before": before, "sequences": torch.zeros(3, dtype=torch.int64)}
    reference, entropy = torch.tensor([-1.2, -2.1, -2.9]), torch.tensor([0.1, 0.2, 0.3])
    loss = Loss(old="recompute", correction=Correction(high=2.0), kl=0.1, entropy=0.01)
    terms = loss.tokens(logprobs, reference=reference, entropy=entropy, **given_, **more)  # type: ignore[arg-type]
    weight = torch.tensor([np.exp(0.4), np.exp(-0.3), 2.0], dtype=torch.float32)
    assert terms.kl is not None
    assert terms.correction is not None
    torch.testing.assert_close(terms.correction.weight, weight)
    torch.testing.assert_close(terms.total, weight * terms.policy.loss + 0.1 * terms.kl - 0.01 * entropy)


def test_with_the_behaviour_policy_as_the_old_one_tokens_are_masked_by_the_ratio_of_the_loss_and_not_weighed() -> None:
    behaviour = torch.tensor([-1.0, -1.0, -1.0])
    logprobs = behaviour + torch.tensor([0.1, 1.0, -3.0])
    more = {"sequences": torch.zeros(3, dtype=torch.int64), "advantages": -torch.ones(3)}
    loss = Loss(correction=Correction(kind="mask", low=0.5, high=2.0))
    found = gradient(loss, logprobs, behaviour=behaviour, **more)
    assert found.tolist() == pytest.approx([np.exp(0.1), 0, 0])


def test_what_has_no_meaning_is_refused() -> None:
    for bad in ({"low": -0.1}, {"low": 1.1}, {"high": 0.9}):
        with pytest.raises(ManifestError, match="bounds"):
            Correction(**bad)
    with pytest.raises(ManifestError, match="twice"):
        Loss(correction=Correction())
