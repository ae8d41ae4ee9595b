"""Generalized advantage estimation, against its definition written out over all pairs of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from asyncflow.algorithms.gae import gae

FACTORS = st.floats(0, 1)


@st.composite
def batches(draw: Any) -> dict[str, Any]:
    """Responses of any length, with observations anywhere, some of them without any token that counts."""
    lengths = np.array(draw(st.lists(st.integers(0, 7), max_size=6)), dtype=np.int64)
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    tokens = int(lengths.sum())
    return {
        "outcomes": rng.normal(size=len(lengths)),
        "values": rng.normal(size=tokens),
        "lengths": lengths,
        "counted": rng.random(tokens) < draw(st.sampled_from([0.0, 0.5, 1.0])),
        "penalties": rng.normal(size=tokens) if draw(st.booleans()) else None,
    }


def by_definition(batch: dict[str, Any], gamma: float, lam: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """A_t = Σ_l (γλ)^l δ_{t+l}, each sum on its own; in between, observations are left out of the episode."""
    advantages, returns = np.zeros(len(batch["values"])), np.zeros(len(batch["values"]))
    start = 0
    for outcome, length in zip(batch["outcomes"], batch["lengths"], strict=True):
        chosen = [t for t in range(start, start + length) if batch["counted"][t]]
        values = [batch["values"][t] for t in chosen] + [0.0]
        rewards = [0.0 if batch["penalties"] is None else -batch["penalties"][t] for t in chosen]
        if chosen:
            rewards[-1] += outcome
        errors = [rewards[i] + gamma * values[i + 1] - values[i] for i in range(len(chosen))]
        for i, t in enumerate(chosen):
            advantages[t] = sum((gamma * lam) ** (j - i) * errors[j] for j in range(i, len(chosen)))
            returns[t] = advantages[t] + values[i]
        start += length
    return advantages, returns


@given(batches(), FACTORS, FACTORS)
def test_estimates_are_those_of_the_definition(batch: dict[str, Any], gamma: float, lam: float) -> None:
    found = gae(**batch, gamma=gamma, lam=lam)
    advantages, returns = by_definition(batch, gamma, lam)
    np.testing.assert_allclose(found.advantages, advantages, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found.returns, returns, rtol=1e-12, atol=1e-12)
    assert not found.advantages[~batch["counted"]].any()


@given(batches(), FACTORS)
def test_an_observation_is_no_step(batch: dict[str, Any], gamma: float) -> None:
    counted = batch["counted"]
    samples = np.repeat(np.arange(len(batch["lengths"])), batch["lengths"])[counted]
    without = batch | {
        "values": batch["values"][counted],
        "lengths": np.bincount(samples, minlength=len(batch["lengths"])),
        "counted": counted[counted],
        "penalties": None if batch["penalties"] is None else batch["penalties"][counted],
    }
    with_them, left_out = gae(**batch, gamma=gamma, lam=0.9), gae(**without, gamma=gamma, lam=0.9)
    assert with_them.advantages[counted].tolist() == left_out.advantages.tolist()


@given(batches(), FACTORS)
def test_with_lambda_1_returns_are_discounted_rewards_whatever_the_values(batch: dict[str, Any], gamma: float) -> None:
    other = batch | {"values": 3 * batch["values"] + 1}
    found, changed = (gae(**each, gamma=gamma, lam=1) for each in (batch, other))
    np.testing.assert_allclose(found.returns, changed.returns, atol=1e-9)


@given(batches(), FACTORS, FACTORS)
def test_a_sample_has_the_same_estimates_alone(batch: dict[str, Any], gamma: float, lam: float) -> None:
    whole, ends = gae(**batch, gamma=gamma, lam=lam), np.cumsum(batch["lengths"])
    for i, (end, length) in enumerate(zip(ends, batch["lengths"], strict=True)):
        own = slice(end - length, end)
        alone = gae(
            batch["outcomes"][i : i + 1],
            batch["values"][own],
            lengths=batch["lengths"][i : i + 1],
            counted=batch["counted"][own],
            gamma=gamma,
            lam=lam,
            penalties=None if batch["penalties"] is None else batch["penalties"][own],
        )
        assert alone.advantages.tolist() == whole.advantages[own].tolist()
        assert alone.returns.tolist() == whole.returns[own].tolist()
