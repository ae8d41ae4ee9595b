"""Tests of how many tokens fit a device, and what becomes of a step in which memory runs out."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from train_reference import part, samples

from asyncflow.algorithms.dpo import Dpo
from asyncflow.algorithms.loss import Aggregation, Loss
from asyncflow.algorithms.ppo import Ppo
from asyncflow.algorithms.reinforce import ReinforcePlusPlus
from asyncflow.errors import ManifestError
from asyncflow.flow.slots import SLOT_TOKENS
from asyncflow.training.batch import MicroBatch
from asyncflow.training.ranks import SingleProcess
from asyncflow.training.settings import BackendSettings, CriticSettings, OptimizerSettings
from asyncflow.training.torch.backend import TorchBackend
from asyncflow.training.torch.memory import (
    MOST_TOKENS,
    Trial,
    find_largest_pack,
    largest_pack,
    trial_batch,
)

GIB = 1 << 30


OPTIMIZER = OptimizerSettings(learning_rate=1e-3, steps=4)


def backend(folder: Path, **more: Any) -> TorchBackend:
    made = TorchBackend(BackendSettings(optimizer=OPTIMIZER, threads=1, **more), group=SingleProcess())
    made.load(folder, checkpoint=None)
    return made


@given(
    fixed=st.integers(0, 4 * GIB),
    each=st.integers(1_000, 8_000_000),
    free=st.integers(GIB, 200 * GIB),
    longest=st.integers(1, 4096),
)
def test_what_is_chosen_fits_and_little_more_would(fixed: int, each: int, free: int, longest: int) -> None:
    small, large = (Trial(tokens, fixed + each * tokens) for tokens in (2048, 4096))
    if fixed + each * (longest + 1) > 0.9 * free:
        with pytest.raises(ManifestError, match="longest sample has"):
            largest_pack(small, large, free=int(0.9 * free), longest=longest + 1)
        return
    found = largest_pack(small, large, free=free, longest=longest)
    assert longest <= found <= MOST_TOKENS
    assert fixed + each * found <= free
    assert found == MOST_TOKENS or found >= (0.9 * free - fixed) / each - 256


def test_trials_leave_out_no_token_and_are_as_long_as_samples() -> None:
    batch = trial_batch(1024, longest=100)
    assert batch.responses.lengths.tolist() == [100] * 10
    assert (batch.prompts.lengths == 1).all()
    assert trial_batch(50, longest=100).responses.lengths.tolist() == [50]


class Device:
    """The answers of ``torch.accelerator`` about a device whose memory holds a model and the packs of one pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, free: int, each: int, fixed: int) -> None:
        self.free, self.each, self.fixed = free, each, fixed
        self.peak = 0
        self.tried: list[int] = []
        told = {
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": lambda _device: setattr(self, "peak", 0),
            "memory_allocated": lambda _device: 0,
            "max_memory_allocated": lambda _device: self.peak,
            "memory_reserved": lambda _device: 0,
            "synchronize": lambda _device: None,
            "get_memory_info": lambda _device: (self.free, 80 * GIB),
        }
        for name, answer in told.items():
            monkeypatch.setattr(torch.accelerator, name, answer)

    def step(self, batch: MicroBatch, tokens: int) -> None:
        needed = self.fixed + self.each * len(batch.responses.values)
        if needed > self.free:
            raise torch.OutOfMemoryError(f"tried to allocate {needed}")
        self.tried.append(tokens)
        self.peak = max(self.peak, needed)


