"""A causal language model of transformers, run on packs, and how its layers are computed.

Invariants: the log-prob of each target is that of the distribution that sampling used (temperature applied), in float32
or the model's own precision where that is higher; only the rows that predict a target reach the output layer, a bounded
number at a time where the model ends in it. Which kernels are used, whether layers are compiled, and whether they are
kept for the backward pass or computed again changes nothing but rounding; modules stay as for evaluation, without
dropout.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.logging import disable_progress_bar

from asyncflow.errors import ManifestError, NotYetError
from asyncflow.models.source import check_model
from asyncflow.training.backend import OPTIONS
from asyncflow.training.packing import LayoutName, Pack, few_sizes, pack_samples
from asyncflow.training.torch.attention import ATTENTION, Documents, KernelSequences, NpuSequences, takes_sequences
from asyncflow.training.torch.device import on_device

Layout: TypeAlias = type[Documents] | type[KernelSequences] | type[NpuSequences]
_A_TOKEN = np.zeros(1, dtype=np.int32)
_LEAK = 1e-3
"""Most by which a pack may change the logits of a sample, as a part of the largest."""
_ROUNDED_LEAK = 0.05
"""The same where layers compute in bfloat16."""
_LARGE = 100.0
"""Size of states whose logits any capping changes."""


def choose_kernels(device: torch.device, *, deterministic: bool) -> None:
    """Choose kernels that give the same bits again: always on the CPU, and where asked for on an accelerator.

    An operation without such a kernel then raises RuntimeError; on an NPU it is warned of. CUDA's attention adds up in
    no order where torch is to warn only.
    """
    if device.type == "cuda" and deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(
        deterministic or device.type == "cpu", warn_only=device.type not in ("cpu", "cuda")
    )


def checkpoint_layers(model: nn.Module) -> None:
    """Compute the layers again in the backward pass. Raises ManifestError for a model that cannot."""
    layers = _layers(model, option="gradient_checkpointing")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers:
        # The layer looks at its own flag only; what it is made of stays as for evaluation.
        layer.training = True


def compile_layers(model: nn.Module, *, device: torch.device) -> None:
    """Compile the layers, when they first run. Raises ManifestError where this machine cannot compile."""
    layers = _layers(model, option="compile")
    try:
        torch.compile(_probe)(torch.ones(8, device=device))
    except Exception as wrong:  # whatever a compiler or a missing one raises
        raise ManifestError(
            f"torch.compile does not work here: {_first_line(wrong)}",
            where=f"{OPTIONS}.compile",
            hint="Install a C++ compiler (g++), and on a GPU triton, or set compile: false",
        ) from wrong
    for layer in layers:
        layer.compile()


def _layers(model: nn.Module, *, option: str) -> list[nn.Module]:
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ManifestError(
            f"the layers of {type(model).__name__} cannot be told apart", where=f"{OPTIONS}.{option}", hint="Set false"
        )
    return layers


def _probe(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.sin() + numbers


def _first_line(wrong: Exception) -> str:
    return next(filter(None, (line.strip() for line in str(wrong).splitlines())), type(wrong).__name__)


def open_model(
    folder: Path,
    *,
    weights: bool,
    device: torch.device | None,
    dtype: torch.dtype = torch.float32,
    longest: int | None = None,
) -> nn.Module:
    """Open the model folder with its weights, or (``weights`` False) with arbitrary ones, held in ``dtype``.

    device: None leaves the model where it was made; longest: most tokens of a sequence, None where it is not known.
    Raises ManifestError where the folder holds no model that transformers can open, and NotYetError for one that packs
    cannot hold.
    """
    disable_progress_bar()  # it is no line of a log
    try:
        config = AutoConfig.from_pretrained(folder)
        check_model(config.to_dict(), longest=longest or sys.maxsize, where=str(folder))
        kind = {"attn_implementation": ATTENTION, "dtype": dtype}
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
    return (model if device is None else model.to(device)).eval()


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter once, tied ones under their first name, and then the buffers that belong to the state."""
    yield from model.named_parameters(remove_duplicate=True)
    persistent = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


class PackModel(nn.Module):  # type: ignore[misc]  # mypy does not read torch
    """A model of transformers that computes on packs.

    compute: the dtype of its layers; few_sizes: fill packs up, so that few sizes occur (``packing.few_sizes``).
    """

    def __init__(self, model: nn.Module, *, compute: torch.dtype, few_sizes: bool = False) -> None:
        super().__init__()
        self.model = model
        self.compute = compute
        self._few_sizes = few_sizes

    @property
    def device(self) -> torch.device:
        """The device of its parameters."""
        found: torch.device = next(self.model.parameters()).device
        return found

    def cast(self, **how: Any) -> AbstractContextManager[Any]:
        """Return what has the layers of this block compute in ``compute``; how: as for ``torch.autocast``."""
        chosen: AbstractContextManager[Any] = torch.autocast(
            self.device.type, dtype=self.compute, enabled=self.compute != torch.float32, **how
        )
        return chosen

    def inputs(self, pack: Pack) -> dict[str, Any]:
        """Return the arguments of a forward pass over ``pack``."""
        filled = pack.padded(few_sizes(len(pack.ids))) if self._few_sizes else pack
        layout = _layout(self.model.config, device=self.device, compute=self.compute)
        return _inputs(filled, self.device, layout)


