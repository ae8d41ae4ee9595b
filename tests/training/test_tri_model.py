"""The tri-model of Periodic Asynchrony: policy, reference and the old policy of one step behind, in one micro-step.

Responses of a group stand behind one copy of their prompt. What comes out is what three models compute that see every
sample alone, with each formula written out, in float64; the old policy's log-probs are rounded to float32, as they are
kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_torch_backend import weights
from train_reference import TEMPERATURE, relative_error, samples
from transformers import AutoModelForCausalLM
from tri_model_reference import TriModelLoss, separate_gradient

from asyncflow.algorithms.loss import Loss
from asyncflow.algorithms.losses import Clip
from asyncflow.training.ranks import SingleProcess
from asyncflow.training.settings import BackendSettings, OptimizerSettings
from asyncflow.training.torch.backend import TorchBackend

STEPS = 4
KL = 0.05
LOSS = Loss(old="lagged", clip=Clip(low=0.02, high=0.03), kl=KL, kl_name="k3")
SEPARATE = TriModelLoss(LOSS.clip.low, LOSS.clip.high, KL, TEMPERATURE)


class Kept(TorchBackend):
    """The backend itself, which keeps the gradient of the last step and the weights that it was computed with.

    It moves the weights by the gradient alone, since AdamW keeps its moments in float32.
    """

    def load(self, folder: Path, *, checkpoint: Path | None) -> None:
        super().load(folder, checkpoint=checkpoint)
        self._optimizer.move = self._move  # type: ignore[method-assign]

    def _move(self, step: int, *, norm: float) -> None:
        self.policy = {shard.name: own.detach().clone() for shard, own in self._optimizer._held}
        self.kept = {shard.name: own.grad.clone() for shard, own in self._optimizer._held}
        with torch.no_grad():
            for _, own in self._optimizer._held:
                own.sub_(self._optimizer.rate(step) * own.grad)


@pytest.fixture
def in_float64(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All of a model computes in float64: also its norms, which transformers has in float32."""

    def normed(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * hidden * (hidden.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()

    modules = AutoModelForCausalLM.from_pretrained(tiny_folder).modules()
    norms = {type(module) for module in modules if type(module).__name__.endswith("RMSNorm")}
    assert norms
    for norm in norms:
        monkeypatch.setattr(norm, "forward", normed)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_each_step_of_a_run_has_the_gradient_of_three_separate_models(tiny_folder: Path, in_float64: None) -> None:
    double: Any = "float64"
    settings = BackendSettings(
        optimizer=OptimizerSettings(learning_rate=0.1, steps=STEPS, max_grad_norm=0),
        loss=LOSS,
        temperature=TEMPERATURE,
        layout="shared-prompt",
        pack_tokens=64,
        group_size=4,
        compute=double,
        weights=double,
        threads=1,
    )
    trainer = Kept(settings, group=SingleProcess())
    trainer.load(tiny_folder, checkpoint=None)
    first, batch = weights(trainer), samples()
    published: dict[int, Any] = {0: first}
    order = np.random.default_rng(7)
    for step in range(1, STEPS + 1):
        slots = np.array_split(order.permutation(len(batch)), 3)
        for slot in slots:
            part = batch.take(slot.tolist())
            older = published[step - 2] if step > 1 else None
            trainer.micro_batch(trainer.prepare(part, weights=older) if older else part, version=None)
        metrics = trainer.finish_step(step)
        published[step] = weights(trainer)
        models = {"policy": trainer.policy, "old": published.get(step - 2), "reference": first}
        expected = separate_gradient(tiny_folder, batch, SEPARATE, **models)
        assert relative_error(trainer.kept, expected) < 1e-12, step
        if step > 1:
            assert metrics["ratio_max"] > 1
            assert metrics["clip_low"] + metrics["clip_high"] > 0
            assert metrics["kl"] > 0
