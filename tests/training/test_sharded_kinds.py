"""Models and computations of every kind, cut over two ranks: they learn what one rank learns.

One gang of two real processes makes all runs of ``train_kinds``; the tests look at what they found.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from rank_process import gang
from train_kinds import (
    COMPUTES,
    MIXTURES,
    MODELS,
    SMOOTH,
    STEPS,
    Found,
    adapters_run,
    all_runs,
    critic_run,
    is_figure,
    make_models,
)
from train_reference import reference_gradient, relative_error, samples

from asyncflow.training.ranks import SingleProcess

RANKS = 2
pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("kinds")
    make_models(made)
    return made


@pytest.fixture(scope="module")
def one(folder: Path) -> Found:
    """The findings of one rank; its checkpoint of adapters is there for two."""
    return all_runs(folder, SingleProcess())


@pytest.fixture(scope="module")
def two(folder: Path, one: Found) -> list[Found]:
    return gang("kinds", folder, RANKS, within_s=400)


def of(found: Found, what: str) -> Found:
    return {name.removeprefix(f"{what}/"): array for name, array in found.items() if name.startswith(f"{what}/")}


def flat(found: Found) -> NDArray[np.float64]:
    return np.concatenate([found[name].ravel() for name in sorted(found)]).astype(np.float64)


def assert_close(got: Found, expected: Found) -> None:
    assert got.keys() == expected.keys()
    assert got
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, atol=1e-6, rtol=0, err_msg=name)


def test_adapters_have_the_model_without_them_as_reference(two: list[Found], one: Found) -> None:
    assert one["adapters/kl"] > 1e-4
    for rank in two:
        assert rank["adapters/kl"] == pytest.approx(one["adapters/kl"], rel=1e-5)
        assert_close(of(rank, "adapters/weights"), of(one, "adapters/weights"))


@pytest.mark.parametrize("saved", ["adapters-1", "adapters-2"])
def test_adapters_resumed_on_two_ranks_are_those_of_one(two: list[Found], one: Found, saved: str) -> None:
    for rank in two:
        assert rank[f"{saved}/kl"] == pytest.approx(one["adapters/kl"], rel=1e-5)
        assert_close(of(rank, f"{saved}/weights"), of(one, "adapters/weights"))


def test_adapters_of_two_ranks_resumed_on_one_are_the_same(two: list[Found], one: Found, folder: Path) -> None:
    again = adapters_run(folder, SingleProcess(), resumed=folder / "adapters-2")
    for rank in two:
        assert_close(of(again, "first"), of(rank, "adapters-2/first"))
    assert again["kl"] == pytest.approx(one["adapters/kl"], rel=1e-5)
    assert_close(of(again, "weights"), of(one, "adapters/weights"))


def test_adapters_with_several_updates_a_step_are_those_of_one_rank(two: list[Found], one: Found) -> None:
    first, second = (of(rank, "mini-batches") for rank in two)
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], err_msg=name)
    assert_close(first, of(one, "mini-batches"))


def test_an_old_policy_of_one_step_behind_and_its_correction_are_those_of_one_rank(
    two: list[Found], one: Found
) -> None:
    figures = [name for name in of(one, "lagged") if is_figure(name.rpartition("/")[2])]
    assert len(figures) == STEPS * 9
    assert one[f"lagged/step{STEPS}/ratio_max"] > 1.001
    for rank in two:
        for name in figures:
            assert rank[f"lagged/{name}"] == pytest.approx(one[f"lagged/{name}"], rel=1e-4), name
        assert_close(of(rank, "lagged/weights"), of(one, "lagged/weights"))


def test_a_critic_cut_over_two_ranks_learns_what_it_learns_on_one(two: list[Found], one: Found) -> None:
    assert one["critic/explained_variance"] != 0
    for rank in two:
        for name in ("value_loss", "critic_grad_norm", "explained_variance"):
            assert rank[f"critic/{name}"] == pytest.approx(one[f"critic/{name}"], rel=1e-4), name
        assert_close(of(rank, "critic/weights"), of(one, "critic/weights"))


def test_a_critic_resumes_on_as_many_ranks_with_the_same_bits_and_on_others_with_the_same_weights(
    two: list[Found], one: Found, folder: Path
) -> None:
    on_one = critic_run(folder / "dense", SingleProcess(), resumed=folder / "critic-2")
    assert_close(of(on_one, "weights"), of(one, "critic/weights"))
    for rank in two:
        assert_close(of(rank, "critic-1/weights"), of(one, "critic/weights"))
        for name, array in of(rank, "critic-2/weights").items():
            np.testing.assert_array_equal(array, rank[f"critic/weights/{name}"], err_msg=name)


@pytest.mark.parametrize("model", MIXTURES)
def test_a_mixture_of_experts_learns_what_it_learns_on_one_rank(two: list[Found], one: Found, model: str) -> None:
    for rank in two:
        assert rank[f"{model}/grad_norm"] == pytest.approx(one[f"{model}/grad_norm"], rel=1e-5)
        assert_close(of(rank, f"{model}/weights"), of(one, f"{model}/weights"))


def test_passes_of_a_rank_left_experts_without_a_token(two: list[Found]) -> None:
    experts = MODELS["experts"]().num_experts
    assert any(rank["experts/fewest"] < experts for rank in two)
    assert any(rank["idle-experts/fewest"] == 0 for rank in two)


def test_bfloat16_is_as_near_to_float32_as_on_one_rank(two: list[Found], one: Found) -> None:
    """The error of two ranks is of the size of one rank's, which rounded weights would exceed."""
    first, exact = flat(of(one, "float32/first")), flat(of(one, "float32/weights"))

    def error(weights: NDArray[np.float64]) -> float:
        return float(np.linalg.norm(weights - exact) / np.linalg.norm(exact - first))

    alone = error(flat(of(one, "bfloat16/weights")))
    assert alone > 1e-3
    for rank in two:
        weights = flat(of(rank, "bfloat16/weights"))
        rounded = torch.from_numpy(weights).bfloat16().double().numpy()
        assert alone / 2 < error(weights) < 1.5 * alone < error(rounded)
        assert np.mean(rounded == weights) < 0.01
        assert_close(of(rank, "float32/weights"), of(one, "float32/weights"))


@pytest.mark.slow
def test_compiled_layers_of_two_ranks_give_the_same_gradient(folder: Path) -> None:
    exact = reference_gradient(folder / "dense", samples(), SMOOTH)
    for rank in gang("compiled", folder, RANKS, within_s=400):
        assert rank["frames"] > 0
        for compute in COMPUTES:
            plain, compiled = (
                relative_error(
                    {name: torch.from_numpy(array) for name, array in of(rank, f"{compute}-{on}").items()}, exact
                )
                for on in (False, True)
            )
            assert compiled < max(1e-5, 1.5 * plain)
