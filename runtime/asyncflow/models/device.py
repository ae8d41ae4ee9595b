"""The device that a process computes with, named as in torch.

Invariant: a request for a device returns a device of that kind or raises an error; it never falls back to the CPU.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

import torch

from asyncflow.errors import ManifestError

TRAINER = "spec.trainer.accelerator"


def load_npu(*, where: str = TRAINER) -> ModuleType:
    """Import torch_npu, which adds the device ``npu`` and the process groups ``hccl`` to torch.

    Automatic loading by torch is off (TORCH_DEVICE_BACKEND_AUTOLOAD=0), so that a missing package gets a clear error.
    where: the manifest field that requests the device. Raises ManifestError.
    """
    try:
        return import_module("torch_npu")
    except ModuleNotFoundError as error:
        if error.name != "torch_npu":
            hint = f"Run pip install {error.name}"
            raise ManifestError(
                f"torch_npu needs {error.name}, which is not installed", where=where, hint=hint
            ) from error
        hint = f"Install the one for torch {torch.__version__.partition('+')[0]}, or use the image runtime-ascend"
        raise ManifestError("torch_npu is not installed", where=where, hint=hint) from error
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise ManifestError(
            f"torch_npu {_installed()} cannot be loaded with torch {torch.__version__}: {error}",
            where=where,
            hint="If a library is not found, it belongs to CANN (source its set_env.sh) or to the NPU's driver "
            "(/usr/local/Ascend/driver); otherwise torch_npu was built for another version of torch",
        ) from error


def _installed() -> str:
    try:
        return version("torch_npu")
    except PackageNotFoundError:
        return "of an unknown version"


def find_device(kind: str, *, share: float, local_rank: int = 0, where: str = TRAINER) -> torch.device:
    """Return this process's device of torch's device type ``kind``, with at most ``share`` of its memory allocated.

    local_rank: index among the devices that this process sees, as with torchrun; where: the manifest field that
    requests the device. Raises ManifestError if there is no such device.
    """
    if kind == "cpu":
        return torch.device(kind)
    if kind == "npu":
        load_npu(where=where)
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or found.type != kind:
        raise ManifestError(
            f"there is no {kind} device here: torch {torch.__version__} sees {found or 'only the CPU'}",
            where=where,
            hint="Run where the device and its build of torch are installed, or set profile: cpu and count: 0",
        )
    if local_rank >= (seen := torch.accelerator.device_count()):
        raise ManifestError(
            f"rank {local_rank} of this replica has no {kind} device: torch {torch.__version__} sees {seen}",
            where=f"{where}.count",
            hint="Set at most that many; docs/guide/jobs.md, Devices, says which devices a process sees",
        )
    torch.accelerator.set_device_index(local_rank)
    if share < 1:
        torch.get_device_module(found).set_per_process_memory_fraction(share)
    return torch.device(kind, local_rank)
