"""The reference θ_0 as a role of its own: log-probs of finished responses under one model that never changes.

Samples are packed as in the trainer, and computed at the sampling temperature and in the trainer's precision. If a pack
does not fit the device, its batch and all later batches are computed in packs of half the size.

Invariant: the log-prob of a token equals the result of a reference inside the trainer, up to the rounding differences
between packs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncflow.api.graph import REF_LOGPROBS
from asyncflow.flow.slots import SLOT_TOKENS
from asyncflow.models.device import find_device
from asyncflow.plugins import read_options
from asyncflow.queue.protocol.messages import LeasedRow
from asyncflow.rpc.columns import Jagged
from asyncflow.training.backend import OPTIONS
from asyncflow.training.packing import LayoutName, pack_samples
from asyncflow.training.settings import BackendSettings, TorchOptions
from asyncflow.training.torch.memory import PackBudget
from asyncflow.training.torch.model import LogprobModel, choose_kernels, open_model, smallest_pack


class ReferenceModel:
    """The model of ``folder``, held in the dtype of the trainer's weights.

    settings: the trainer's, with this process's device and threads. Raises ManifestError if the model cannot be opened
    or does not support packs.
    """

    def __init__(self, folder: Path, settings: BackendSettings) -> None:
        options = read_options(settings.options, TorchOptions, where=OPTIONS)
        torch.set_num_threads(max(1, settings.threads))
        device = find_device(settings.device, share=settings.share, where="spec.reference.accelerator")
        choose_kernels(device, deterministic=settings.deterministic)
        dtype: torch.dtype = getattr(torch, settings.weights)
        model = open_model(folder, weights=True, device=device, dtype=dtype, frozen=True, longest=settings.longest)
        self._model = LogprobModel(
            model,
            temperature=settings.temperature,
            compute=getattr(torch, settings.compute),
            rows=options.head_tokens,
        )
        self._model.evaluate(smallest_pack())
        self._layout: LayoutName = "separate" if self._model.padded else settings.layout
        self._budget = PackBudget(settings.pack_tokens or max(SLOT_TOKENS, settings.longest or 0))
        self._device = device

    def compute(self, rows: Sequence[LeasedRow], columns: Mapping[str, Jagged]) -> list[dict[str, NDArray[Any]]]:
        """Return ``ref_logprobs`` of each row, [response tokens], at least in float32. Blocks."""
        if self._device.type != "cpu":
            torch.accelerator.set_device_index(self._device.index)  # the device is a setting of each thread
        try:
            return self._computed(rows, columns)
        except torch.OutOfMemoryError as full:
            self._budget.halve(full)
        torch.accelerator.empty_cache()
        return self._computed(rows, columns)

    def _computed(self, rows: Sequence[LeasedRow], columns: Mapping[str, Jagged]) -> list[dict[str, NDArray[Any]]]:
        prompts, responses = columns["prompt_ids"], columns["response_ids"]
        packs = pack_samples(
            [prompts.row(index) for index in range(len(rows))],
            [responses.row(index) for index in range(len(rows))],
            [row.meta.serial for row in rows],
            layout=self._layout,
            budget=self._budget.tokens,
            padded=self._model.padded,
        )
        found: list[NDArray[Any]] = [np.zeros(length, np.float32) for length in responses.lengths.tolist()]
        for pack in packs:
            logprobs = self._model.evaluate(pack).cpu().numpy()
            for sample in np.unique(pack.samples).tolist():
                of_sample = pack.samples == sample
                values = np.empty(len(found[sample]), logprobs.dtype)
                values[pack.offsets[of_sample]] = logprobs[of_sample]
                found[sample] = values
        return [{REF_LOGPROBS: values} for values in found]
