"""The device that a process computes with, by torch's name for it.

Invariant: whoever asks for a device gets that kind or an error, never the CPU in its place.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

import torch

from asyncflow.errors import ManifestError

TRAINER = "spec.trainer.accelerator"


def load_npu(*, where: str = TRAINER) -> ModuleType:
    """Import torch_npu, by which torch has the device ``npu`` and the process groups ``hccl``.

    torch does not do so by itself here (TORCH_DEVICE_BACKEND_AUTOLOAD=0), so that what is missing can be told. where:
    the field that asks for it. Raises ManifestError.
    """
    try:
        return import_module("torch_npu")
    except ModuleNotFoundError as absent:
        if absent.name != "torch_npu":
            raise ManifestError(f"torch_npu needs {absent.name}, which is not installed", where=where) from absent
        hint = f"Install the one for torch {torch.__version__.partition('+')[0]}, or use the image runtime-ascend"
        raise ManifestError("torch_npu is not installed", where=where, hint=hint) from absent
    except (ImportError, OSError, RuntimeError, AttributeError) as wrong:
        raise ManifestError(
            f"torch_npu {_installed()} cannot be loaded with torch {torch.__version__}: {wrong}",
            where=where,
            hint="A library that is not found belongs to CANN (source its set_env.sh) or to the NPU's driver "
            "(/usr/local/Ascend/driver); otherwise torch_npu is for another version of torch",
        ) from wrong


def _installed() -> str:
    try:
        return version("torch_npu")
    except PackageNotFoundError:
        return "of an unknown version"


def find_device(kind: str, *, share: float, local_rank: int = 0, where: str = TRAINER) -> torch.device:
    """Return this process's device of ``kind``, torch's name for it, with at most ``share`` of its memory allocated.

    local_rank: which of those that this process sees, as with torchrun; where: the field that asks for it. Raises
    ManifestError where there is none.
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
            hint="Give no more than there are; see which devices the process sees (docs/guide/jobs.md, Devices)",
        )
    torch.accelerator.set_device_index(local_rank)
    if share < 1:
        torch.get_device_module(found).set_per_process_memory_fraction(share)
    return torch.device(kind, local_rank)
