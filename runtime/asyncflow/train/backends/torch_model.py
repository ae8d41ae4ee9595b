"""A causal language model of transformers, run on packs.

Invariant: the log-prob of each target is that of the distribution that sampling used (temperature applied), in float32
or the model's own precision where that is higher; only the rows that predict a target reach the output layer, a bounded
number at a time where the model ends in it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from asyncflow.errors import CheckpointError, ManifestError, NotYetError
from asyncflow.models.supported import check_model
from asyncflow.train.backends.torch_attention import ATTENTION, Documents, takes_sequences
from asyncflow.train.backends.torch_copies import on_device
from asyncflow.train.backends.torch_varlen import Sequences
from asyncflow.train.packing import LayoutName, Pack, few_sizes, pack_samples

_A_TOKEN = np.zeros(1, dtype=np.int32)
_LEAK = 1e-3
"""Most by which a pack may change the logits of a sample, as a part of the largest."""
_LARGE = 100.0
"""Size of states whose logits any capping changes."""


def open_model(folder: Path, *, weights: bool, device: torch.device, longest: int | None = None) -> nn.Module:
    """Open the model folder in float32: with its weights, or (``weights`` False) with arbitrary ones.

    longest: most tokens of a sequence, None where it is not known. Raises ManifestError where the folder holds no model
    that transformers can open, and NotYetError for one that packs cannot hold.
    """
    try:
        config = AutoConfig.from_pretrained(folder)
        check_model(config.to_dict(), longest=longest or sys.maxsize, where=str(folder))
        kind = {"attn_implementation": ATTENTION, "dtype": torch.float32}
        model = (
            AutoModelForCausalLM.from_pretrained(folder, config=config, **kind)
            if weights
            else AutoModelForCausalLM.from_config(config, **kind)
        )
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as wrong:
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


class LogprobModel(nn.Module):  # type: ignore[misc]  # mypy does not read torch
    """A model that is asked for the log-probs of targets instead of logits.

    rows: most targets whose logits exist at once. A pack with more is taken in pieces, each computed again in the
    backward pass, so that memory does not grow with the pack. A model that changes what its output layer makes, by a
    scale or a cap, makes all logits of a pack at once. few_sizes: fill packs up, so that few sizes occur
    (``packing.few_sizes``).
    """

    def __init__(
        self, model: nn.Module, *, temperature: float, compute: torch.dtype, rows: int, few_sizes: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self._temperature = temperature
        self._compute = compute
        self._few_sizes = few_sizes
        _check_packs(model)
        self._rows = rows if _ends_in_its_head(model) else None
        device = next(model.parameters()).device
        self._layout = Sequences if takes_sequences(model.config, device=device, compute=compute) else Documents

    def forward(self, pack: Pack, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Return the log-prob of each target of ``pack``, and the entropy there if asked for: float32[N] each."""
        device = next(self.model.parameters()).device
        filled = pack.padded(few_sizes(len(pack.ids))) if self._few_sizes else pack
        inputs = _inputs(filled, device, self._layout)
        targets, rows = (on_device(array, device) for array in (pack.targets, pack.rows))
        cast = partial(torch.autocast, device.type, dtype=self._compute, enabled=self._compute != torch.float32)
        if self._rows is None or len(targets) <= self._rows:
            with cast():
                logits = self.model(**inputs, logits_to_keep=rows).logits[0]
                return _logprobs(logits, targets, temperature=self._temperature, entropy=entropy)
        with cast():
            states = self.model.base_model(**inputs).last_hidden_state[0].index_select(0, rows)
        # One rounded copy of the head for all pieces would add up their gradients in its own precision.
        with cast(cache_enabled=False):
            pieces = [
                checkpoint(self._piece, *piece, entropy, use_reentrant=False, preserve_rng_state=False)
                for piece in zip(states.split(self._rows), targets.split(self._rows), strict=True)
            ]
        logprobs, entropies = zip(*pieces, strict=True)
        return torch.cat(logprobs), torch.cat(entropies) if entropy else None

    def _piece(self, states: Tensor, targets: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        logits = self.model.get_output_embeddings()(states)
        return _logprobs(logits, targets, temperature=self._temperature, entropy=entropy)


def _inputs(pack: Pack, device: torch.device, layout: type[Documents] | type[Sequences] = Documents) -> dict[str, Any]:
    return {
        "input_ids": on_device(pack.ids, device)[None],
        "position_ids": on_device(pack.positions, device)[None],
        "documents": layout.of(pack, device),
        "use_cache": False,
    }


def _logprobs(logits: Tensor, targets: Tensor, *, temperature: float, entropy: bool) -> tuple[Tensor, Tensor | None]:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    logprobs = -F.cross_entropy(logits, targets, reduction="none")
    if not entropy:
        return logprobs, None
    whole = logits.log_softmax(dim=-1)
    return logprobs, -(whole.exp() * whole).sum(dim=-1)


def _check_packs(model: nn.Module) -> None:
    """Refuse a model in which a sample of a pack sees another one, or whose layers do not tell attention of packs.

    Raises NotYetError.
    """
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, model.config.vocab_size, length) for length in (3, 3, 2)]
    prompts[1] = prompts[0]
    responses = [rng.integers(0, model.config.vocab_size, length) for length in (4, 5, 3)]
    device = model.get_output_embeddings().weight.device

    def logits(layout: LayoutName, budget: int) -> Tensor:
        found: dict[tuple[int, int], Tensor] = {}
        for pack in pack_samples(prompts, responses, [0, 0, 1], layout=layout, budget=budget):
            made = model(**_inputs(pack, device)).logits[0, on_device(pack.rows, device)].float()
            names = zip(pack.samples.tolist(), pack.offsets.tolist(), strict=True)
            found |= dict(zip(names, made, strict=True))
        return torch.stack([found[name] for name in sorted(found)])

    try:
        with torch.no_grad():
            together, alone = logits("shared-prompt", 99), logits("separate", 1)
    except (TypeError, AttributeError, IndexError) as wrong:
        raise _no_packs(model, str(wrong)) from wrong
    if float((alone - together).abs().max()) > _LEAK * float(alone.abs().max()):
        raise _no_packs(model, "what stands beside a sample changes its logits")


def _no_packs(model: nn.Module, why: str) -> NotYetError:
    return NotYetError(
        f"{type(model).__name__} cannot be trained in packs: {why}",
        where="spec.model.source",
        hint="Use a causal model with softmax attention over all earlier tokens",
    )


def _ends_in_its_head(model: nn.Module) -> bool:
    """Say whether logits are what the output layer makes of the last states: not scaled, not capped.

    Asked with states of its own, since those of a model that is not read yet, or of its padding, may be 0.
    """
    pack = next(iter(pack_samples([_A_TOKEN], [_A_TOKEN], [0], layout="separate", budget=2)))
    head = model.get_output_embeddings()
    shape = (1, len(pack.ids), head.weight.shape[1])
    states = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(head.weight) * _LARGE

    def replace(_module: nn.Module, _inputs: object, output: Any) -> Any:
        output.last_hidden_state = states
        return output

    replaced = model.base_model.register_forward_hook(replace)
    try:
        with torch.no_grad():
            logits = model(**_inputs(pack, head.weight.device)).logits
            return bool(torch.allclose(head(states), logits))
    finally:
        replaced.remove()
