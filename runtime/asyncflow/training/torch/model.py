"""A causal language model of transformers that computes on packs, and options for the computation of its layers.

Invariants: the log-prob of a target is computed from the distribution that sampling used (with temperature), in float32
or in the model's own precision if that is higher. Only rows that predict a target reach the output layer, in chunks of
bounded size if the output layer is the last operation. The choice of kernels, compilation and gradient checkpointing
changes only rounding. Modules are in evaluation mode, without dropout.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.logging import disable_progress_bar

from asyncflow.errors import ManifestError, NotYetError
from asyncflow.models.folder import model_class
from asyncflow.models.source import check_model, no_packs
from asyncflow.training.backend import OPTIONS
from asyncflow.training.packing import LayoutName, Pack, few_sizes, pack_samples
from asyncflow.training.torch.attention import (
    ATTENTION,
    Documents,
    KernelSequences,
    NpuSequences,
    longest_of,
    takes_sequences,
)
from asyncflow.training.torch.device import on_device

Layout: TypeAlias = type[Documents] | type[KernelSequences] | type[NpuSequences] | None
"""The layout of packs for attention, None for a model that supports no packs."""
_A_TOKEN = np.zeros(1, dtype=np.int32)
_TOLERANCE = 1e-3
"""Largest change of a sample's logits by the rest of its pack, relative to the largest logit."""
_ROUNDED_TOLERANCE = 0.05
"""The same for layers that compute in bfloat16."""
_LARGE = 100.0
"""Size of states at which any capping changes the logits."""


def choose_kernels(device: torch.device, *, deterministic: bool) -> None:
    """Choose kernels that reproduce the same bits: always on the CPU, and on an accelerator if ``deterministic``.

    An operation without such a kernel then raises RuntimeError; on an NPU it only logs a warning. With warnings only,
    CUDA's attention would add in arbitrary order.
    """
    if device.type == "cuda" and deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(
        deterministic or device.type == "cpu", warn_only=device.type not in ("cpu", "cuda")
    )


def checkpoint_layers(model: nn.Module) -> None:
    """Recompute the layers in the backward pass. Raises ManifestError for a model that does not support it."""
    layers = _layers(model, option="gradient_checkpointing")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers:
        layer.training = True  # transformers recomputes only layers in training mode
        layer._gradient_checkpointing_func = partial(_recomputed, layer)  # noqa: SLF001


def _recomputed(layer: nn.Module, function: Callable[..., Any], *inputs: Any) -> Any:
    """Return the result of ``function``, the pass of ``layer``, in evaluation mode and without its activations."""

    def evaluated(*inputs: Any) -> Any:
        layer.training = False
        try:
            return function(*inputs)
        finally:
            layer.training = True

    return checkpoint(evaluated, *inputs, use_reentrant=False, preserve_rng_state=False)


def compile_layers(model: nn.Module, *, device: torch.device) -> None:
    """Compile the layers when they first run. Raises ManifestError if this machine cannot compile."""
    layers = _layers(model, option="compile")
    try:
        torch.compile(_probe)(torch.ones(8, device=device))
    except Exception as error:  # any error of a compiler, or of a missing one
        raise ManifestError(
            f"torch.compile does not work here: {_first_line(error)}",
            where=f"{OPTIONS}.compile",
            hint="Install a C++ compiler (g++), and on a GPU triton, or set compile: false",
        ) from error
    for layer in layers:
        layer.compile()


def _layers(model: nn.Module, *, option: str) -> list[nn.Module]:
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ManifestError(
            f"the layers of {type(model).__name__} cannot be identified", where=f"{OPTIONS}.{option}", hint="Set false"
        )
    return layers


