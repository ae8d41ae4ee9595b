"""The torch backend, with a witness of what each step computed; a rank alone computes all of it in float64.

It is written to the folder that ``WITNESS`` names, a file for each step and rank: tokens of each micro-batch as it was
packed; of a rank alone also the step's gradient; and where the old policy is the lagged one, the gradient that three
separate models give (``tri_model_reference``), of the step's policy, that of one step before it as it was published,
and θ_0.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tri_model_reference import TriModelLoss, separate_gradient

from asyncflow.training.batch import MicroBatch
from asyncflow.training.packing import Pack
from asyncflow.training.ranks import ProcessGroup
from asyncflow.training.settings import BackendSettings
from asyncflow.training.torch.backend import TorchBackend


class GradientWitness(TorchBackend):
    def __init__(self, settings: BackendSettings, *, group: ProcessGroup) -> None:
        if group.world == 1:
            torch.set_default_dtype(torch.float64)
            double: Any = "float64"
            settings = replace(settings, compute=double, weights=double)
        super().__init__(settings, group=group)
        self._batches: list[MicroBatch] = []

    def load(self, folder: Path, *, checkpoint: Path | None) -> None:
        super().load(folder, checkpoint=checkpoint)
        self._folder, self._published = folder, [dict(self.tensors())]
        for state in self._optimizer._adam.state.values():
            state |= {name: state[name].to(torch.get_default_dtype()) for name in ("exp_avg", "exp_avg_sq")}

    def micro_batch(self, batch: MicroBatch, *, version: int | None) -> None:
        super().micro_batch(batch, version=version)
        self._batches.append(batch)

    def finish_step(self, step: int) -> dict[str, float]:
        tokens = [sum(len(pack.ids) for pack in self._packed(batch)) for batch in self._batches]
        gradients = self._gradients(step) if self.group.world == 1 else {}
        file = Path(os.environ["WITNESS"]) / f"step-{step}-rank-{self.group.rank}.npz"
        np.savez(file, tokens=np.array(tokens), **gradients)
        metrics = super().finish_step(step)
        self._batches = []
        self._published.append(dict(self.tensors()))
        return metrics

    def _packed(self, batch: MicroBatch) -> list[Pack]:
        return self._packs.of(batch, np.flatnonzero(~self._silent(batch))) if len(batch) else []

    def _gradients(self, step: int) -> dict[str, NDArray[np.float64]]:
        """Return the gradient of the step before any clipping, and the separate one, float64[P] each."""
        loss, batch = self.settings.loss, MicroBatch.joined(self._batches)
        named = dict(self._model.named_parameters())
        found = {"gradient": {name: own.grad / batch.loss_lengths().sum() for name, own in named.items()}}
        if loss.old == "lagged":
            found["separate"] = separate_gradient(
                self._folder,
                batch,
                TriModelLoss(loss.clip.low, loss.clip.high, loss.kl, self.settings.temperature),
                policy={name: own.detach() for name, own in named.items()},
                old=self._published[step - 2] if step > 1 else None,
                reference=self._published[0],
            )
        return {kind: torch.cat([parts[name].flatten() for name in named]).numpy() for kind, parts in found.items()}
