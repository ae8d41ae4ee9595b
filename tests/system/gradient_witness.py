"""The torch back end, with a witness: each rank also adds up its gradient in float64, from the packs of the run.

What it saw is written to the folder that ``WITNESS`` names, a file for each step and rank.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from asyncflow.training.batch import MicroBatch
from asyncflow.training.torch.backend import TorchBackend
from asyncflow.training.torch.model import LogprobModel, open_model
from asyncflow.training.torch.packs import entries


class GradientWitness(TorchBackend):
    def load(self, folder: Path, *, checkpoint: Path | None) -> None:
        super().load(folder, checkpoint=checkpoint)
        model = open_model(folder, weights=True, device=torch.device("cpu")).double()
        self._exact = LogprobModel(model, temperature=self.settings.temperature, compute=torch.float32, rows=1_000_000)
        self._tokens: list[int] = []

    def micro_batch(self, batch: MicroBatch, *, version: int) -> None:
        super().micro_batch(batch, version=version)
        loss, weights = self.settings.loss, self.settings.loss.aggregation.weights(batch.loss_lengths())
        packs = self._packs.of(batch, np.flatnonzero(~loss.silent(batch.advantages))) if len(batch) else []
        self._tokens.append(sum(len(pack.ids) for pack in packs))
        for pack in packs:
            logprobs, _ = self._exact(pack, entropy=False)
            terms = loss.tokens(
                logprobs,
                behaviour=torch.from_numpy(batch.logprobs.values[entries(batch, pack)]).double(),
                advantages=torch.from_numpy(batch.advantages[pack.samples]).double(),
                reference=None,
                entropy=None,
            )
            (terms.total * torch.from_numpy(weights[pack.samples])).sum().backward()

    def finish_step(self, step: int) -> dict[str, float]:
        gradient = torch.cat([parameter.grad.flatten() for parameter in self._exact.parameters()])
        file = Path(os.environ["WITNESS"]) / f"step-{step}-rank-{self.group.rank}.npz"
        np.savez(file, gradient=gradient.numpy(), tokens=np.array(self._tokens))
        for parameter in self._exact.parameters():
            parameter.grad = None
        self._tokens = []
        return super().finish_step(step)