def _probe(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.sin() + numbers


def _first_line(error: Exception) -> str:
    return next(filter(None, (line.strip() for line in str(error).splitlines())), type(error).__name__)


def open_model(
    folder: Path,
    *,
    weights: bool,
    device: torch.device | None,
    dtype: torch.dtype = torch.float32,
    frozen: bool = False,
    longest: int | None = None,
) -> nn.Module:
    """Open the model folder with its weights, or with arbitrary weights if not ``weights``, held in ``dtype``.

    Parameters that no text passes through, such as those for images, require no gradient.

    device: None leaves the model on the device where it was created; frozen: no parameter requires a gradient; longest:
    most tokens of a sequence, None if unknown. A model that supports no packs keeps its own attention. Raises
    ManifestError if transformers cannot open a model from the folder, and NotYetError if it cannot be trained.
    """
    disable_progress_bar()  # it would disturb the log
    try:
        config = AutoConfig.from_pretrained(folder)
        settings, most = config.to_dict(), longest or sys.maxsize
        check_model(settings, longest=most, where=str(folder))
        attention = {} if no_packs(settings, longest=most) else {"attn_implementation": ATTENTION}
        kind = {"dtype": dtype, **attention}
        model = (
            model_class(config).from_pretrained(folder, config=config, **kind)
            if weights
            else model_class(config).from_config(config, **kind)
        )
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
        raise ManifestError(
            f"no model can be opened: {error}",
            where=str(folder),
            hint="Use a folder with config.json and model.safetensors, as transformers writes it",
        ) from error
    for parameter in model.parameters() if frozen else _beside_texts(model):
        parameter.requires_grad_(False)
    return (model if device is None else model.to(device)).eval()


def _beside_texts(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that no text passes through, such as those for images."""
    texts = {
        parameter for part in (model.get_decoder(), model.get_output_embeddings()) for parameter in part.parameters()
    }
    return [parameter for parameter in model.parameters() if parameter not in texts]


class PackModel(nn.Module):  # type: ignore[misc]  # mypy does not read torch
    """A model of transformers that computes on packs.

    compute: the dtype of its layers; few_sizes: pad packs to the sizes of ``packing.few_sizes``; padded: whether it
    supports no packs (``source.no_packs``), so that it computes each document in a row of its own, padded at the end,
    where no token sees the padding.
    """

    def __init__(self, model: nn.Module, *, compute: torch.dtype, few_sizes: bool = False) -> None:
        super().__init__()
        self.model = model
        self.compute = compute
        self.padded = not _takes_packs(model.config)
        self._few_sizes = few_sizes

    @property
    def device(self) -> torch.device:
        """The device of its parameters."""
        found: torch.device = next(self.model.parameters()).device
        return found

    def cast(self, **options: Any) -> AbstractContextManager[Any]:
        """Return a context in which layers compute in ``compute``; options: as for ``torch.autocast``."""
        chosen: AbstractContextManager[Any] = torch.autocast(
            self.device.type, dtype=self.compute, enabled=self.compute != torch.float32, **options
        )
        return chosen

    def inputs(self, pack: Pack) -> Inputs:
        """Return the inputs of a forward pass over ``pack``."""
        filled = pack.padded(few_sizes(len(pack.ids))) if self._few_sizes else pack
        layout = _layout(self.model.config, filled, device=self.device, compute=self.compute)
        return _inputs(filled, self.device, layout)


class LogprobModel(PackModel):
    """A model that returns log-probs of targets instead of logits.

    rows: most targets whose logits exist at the same time. A pack with more targets is computed in chunks, each
    recomputed in the backward pass, so that memory does not grow with the pack. If a model scales or caps the result of
    its output layer, all logits of a pack are computed without chunks. The first pass determines whether it does.
    """

    def __init__(
        self, model: nn.Module, *, temperature: float, compute: torch.dtype, rows: int, few_sizes: bool = False
    ) -> None:
        super().__init__(model, compute=compute, few_sizes=few_sizes)
        self._temperature = temperature
        self._rows = rows
        self._head_is_last: bool | None = None

    def evaluate(self, pack: Pack, *, temperature: float | None = None) -> Tensor:
        """Return the log-prob of each target of ``pack``, without a gradient: float32[N].

        Collective if the model is sharded. Raises ManifestError if packs do not support the model's attention.
        """
        with torch.no_grad():
            logprobs, _ = self(pack, entropy=False, temperature=temperature)
        if isinstance(self, FSDPModule):
            self.reshard()
        return logprobs

    def forward(self, pack: Pack, *, entropy: bool, temperature: float | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the log-prob of each target of ``pack``, and the entropy there if requested: float32[N] each.

        temperature: by default the sampling temperature.
        """
        temperature = self._temperature if temperature is None else temperature
        if self._head_is_last is None:
            self._inspect()
        inputs, targets = self.inputs(pack), on_device(pack.targets, self.device)
        if not self._head_is_last or (len(targets) <= self._rows and not self.padded):
            with self.cast():
                return _logprobs(_logits(self.model, inputs), targets, temperature=temperature, entropy=entropy)
        with self.cast():
            states = inputs.of(self.model.base_model(**inputs.arguments).last_hidden_state)
        # With autocast's cache all chunks would share one rounded copy of the head, and add gradients in low precision.
        with self.cast(cache_enabled=False):
            chunks = [
                checkpoint(self._chunk, *chunk, temperature, entropy, use_reentrant=False, preserve_rng_state=False)
                for chunk in zip(states.split(self._rows), targets.split(self._rows), strict=True)
            ]
        logprobs, entropies = zip(*chunks, strict=True)
        return torch.cat(logprobs), torch.cat(entropies) if entropy else None

    def _inspect(self) -> None:
        """Determine the properties of the model in its first pass. Raises NotYetError if it does not support packs."""
        # Sharded layers, and layers with weights in the narrower dtype, compute in the narrower dtype for any caller.
        narrow = isinstance(self, FSDPModule) or next(self.model.parameters()).dtype == self.compute
        rounds = narrow and self.compute != torch.float32
        with self.cast() if rounds else nullcontext():
            _check_packs(self.model, tolerance=_ROUNDED_TOLERANCE if rounds else _TOLERANCE)
            self._head_is_last = _head_is_last(self.model)

    def _chunk(
        self, states: Tensor, targets: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        logits = self.model.get_output_embeddings()(states)
        return _logprobs(logits, targets, temperature=temperature, entropy=entropy)


def smallest_pack() -> Pack:
    """Return a pack with one target."""
    return next(iter(pack_samples([_A_TOKEN], [_A_TOKEN], [0], layout="separate", budget=2)))


def _layout(config: PretrainedConfig, pack: Pack, *, device: torch.device, compute: torch.dtype) -> Layout:
    """Return the layout of ``pack`` for attention on ``device``; only documents support a shorter sliding window."""
    if not _takes_packs(config):
        return None
    config = config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if window is not None and window < longest_of(pack):
        return Documents
    if device.type == "npu":
        return NpuSequences
    return KernelSequences if takes_sequences(config, device=device, compute=compute) else Documents


class Inputs(NamedTuple):
    """The arguments of a model's forward pass over a pack; rows [N]: place of each target's row in the flat result."""

    arguments: dict[str, Any]
    rows: Tensor

    def of(self, result: Tensor) -> Tensor:
        """Return the targets' rows of a result: [B, T, any] -> [N, any]."""
        return result.flatten(0, 1).index_select(0, self.rows)


def _inputs(pack: Pack, device: torch.device, layout: Layout) -> Inputs:
    """Return the inputs of a model for ``pack``: one row of tokens, or without a layout a row for each document."""
    if layout is None:
        table = pack.table()
        rows = {"input_ids": on_device(pack.ids[table.places], device), "use_cache": False}
        return Inputs(rows, on_device(table.rows[pack.rows], device))
    arguments = {
        "input_ids": on_device(pack.ids, device)[None],
        "position_ids": on_device(pack.positions, device)[None],
        "documents": layout.of(pack, device),
        "use_cache": False,
    }
    return Inputs(arguments, on_device(pack.rows, device))


def _takes_packs(config: PretrainedConfig) -> bool:
    return bool(config._attn_implementation == ATTENTION)  # noqa: SLF001  transformers has no public name for it


def _logits(model: nn.Module, inputs: Inputs) -> Tensor:
    """Return the logits of the targets' rows, [N, vocabulary]."""
    if not _takes_packs(model.config):
        return inputs.of(model(**inputs.arguments).logits)
    logits: Tensor = model(**inputs.arguments, logits_to_keep=inputs.rows).logits[0]
    return logits


def _logprobs(logits: Tensor, targets: Tensor, *, temperature: float, entropy: bool) -> tuple[Tensor, Tensor | None]:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1:
        logits = logits / temperature
    logprobs = -F.cross_entropy(logits, targets, reduction="none")
    if not entropy:
        return logprobs, None
    whole = logits.log_softmax(dim=-1)
    return logprobs, -(whole.exp() * whole).sum(dim=-1)


def _check_packs(model: nn.Module, *, tolerance: float) -> None:
    """Raise NotYetError if samples of a pack influence each other, or if layers do not pass packs on to attention."""
    rng = np.random.default_rng(0)
    vocabulary = model.config.get_text_config().vocab_size
    prompts = [rng.integers(0, vocabulary, length) for length in (3, 3, 2)]
    prompts[1] = prompts[0]
    responses = [rng.integers(0, vocabulary, length) for length in (4, 5, 3)]
    device, packed = model.get_output_embeddings().weight.device, _takes_packs(model.config)

    def logits(layout: LayoutName, budget: int) -> Tensor:
        found: dict[tuple[int, int], Tensor] = {}
        for pack in pack_samples(prompts, responses, [0, 0, 1], layout=layout, budget=budget):
            computed = _logits(model, _inputs(pack, device, Documents if packed else None)).float()
            names = zip(pack.samples.tolist(), pack.offsets.tolist(), strict=True)
            found |= dict(zip(names, computed, strict=True))
        return torch.stack([found[name] for name in sorted(found)])

    try:
        with torch.no_grad():
            together, alone = logits("shared-prompt" if packed else "separate", 99), logits("separate", 1)
    except (TypeError, AttributeError, IndexError) as error:
        raise _no_packs(model, str(error)) from error
    if float((alone - together).abs().max()) > tolerance * float(alone.abs().max()):
        raise _no_packs(model, "the logits of a sample depend on the other samples of its pack")


def _no_packs(model: nn.Module, why: str) -> NotYetError:
    return NotYetError(
        f"{type(model).__name__} cannot be trained in packs: {why}",
        where="spec.model.source",
        hint="Use a causal model with softmax attention over all earlier tokens",
    )


def _head_is_last(model: nn.Module) -> bool:
    """Return whether the logits are the output layer's result for the last states, neither scaled nor capped.

    Uses random states, because states can be 0 if the model's weights are not loaded yet or for padding.
    """
    head = model.get_output_embeddings()
    inputs = _inputs(smallest_pack(), head.weight.device, Documents if _takes_packs(model.config) else None)
    shape = (*inputs.arguments["input_ids"].shape, head.weight.shape[1])
    states = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(head.weight) * _LARGE

    def replace(_module: nn.Module, _inputs: object, output: Any) -> Any:
        output.last_hidden_state = states
        return output

    hook = model.base_model.register_forward_hook(replace)
    try:
        with torch.no_grad():
            logits = model(**inputs.arguments).logits
            return bool(torch.allclose(head(states).float(), logits.float()))
    finally:
        hook.remove()
