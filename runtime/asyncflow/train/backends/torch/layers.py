"""Computation of a model's layers: which kernels, compiled or not, kept for the backward pass or computed again.

Invariant: none of it changes what is computed but for rounding; modules stay as for evaluation, without dropout.
"""

from __future__ import annotations

import os

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from asyncflow.errors import ManifestError
from asyncflow.train.backends.base import OPTIONS


def choose_kernels(device: torch.device, *, deterministic: bool) -> None:
    """Choose kernels that give the same bits again: always on the CPU, and where asked for on an accelerator.

    There an operation without such a kernel is only warned of.
    """
    accelerated = device.type != "cpu"
    if accelerated and deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic or not accelerated, warn_only=accelerated)


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
