"""Weights in bfloat16 without a float32 copy: rounding that loses nothing on average, and training with it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from train_reference import (
    STOCHASTIC,
    assert_same_bits,
    held_bytes,
    samples,
    settings_of_shards,
    train_share,
    weights,
)

from asyncflow.errors import CheckpointError
from asyncflow.training.ranks import SingleProcess
from asyncflow.training.settings import OptimizerSettings
from asyncflow.training.torch import optimizer as optimizer_module
from asyncflow.training.torch.backend import TorchBackend
from asyncflow.training.torch.optimizer import FlatAdamW, apply_together, round_stochastically

BFLOAT16 = torch.finfo(torch.bfloat16)
seeds = st.integers(0, 2**32 - 1)


def backend(folder: Path, *, checkpoint: Path | None = None, **more: Any) -> TorchBackend:
    made = TorchBackend(settings_of_shards(**more), group=SingleProcess())
    made.load(folder, checkpoint=checkpoint)
    return made


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(st.lists(st.floats(width=32), min_size=1, max_size=50), seeds)
def test_a_number_becomes_one_of_its_two_neighbours_in_bfloat16(numbers: list[float], seed: int) -> None:
    exact = torch.tensor(numbers, dtype=torch.float32)
    rounded = round_stochastically(exact, generator(seed))
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded.isnan(), exact.isnan())
    towards_0 = (exact.view(torch.int32) >> 16 << 16).view(torch.float32)
    beyond = ((exact.view(torch.int32) >> 16 << 16) + (1 << 16)).view(torch.float32)
    representable = (towards_0 == exact) & ~exact.isnan()
    assert torch.equal(rounded[representable].float(), exact[representable])
    rest = ~representable & ~exact.isnan()
    assert bool(((rounded == towards_0) | (rounded == beyond))[rest].all())
    assert torch.equal(rounded.signbit(), exact.signbit()) or bool(exact.isnan().any())


@pytest.mark.parametrize("part", [0.01, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("low", [1.0, -1.0, 3.0e-39, 240.0])
def test_the_mean_of_many_roundings_is_the_exact_number(low: float, part: float) -> None:
    below = torch.tensor(low).bfloat16().view(torch.int16)
    neighbours = torch.stack([below, below + 1]).view(torch.bfloat16).double()
    exact = (neighbours[0] + part * (neighbours[1] - neighbours[0])).float()
    count = 100_000
    rounded = round_stochastically(exact.repeat(count), generator(1)).double()
    up = (rounded == neighbours[1]).double().mean().item()
    assert bool(((rounded == neighbours[0]) | (rounded == neighbours[1])).all())
    assert up == pytest.approx(part, abs=5 * (part * (1 - part) / count) ** 0.5 + 2**-16)


class Weights(nn.Module):
    """A parameter of ones in bfloat16 or float32."""

    def __init__(self, dtype: torch.dtype, size: int = 4096) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))


def stepped(model: nn.Module, optimizer: FlatAdamW, steps: int) -> Tensor:
    """The weights after updates that each make them smaller by the learning rate."""
    for step in range(1, steps + 1):
        optimizer.gradient.fill_(1.0)
        apply_together(step, {optimizer: 1.0}, norm=lambda gradient: float(gradient.norm()))
    return model.weight.detach().float()


def test_updates_below_half_of_the_distance_to_the_next_number_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = OptimizerSettings(learning_rate=1e-4, steps=40, max_grad_norm=0)
    narrow, wide = Weights(torch.bfloat16), Weights(torch.float32)
    exact = stepped(wide, FlatAdamW(wide, settings, seed=(0, 0)), 40)
    assert exact.mean().item() == pytest.approx(1 - 40e-4, abs=1e-6)
    moved = stepped(narrow, FlatAdamW(narrow, settings, seed=(0, 0)), 40)
    assert moved.mean().item() == pytest.approx(1 - 40e-4, abs=3e-4)  # 4096 weights, each off by up to 2**-8
    assert len(moved.unique()) > 1
    monkeypatch.setattr(optimizer_module, "round_stochastically", lambda exact, _generator: exact.bfloat16())
    still = Weights(torch.bfloat16)
    assert bool((stepped(still, FlatAdamW(still, settings, seed=(0, 0)), 40) == 1).all())


def test_the_random_bits_are_those_of_seed_step_and_rank() -> None:
    settings = OptimizerSettings(learning_rate=1e-3, steps=4, max_grad_norm=0)
    found = {}
    for seed in ((0, 0), (0, 1), (1, 0)):
        for again in (False, True):
            model = Weights(torch.bfloat16)
            found[seed, again] = stepped(model, FlatAdamW(model, settings, seed=seed), 2)
        assert torch.equal(found[seed, False], found[seed, True])
    assert not torch.equal(found[(0, 0), True], found[(0, 1), True])
    assert not torch.equal(found[(0, 0), True], found[(1, 0), True])


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=3), chunk=st.integers(1, 10), steps=st.integers(1, 3))
def test_a_parameter_in_chunks_is_updated_as_torch_does(sizes: list[int], chunk: int, steps: int) -> None:
    """In float32, where nothing is rounded, the weights and moments are those of ``torch.optim.AdamW``."""
    how = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1, "fused": True}
    kinds = (torch.optim.AdamW, partial(optimizer_module.StochasticAdamW, seed=(0,)))
    found = []
    for kind in kinds:
        parameters = [nn.Parameter(torch.linspace(-1, 1, size)) for size in sizes]
        optimizer = kind([{"params": parameters}], **how)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
            optimizer.state[parameter] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(optimizer_module, "_CHUNK", chunk)
            for step in range(steps):
                for parameter in parameters:
                    parameter.grad.copy_(torch.linspace(2, -1, len(parameter)) + step)
                optimizer.step()
        found.append([*(p.detach() for p in parameters), *(t for p in parameters for t in optimizer.state[p].values())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_backward_passes_add_up_in_float32() -> None:
    model = Weights(torch.bfloat16, 3)
    optimizer = FlatAdamW(model, OptimizerSettings(learning_rate=1, steps=1), seed=(0, 0))
    for factor in (256.0, 1.0, 1.0):
        (model.weight * factor).sum().backward()
    assert optimizer.gradient.tolist() == [258.0] * 3  # in bfloat16 it would stay at 256
    sum((model.weight * factor).sum() for factor in (256.0, 1.0, 1.0)).backward()
    assert optimizer.gradient.tolist() == [516.0] * 3
    assert optimizer.gradient.dtype == torch.float32


def test_a_layer_is_compiled_as_one_graph_also_beside_a_gradient() -> None:
    model = Weights(torch.bfloat16)
    optimizer = FlatAdamW(model, OptimizerSettings(learning_rate=0.1, steps=1), seed=(0,))
    compiled = torch.compile(lambda: model.weight.sum() * 2, backend="eager", fullgraph=True)
    for _ in range(2):
        compiled().backward()
    assert optimizer.gradient.tolist() == [4.0] * 4096


def test_a_weight_takes_14_bytes_in_place_of_16(tiny_folder: Path) -> None:
    bytes_of_one = []
    for more in ({"compute": "bfloat16"}, STOCHASTIC):
        trainer = backend(tiny_folder, **more)
        count = sum(piece.tensor.numel() for piece in trainer._shards)
        bytes_of_one.append(held_bytes(trainer) / count)
        dtype = getattr(torch, more.get("weights", "float32"))
        assert {parameter.dtype for parameter in trainer._model.parameters()} == {dtype}
        assert {parameter.dtype for parameter in trainer._reference.parameters()} == {dtype}
    assert bytes_of_one == pytest.approx([4 + 4 + 8, 2 + 4 + 8], rel=1e-2)


def compared(folder: Path) -> tuple[float, float]:
    """Three steps with weights in bfloat16 beside three with weights in float32.

    Returns how far the weights move along the way that they take in float32, as a part of it, and how the losses of the
    third step differ.
    """
    ways, losses = [], []
    for trainer in (backend(folder, **STOCHASTIC), backend(folder, compute="bfloat16")):
        begin = weights(trainer)
        losses.append(train_share(trainer, 1, 3)["loss"])
        ways.append(np.concatenate([(array - begin[name]).ravel() for name, array in weights(trainer).items()]))
    return float(ways[0] @ ways[1] / (ways[1] @ ways[1])), losses[0] - losses[1]


def test_training_is_near_that_with_float32_weights(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved, difference = compared(tiny_folder)
    assert 0.85 < moved < 1.1
    assert abs(difference) < 0.01
    monkeypatch.setattr(optimizer_module, "round_stochastically", lambda exact, _generator: exact.bfloat16())
    assert compared(tiny_folder)[0] < 0.6


@pytest.mark.parametrize("more", [{}, {"options": {"gradient_checkpointing": True, "head_tokens": 5}}])
def test_a_resumed_run_has_the_same_bits(tiny_folder: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    straight = backend(tiny_folder, **STOCHASTIC, **more)
    train_share(straight, 1, 2)
    straight.snapshot()(tmp_path)
    resumed = backend(tiny_folder, checkpoint=tmp_path, **STOCHASTIC, **more)
    assert_same_bits(weights(resumed), weights(straight))
    assert train_share(straight, 3, 4) == train_share(resumed, 3, 4)
    assert_same_bits(weights(resumed), weights(straight))


def test_a_checkpoint_is_never_rounded_by_a_resume(tiny_folder: Path, tmp_path: Path) -> None:
    for name, more in (("narrow", STOCHASTIC), ("wide", {})):
        (tmp_path / name).mkdir()
        trainer = backend(tiny_folder, **more)
        train_share(trainer, 1, 1)
        trainer.snapshot()(tmp_path / name)
        if name == "narrow":
            widened = backend(tiny_folder, checkpoint=tmp_path / name)
            assert_same_bits(weights(widened), weights(trainer))
    with pytest.raises(CheckpointError, match="are float32") as refused:
        backend(tiny_folder, checkpoint=tmp_path / "wide", **STOCHASTIC)
    assert "precision" in (refused.value.hint or "")


def test_what_is_published_is_exact_in_both_dtypes(tiny_folder: Path) -> None:
    trainer = backend(tiny_folder, **STOCHASTIC)
    train_share(trainer, 1, 2)
    bits = {name: array.copy() for name, array in trainer.tensors(dtype="bfloat16")}
    wide = weights(trainer)
    gaps = []
    for published in (bits, wide):
        trainer.measure(samples(), weights=published)
        gaps.append(trainer.finish_step(3)["logprob_gap"])
    assert gaps[0] == gaps[1]
    for name, array in wide.items():
        assert bits[name].dtype == np.uint16
        assert np.array_equal((bits[name].astype(np.uint32) << 16).view(np.float32), array), name
