"""A model cut over ranks: what it learns, holds, saves and publishes is what one rank would.

Gangs of two and four real processes, each once; the tests look at what they found.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_process import gang
from train_reference import (
    HALF,
    STOCHASTIC,
    aged_samples,
    assert_same_bits,
    held_bytes,
    settings_of_shards,
    train_share,
    weights,
)
from transformers import AutoModelForCausalLM, Qwen2Config

from asyncflow.training.ranks import SingleProcess
from asyncflow.training.torch.backend import TorchBackend

WORLDS = (2, 4)
pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

Found = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose output layer is tied, with biases, and with rows that no number of ranks divides."""
    config = Qwen2Config(
        hidden_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=70,
        vocab_size=67,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    torch.manual_seed(7)
    made = tmp_path_factory.mktemp("shards")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(made / "model")
    return made


def alone() -> TorchBackend:
    return TorchBackend(settings_of_shards(), group=SingleProcess())


@pytest.fixture(scope="module")
def one(folder: Path) -> Found:
    """The findings of one rank; its checkpoint is there for two."""
    backend = alone()
    backend.load(folder / "model", checkpoint=None)
    found: Found = {"held": held_bytes(backend)}
    train_share(backend, 1, 3)
    (folder / "shared-1").mkdir()
    backend.snapshot()(folder / "shared-1")
    older = weights(backend)
    found["probe"] = backend.probe().logprobs
    found["rounded"] = {name: array.copy() for name, array in backend.tensors(dtype="bfloat16")}
    train_share(backend, 4, 5)
    found["straight"] = weights(backend)
    backend.measure(aged_samples(), weights=older)
    found["gap"] = backend.finish_step(6)["logprob_gap"]
    half = TorchBackend(settings_of_shards(**HALF), group=SingleProcess())
    half.load(folder / "model", checkpoint=None)
    found["half"] = train_share(half, 1, 1)["grad_norm"]
    rounding = TorchBackend(settings_of_shards(**STOCHASTIC), group=SingleProcess())
    rounding.load(folder / "model", checkpoint=None)
    found["rounding held"] = held_bytes(rounding)
    train_share(rounding, 1, 2)
    found["rounding after 2"] = weights(rounding)
    (folder / "rounding-1").mkdir()
    rounding.snapshot()(folder / "rounding-1")
    train_share(rounding, 3, 3)
    found["rounding straight"] = weights(rounding)
    return found


@pytest.fixture(scope="module")
def gangs(folder: Path, one: Found) -> dict[int, list[Found]]:
    """The findings of the ranks: of two, which leave checkpoints for four."""
    return {world: gang("shards", folder, world, within_s=400) for world in WORLDS}


def of(found: Found, what: str) -> Found:
    return {name.removeprefix(f"{what}/"): array for name, array in found.items() if name.startswith(f"{what}/")}


def assert_close(got: Found, expected: Found, *, within: float) -> None:
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, atol=within, rtol=0, err_msg=name)


@pytest.mark.parametrize("world", WORLDS)
def test_weights_after_five_steps_are_those_of_one_rank(gangs: Any, one: Found, world: int) -> None:
    for rank in gangs[world]:
        assert_close(of(rank, "straight"), one["straight"], within=1e-6)


@pytest.mark.parametrize("world", WORLDS)
def test_the_probe_and_the_rounded_weights_are_those_of_one_rank(gangs: Any, one: Found, world: int) -> None:
    for rank in gangs[world]:
        np.testing.assert_allclose(rank["probe"], one["probe"], atol=1e-5)
        rounded = of(rank, "rounded")
        assert rounded.keys() == one["rounded"].keys()
        for name, bits in one["rounded"].items():
            assert rounded[name].dtype == np.uint16
            assert np.mean(rounded[name] != bits) < 0.01, name


@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_holds_its_share_of_parameters_gradients_and_optimizer_state(gangs: Any, one: Found, world: int) -> None:
    for rank in gangs[world]:
        assert rank["held"] <= 1.2 / world * one["held"]


