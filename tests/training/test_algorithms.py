"""Advantages out of all of a step, pairs, and the coefficient that adapts, through the torch backend."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_process import gang
from train_algorithms import COEFFICIENT, DISCOUNT, LOSSES, backend_of, gradient_of, samples_for
from train_reference import HORIZON, REFERENCE_SCALE, padded_logprobs, part, relative_error, samples
from transformers import AutoModelForCausalLM

from asyncflow.algorithms.loss import Loss
from asyncflow.algorithms.losses import KlTarget
from asyncflow.training.ranks import SingleProcess
from asyncflow.training.settings import BackendSettings, OptimizerSettings
from asyncflow.training.torch.backend import TorchBackend


def test_returns_are_discounted_penalised_and_normalised_over_the_step(tiny_folder: Path) -> None:
    loss = LOSSES["reinforce"]
    batch = samples_for(loss.algorithm)
    prepared = backend_of(tiny_folder, loss, SingleProcess()).prepare(batch)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(REFERENCE_SCALE)
        reference = padded_logprobs(model, batch, HORIZON).double().numpy()
    assert batch.loss_mask is not None
    returns = []
    for i in range(len(batch)):
        mask, after, row = (
            batch.loss_mask.row(i),
            float(batch.required_outcomes()[i]),
            np.zeros(len(batch.responses.row(i))),
        )
        for t in reversed(np.flatnonzero(mask)):
            row[t] = after = after - COEFFICIENT * (float(batch.logprobs.row(i)[t]) - reference[i, t])
            after *= DISCOUNT
        returns.append(row)
    chosen = np.concatenate(returns)[batch.counted()]
    expected = np.where(batch.counted(), (np.concatenate(returns) - chosen.mean()) / chosen.std(ddof=1), 0)
    assert prepared.token_advantages is not None
    np.testing.assert_allclose(prepared.token_advantages.values, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.process
def test_two_ranks_make_the_gradient_of_one(tmp_path: Path, tiny_folder: Path) -> None:
    """Rank 0 has most of the samples, and a group is cut between the ranks where it need not stay together."""
    shutil.copytree(tiny_folder, tmp_path / "model")
    both = gang("algorithms", tmp_path, 2)
    for name, loss in LOSSES.items():
        batch = samples_for(loss.algorithm)
        everything = list(range(len(batch)))
        alone = backend_of(tiny_folder, loss, SingleProcess())
        expected = gradient_of(alone, batch, [everything])
        for found in both:
            got = {key.partition("/")[2]: torch.from_numpy(array) for key, array in found.items() if name in key}
            assert relative_error(got, expected) < 1e-5, name


def test_the_coefficient_follows_the_divergence_and_goes_on_after_a_resume(tiny_folder: Path, tmp_path: Path) -> None:
    target = KlTarget(value=1e-6, horizon=2.0)
    assert target.adapted(0.1, kl=2e-6) == pytest.approx(0.11)
    assert target.adapted(0.1, kl=0.9e-6) == pytest.approx(0.095)
    loss = Loss(kl=0.1, target=target)

    def opened(checkpoint: Path | None) -> TorchBackend:
        optimizer = OptimizerSettings(learning_rate=1e-3, steps=8)
        made = TorchBackend(BackendSettings(optimizer=optimizer, loss=loss, threads=1), group=SingleProcess())
        made.load(tiny_folder, checkpoint=checkpoint)
        return made

    def step(trainer: TorchBackend, number: int) -> float:
        trainer.micro_batch(part(samples(), range(8)), version=None)
        return trainer.finish_step(number)["kl_coefficient"]

    trainer = opened(None)
    used = [step(trainer, number) for number in (1, 2, 3)]
    assert used == pytest.approx([0.1, 0.09, 0.099]), "below the target at first, where nothing has moved, then above"
    trainer.snapshot()(tmp_path)
    resumed = opened(tmp_path)
    assert step(resumed, 4) == step(trainer, 4) == pytest.approx(0.1089)
