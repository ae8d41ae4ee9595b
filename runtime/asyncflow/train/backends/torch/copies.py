"""Arrays on their way to a device, and weights on their way from it.

Invariant: what computes with a tensor comes after its copy, on the same stream. A numpy array of uint16 is the bits of
bfloat16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def on_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return a small ``array`` as a tensor on ``device``, without waiting; on the CPU it shares the array's memory.

    Elsewhere it goes by way of page-locked memory, which torch keeps and uses again once the copy is over.
    """
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def weights_on_device(array: NDArray[Any], device: torch.device, *, dtype: torch.dtype) -> Tensor:
    """Return published weights on ``device`` in the ``dtype`` that the model holds them in.

    Not by way of page-locked memory, of which torch would keep as much as the whole model.
    """
    tensor = torch.from_numpy(array).to(device)
    return (tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor).to(dtype)


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``tensor`` on the CPU, rounded to ``dtype`` before it is copied if it is of floating-point numbers."""
    return (tensor.to(dtype) if tensor.is_floating_point() else tensor).cpu()


def as_array(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor of the CPU as an array that shares its memory where it is contiguous."""
    whole = tensor.contiguous()
    array: NDArray[Any] = (whole.view(torch.uint16) if whole.dtype == torch.bfloat16 else whole).numpy()
    return array