class LogprobModel(PackModel):
    """A model that is asked for the log-probs of targets instead of logits.

    rows: most targets whose logits exist at once. A pack with more is taken in chunks, each computed again in the
    backward pass, so that memory does not grow with the pack. A model that changes what its output layer makes, by a
    scale or a cap, makes all logits of a pack at once; which it is, the first pass finds out.
    """

    def __init__(
        self, model: nn.Module, *, temperature: float, compute: torch.dtype, rows: int, few_sizes: bool = False
    ) -> None:
        super().__init__(model, compute=compute, few_sizes=few_sizes)
        self._temperature = temperature
        self._rows = rows
        self._ends_in_its_head: bool | None = None

    def evaluate(self, pack: Pack, *, temperature: float | None = None) -> Tensor:
        """Return the log-prob of each target of ``pack``, without a gradient: float32[N].

        On a model that is cut over ranks all of them call it. Raises ManifestError where the model has an attention
        that packs do not support.
        """
        with torch.no_grad():
            logprobs, _ = self(pack, entropy=False, temperature=temperature)
        if isinstance(self, FSDPModule):
            self.reshard()
        return logprobs

    def forward(self, pack: Pack, *, entropy: bool, temperature: float | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the log-prob of each target of ``pack``, and the entropy there if asked for: float32[N] each.

        temperature: that of sampling where none is given.
        """
        temperature = self._temperature if temperature is None else temperature
        if self._ends_in_its_head is None:
            self._look()
        inputs = self.inputs(pack)
        targets, rows = (on_device(array, self.device) for array in (pack.targets, pack.rows))
        if not self._ends_in_its_head or len(targets) <= self._rows:
            with self.cast():
                logits = self.model(**inputs, logits_to_keep=rows).logits[0]
                return _logprobs(logits, targets, temperature=temperature, entropy=entropy)
        with self.cast():
            states = self.model.base_model(**inputs).last_hidden_state[0].index_select(0, rows)
        # One rounded copy of the head for all chunks would add up their gradients in its own precision.
        with self.cast(cache_enabled=False):
            chunks = [
                checkpoint(self._chunk, *chunk, temperature, entropy, use_reentrant=False, preserve_rng_state=False)
                for chunk in zip(states.split(self._rows), targets.split(self._rows), strict=True)
            ]
        logprobs, entropies = zip(*chunks, strict=True)
        return torch.cat(logprobs), torch.cat(entropies) if entropy else None

    def _look(self) -> None:
        """Find out what the model is like, in its first pass. Raises NotYetError where packs cannot hold it."""
        # Layers that are cut over ranks or hold narrower weights compute in the narrower dtype, whoever calls them.
        narrow = isinstance(self, FSDPModule) or next(self.model.parameters()).dtype == self.compute
        rounds = narrow and self.compute != torch.float32
        with self.cast() if rounds else nullcontext():
            _check_packs(self.model, leak=_ROUNDED_LEAK if rounds else _LEAK)
            self._ends_in_its_head = _ends_in_its_head(self.model)

    def _chunk(
        self, states: Tensor, targets: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        logits = self.model.get_output_embeddings()(states)
        return _logprobs(logits, targets, temperature=temperature, entropy=entropy)


def smallest_pack() -> Pack:
    """Return a pack with one target."""
    return next(iter(pack_samples([_A_TOKEN], [_A_TOKEN], [0], layout="separate", budget=2)))


def _layout(config: PretrainedConfig, *, device: torch.device, compute: torch.dtype) -> Layout:
    """Return the form in which attention takes packs on ``device``."""
    if device.type == "npu":
        return NpuSequences
    return KernelSequences if takes_sequences(config, device=device, compute=compute) else Documents


def _inputs(pack: Pack, device: torch.device, layout: Layout = Documents) -> dict[str, Any]:
    return {
        "input_ids": on_device(pack.ids, device)[None],
        "position_ids": on_device(pack.positions, device)[None],
        "documents": layout.of(pack, device),
        "use_cache": False,
    }


def _logprobs(logits: Tensor, targets: Tensor, *, temperature: float, entropy: bool) -> tuple[Tensor, Tensor | None]:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1:
        logits = logits / temperature
    logprobs = -F.cross_entropy(logits, targets, reduction="none")
    if not entropy:
        return logprobs, None
    whole = logits.log_softmax(dim=-1)
    return logprobs, -(whole.exp() * whole).sum(dim=-1)


def _check_packs(model: nn.Module, *, leak: float) -> None:
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
    if float((alone - together).abs().max()) > leak * float(alone.abs().max()):
        raise _no_packs(model, "what stands beside a sample changes its logits")


def _no_packs(model: nn.Module, why: str) -> NotYetError:
    return NotYetError(
        f"{type(model).__name__} cannot be trained in packs: {why}",
        where="spec.model.source",
        hint="Use a causal model with softmax attention over all earlier tokens",
    )


def _ends_in_its_head(model: nn.Module) -> bool:
    """Return whether logits are what the output layer makes of the last states: not scaled, not capped.

    Asked with states of its own, since those of a model that is not read yet, or of its padding, may be 0.
    """
    pack = smallest_pack()
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
            return bool(torch.allclose(head(states).float(), logits.float()))
    finally:
        replaced.remove()
