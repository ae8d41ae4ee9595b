"""The log-probs of finished responses under one model that never changes: the reference θ_0 as a role of its own.

Samples are packed as the trainer packs them, and computed at the temperature of sampling, in the trainer's precision. A
batch whose pack does not fit the device is computed again in packs of half the size, from then on.

Invariant: the log-prob of a token is that which the trainer's own reference would have computed, up to the rounding
that another pack makes.
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
from asyncflow.training.packing import pack_samples
from asyncflow.training.settings import BackendSettings, TorchOptions
from asyncflow.training.torch.memory import PackBudget
from asyncflow.training.torch.model import LogprobModel, choose_kernels, open_model, smallest_pack


class ReferenceModel:
    """The model of ``folder``, held in the dtype of the trainer's weights.

    settings: the trainer's, with this process's device and threads. Raises ManifestError where the model cannot be
    opened or used in packs.
    """

    def __init__(self, folder: Path, settings: BackendSettings) -> None:
        options = read_options(settings.options, TorchOptions, where=OPTIONS)
        torch.set_num_threads(max(1, settings.threads))
        device = find_device(settings.device, share=settings.share, where="spec.reference.accelerator")
        choose_kernels(device, deterministic=settings.deterministic)
        dtype: torch.dtype = getattr(torch, settings.weights)
        model = open_model(folder, weights=True, device=device, dtype=dtype, longest=settings.longest)
        self._model = LogprobModel(
            model.requires_grad_(False),
            temperature=settings.temperature,
            compute=getattr(torch, settings.compute),
            rows=options.head_tokens,
        )
        self._model.evaluate(smallest_pack())
        self._layout = settings.layout
        self._budget = PackBudget(settings.pack_tokens or max(SLOT_TOKENS, settings.longest or 0))
        self._device = device

    def compute(self, rows: Sequence[LeasedRow], columns: Mapping[str, Jagged]) -> list[dict[str, NDArray[Any]]]:
        """Return ``ref_logprobs`` of each row, [response tokens], in the dtype of the computation. Blocks."""
        if self._device.type != "cpu":
            torch.accelerator.set_device_index(self._device.index)  # of this thread
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
        )
        found: list[NDArray[Any]] = [np.zeros(length, np.float32) for length in responses.lengths.tolist()]
        for pack in packs:
            logprobs = self._model.evaluate(pack).cpu().numpy()
            for sample in np.unique(pack.samples).tolist():
                mine = pack.samples == sample
                values = np.empty(len(found[sample]), logprobs.dtype)
                values[pack.offsets[mine]] = logprobs[mine]
                found[sample] = values
        return [{REF_LOGPROBS: values} for values in found]