@pytest.mark.parametrize(
    ("free", "each", "least", "most"),
    [
        (70 * GIB, GIB // 400, 24_000, 28_000),
        (14 * GIB, GIB // 400, 4_800, 5_600),
        (3 * GIB, GIB // 400, 1024, 1024),
        (5 * GIB, GIB // 1000, 4_000, 5_000),
    ],
)
def test_trials_find_what_fits(monkeypatch: pytest.MonkeyPatch, free: int, each: int, least: int, most: int) -> None:
    device = Device(monkeypatch, free=free, each=each, fixed=0)
    found = find_largest_pack(device.step, device=torch.device("cpu"), share=1.0, reserved=0, longest=512)
    assert least <= found <= most
    assert each * found <= free


def test_a_share_of_the_device_and_what_publishing_needs_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, free=80 * GIB, each=GIB // 256, fixed=GIB)
    found = find_largest_pack(device.step, device=torch.device("cpu"), share=0.5, reserved=10 * GIB, longest=512)
    assert 0.8 * 30 * GIB < device.fixed + device.each * found <= 30 * GIB


@pytest.mark.parametrize(
    "more",
    [
        {"loss": Loss(algorithm=Ppo()), "critic": CriticSettings(optimizer=OPTIMIZER)},
        {"loss": Loss(algorithm=Dpo(), aggregation=Aggregation(name="seq-mean-token-sum")), "reference_given": True},
        {"loss": Loss(kl=0.1), "reference_given": True},
    ],
)
def test_a_trial_has_all_that_a_loss_needs(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, more: Any) -> None:
    trainer = backend(tiny_folder, longest=64, **more)
    Device(monkeypatch, free=80 * GIB, each=0, fixed=0)
    trainer._find_slot_tokens()
    assert trainer.slot_tokens == MOST_TOKENS


def test_a_sample_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, free=GIB, each=GIB // 256, fixed=0)
    with pytest.raises(ManifestError, match="does not fit the device") as refused:
        find_largest_pack(device.step, device=torch.device("cpu"), share=1.0, reserved=0, longest=2000)
    assert refused.value.where == "spec.trainer.backend.tokensPerMicroBatch"


def test_without_a_manifest_or_a_device_a_slot_holds_a_stated_number_of_tokens(tiny_folder: Path) -> None:
    assert backend(tiny_folder).slot_tokens == SLOT_TOKENS
    assert backend(tiny_folder, longest=5000).slot_tokens == 5000
    assert backend(tiny_folder, pack_tokens=77, longest=50).slot_tokens == 77


def runs_out(trainer: TorchBackend, *, above: int, times: int) -> None:
    """Make backward passes over more than ``above`` tokens fail in the first layer, when the last one has gradients."""
    left = times

    def fail(_module: object, _inputs: object, gradients: tuple[torch.Tensor, ...]) -> None:
        nonlocal left
        if left and gradients[0].shape[1] > above:
            left -= 1
            raise torch.OutOfMemoryError("no memory is left")

    trainer._model.model.layers[0].register_full_backward_hook(fail)


def train(trainer: TorchBackend) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    batch = samples()
    for start in range(0, len(batch), 6):
        trainer.micro_batch(part(batch, range(start, min(start + 6, len(batch)))), version=0)
    trained = trainer.trained
    metrics = trainer.finish_step(1)
    assert trained == len(batch)
    return metrics, {name: array.copy() for name, array in trainer.tensors()}


def test_a_step_in_which_memory_runs_out_is_that_of_half_the_size(tiny_folder: Path, caplog: Any) -> None:
    halved, small = backend(tiny_folder, pack_tokens=120), backend(tiny_folder, pack_tokens=60)
    runs_out(halved, above=70, times=1)
    with caplog.at_level(logging.WARNING):
        metrics, weights = train(halved)
    expected, same = train(small)
    assert [record for record in caplog.messages if "at most 60 tokens from now on" in record]
    assert metrics == expected
    assert all(weights[name].tobytes() == same[name].tobytes() for name in same)


def test_memory_that_runs_out_again_ends_the_training(tiny_folder: Path) -> None:
    trainer = backend(tiny_folder, pack_tokens=120)
    runs_out(trainer, above=30, times=9)
    with pytest.raises(ManifestError, match="out of memory with packs of 60 tokens") as refused:
        train(trainer)
    assert refused.value.where == "spec.trainer.backend.tokensPerMicroBatch"


def test_a_step_in_which_memory_runs_out_knows_what_its_rewards_were_charged(tiny_folder: Path) -> None:
    loss = Loss(algorithm=ReinforcePlusPlus(penalised=True), kl=0.1, kl_name="k2", penalised=True)
    batch = replace(samples(), advantages=None, outcomes=np.arange(20, dtype=np.float32))
    known = []
    for times in (0, 1):
        trainer = backend(tiny_folder, pack_tokens=120, loss=loss)
        runs_out(trainer, above=70, times=times)
        trainer.micro_batch(trainer.prepare(batch), version=0)
        known.append(trainer.finish_step(1)["penalty_kl"])
    assert known[0] == pytest.approx(known[1])