@pytest.mark.parametrize("world", WORLDS)
def test_resumed_on_as_many_ranks_the_bits_are_the_same(gangs: Any, world: int) -> None:
    for rank in gangs[world]:
        for kind in ("shared", "gathered"):
            assert_same_bits(of(rank, f"read {kind}-{world}"), of(rank, "after 3"))
            assert_same_bits(of(rank, f"{kind}-{world}"), of(rank, "straight"))


@pytest.mark.parametrize(("world", "saved"), [(2, "shared-1"), (4, "shared-1"), (4, "shared-2"), (4, "gathered-2")])
def test_resumed_on_more_ranks_the_weights_are_the_same(gangs: Any, one: Found, world: int, saved: str) -> None:
    for rank in gangs[world]:
        assert_close(of(rank, saved), one["straight"], within=1e-6)


@pytest.mark.parametrize("saved", ["shared-2", "gathered-2", "shared-4", "gathered-4"])
def test_resumed_on_one_rank_the_weights_are_the_same(gangs: Any, one: Found, folder: Path, saved: str) -> None:
    backend = alone()
    backend.load(folder / "model", checkpoint=folder / saved)
    assert_same_bits(weights(backend), of(gangs[int(saved[-1])][0], "after 3"))
    train_share(backend, 4, 5)
    assert_close(weights(backend), one["straight"], within=1e-6)


@pytest.mark.parametrize("world", WORLDS)
def test_each_rank_writes_its_share_of_a_checkpoint(gangs: Any, folder: Path, world: int) -> None:
    for name in ("model", "optimizer"):
        sizes = [file.stat().st_size for file in (folder / f"shared-{world}").rglob(f"{name}.safetensors")]
        assert len(sizes) == world
        assert max(sizes) < 0.7 * sum(sizes) * 2 / world


@pytest.mark.parametrize("world", WORLDS)
def test_older_weights_are_measured_in_the_place_of_the_own_ones(gangs: Any, one: Found, world: int) -> None:
    for rank in gangs[world]:
        assert rank["gap"] == pytest.approx(one["gap"], rel=1e-4)
        assert_same_bits(of(rank, "measured"), of(rank, "straight"))


@pytest.mark.parametrize("world", WORLDS)
def test_bfloat16_computes_as_on_one_rank(gangs: Any, one: Found, world: int) -> None:
    for rank in gangs[world]:
        assert rank["half"] == pytest.approx(one["half"], rel=0.02)


def test_stochastic_rounding_resumes_with_the_same_bits_on_as_many_ranks(gangs: Any) -> None:
    for rank in gangs[2]:
        assert_same_bits(of(rank, "rounding read 2"), of(rank, "rounding after 2"))
        assert_same_bits(of(rank, "rounding resumed from 2"), of(rank, "rounding straight"))


def test_stochastic_rounding_goes_on_with_other_random_bits_on_more_ranks(gangs: Any, one: Found) -> None:
    for rank in gangs[2]:
        assert rank["rounding held"] <= 0.6 * one["rounding held"]
        assert_same_bits(of(rank, "rounding read 1"), one["rounding after 2"])
        differing = []
        for name, array in of(rank, "rounding resumed from 1").items():
            expected = one["rounding straight"][name]
            np.testing.assert_allclose(array, expected, rtol=2**-7, atol=1e-3, err_msg=name)  # neighbours in bfloat16
            differing.append((array != expected).ravel())
        assert 0.01 < np.concatenate(differing).mean() < 0.5


@pytest.mark.parametrize("world", WORLDS)
def test_a_shard_that_one_rank_cannot_read_is_one_error_on_all(gangs: Any, world: int) -> None:
    told = {str(rank["refused"]) for rank in gangs[world]}
    assert len(told) == 1
    assert f"broken-{world}-1/model.safetensors: the file cannot be read" in told.pop()


def test_a_disk_that_fails_the_one_rank_that_writes_puts_a_checkpoint_off_on_all(folder: Path) -> None:
    first, second = gang("full_disk", folder, 2)
    assert str(first["refused"]) == str(second["refused"])
    assert "the weights cannot be written" in str(first["refused"])
    assert first["steps"].tolist() == [1]
    assert second["steps"].tolist() == []
    assert first["asked"] == second["asked"] == 1
