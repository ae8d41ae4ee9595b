"""A causal language model of transformers, run on packs.

Invariant: ``token_logprobs`` gives the log-prob of each target under the distribution that sampling used (temperature
applied), in float32, and only the rows that predict a target ever reach the output layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM

from asyncflow.errors import CheckpointError, ManifestError
from asyncflow.train.backends.torch_attention import ATTENTION, Documents
from asyncflow.train.packing import Pack


def open_model(folder: Path, *, weights: bool, device: torch.device) -> nn.Module:
    """Open the model folder in float32: with its weights, or (``weights`` False) with arbitrary ones.

    Raises ManifestError where the folder holds no model that transformers can open.
    """
    try:
        config = AutoConfig.from_pretrained(folder)
        kind = {"attn_implementation": ATTENTION, "dtype": torch.float32}
        model = (
            AutoModelForCausalLM.from_pretrained(folder, config=config, **kind)
            if weights
            else AutoModelForCausalLM.from_config(config, **kind)
        )
    except (OSError, ValueError, KeyError, SafetensorError) as wrong:
        raise ManifestError(
            f"no model can be opened: {wrong}",
            where=str(folder),
            hint="Give a folder with config.json and model.safetensors, as transformers writes it.",
        ) from wrong
    return model.to(device).eval()


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Give each parameter once, tied ones under their first name, and then the buffers that belong to the state."""
    yield from model.named_parameters(remove_duplicate=True)
    persistent = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


def read_weights(model: nn.Module, file: Path) -> None:
    """Copy the tensors of a safetensors file into the model. Raises CheckpointError where names or shapes differ."""
    stored = load_file(file)
    expected = dict(named_weights(model))
    if stored.keys() != expected.keys() or any(stored[name].shape != expected[name].shape for name in stored):
        odd = sorted(stored.keys() ^ expected.keys()) or [n for n in stored if stored[n].shape != expected[n].shape]
        raise CheckpointError(
            f"weights of the checkpoint do not fit the model, first at {odd[0]}",
            where=str(file),
            hint="Resume with the model that the run began with.",
        )
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(stored[name])


def token_logprobs(
    model: nn.Module,
    pack: Pack,
    *,
    temperature: float,
    compute: torch.dtype,
    entropy: bool,
    weights: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-prob of each target of ``pack``, float32[N], and the entropy there, float32[N], if asked for.

    weights: to compute with instead of the model's own, with the names of ``named_weights``.
    """
    device = next(model.parameters()).device

    def on_device(array: Any) -> Tensor:
        return torch.from_numpy(array).to(device)

    with torch.autocast(device.type, dtype=compute, enabled=compute != torch.float32):
        inputs = {
            "input_ids": on_device(pack.ids)[None],
            "position_ids": on_device(pack.positions)[None],
            "logits_to_keep": on_device(pack.rows),
            "documents": Documents.of(pack, device),
            "use_cache": False,
        }
        output = model(**inputs) if weights is None else functional_call(model, dict(weights), kwargs=inputs)
        logits = output.logits[0]
    logits = logits.float() / temperature
    logprobs = -F.cross_entropy(logits, on_device(pack.targets), reduction="none")
    if not entropy:
        return logprobs, None
    whole = logits.log_softmax(dim=-1)
    return logprobs, -(whole.exp() * whole).sum(dim=-1)
