"""Steps of algorithms that need more than a token of its own: all of D_k, or pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from train_reference import TEMPERATURE, GradientKept, part, samples

from asyncflow.algorithms.base import Algorithm
from asyncflow.algorithms.dpo import Dpo, DpoOptions
from asyncflow.algorithms.grpo import Grpo
from asyncflow.algorithms.loss import Aggregation, Loss
from asyncflow.algorithms.reinforce import ReinforceOptions, ReinforcePlusPlus
from asyncflow.training.batch import MicroBatch
from asyncflow.training.ranks import ProcessGroup
from asyncflow.training.settings import BackendSettings, OptimizerSettings

DISCOUNT, COEFFICIENT = 0.9, 0.2
PENALISED = {"kl": COEFFICIENT, "kl_name": "k1", "penalised": True}
LOSSES: dict[str, Loss] = {
    "reinforce": Loss(algorithm=ReinforcePlusPlus(ReinforceOptions(discount=DISCOUNT), penalised=True), **PENALISED),
    "penalised": Loss(algorithm=Grpo(penalised=True), **PENALISED),
    "dpo": Loss(algorithm=Dpo(DpoOptions(beta=0.3, pairs=2)), aggregation=Aggregation(name="seq-mean-token-sum")),
}


def samples_for(algorithm: Algorithm) -> MicroBatch:
    """Samples with what the driver writes: rewards, or the numbers of pairs; all have tokens that count."""
    batch = samples()
    if not algorithm.pairs:
        assert batch.advantages is not None
        return replace(batch, advantages=None, outcomes=np.round(batch.advantages))
    batch = part(batch, [i for i, key in enumerate(batch.keys) if key.serial not in (1, 2)])
    return replace(batch, advantages=np.array([1, -2, 2, -1] * (len(batch) // 4), np.float32))


def backend_of(folder: Path, loss: Loss, group: ProcessGroup) -> GradientKept:
    optimizer = OptimizerSettings(learning_rate=1e-3, steps=2, max_grad_norm=0)
    settings = BackendSettings(optimizer=optimizer, loss=loss, temperature=TEMPERATURE, pack_tokens=40, threads=1)
    made = GradientKept(settings, group=group)
    made.load(folder, checkpoint=None)
    return made


def gradient_of(backend: GradientKept, batch: MicroBatch, slots: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """The gradient of a step, of which this rank has the samples of ``slots``."""
    mine = [i for slot in slots for i in slot]
    prepared = backend.prepare(part(batch, mine))
    begin = 0
    for slot in slots:
        backend.micro_batch(prepared.take(list(range(begin, begin + len(slot)))), version=None)
        begin += len(slot)
    backend.finish_step(1)
    return backend.kept
