"""Arrays on their way to a device.

Invariant: the caller never waits for the copy; what computes with the tensor comes after it on the same stream.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def on_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return ``array`` as a tensor on ``device``; on the CPU it shares the array's memory.

    Elsewhere it goes by way of page-locked memory, which torch keeps and uses again once the copy is over.
    """
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
