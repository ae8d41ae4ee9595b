"""The public API: the kinds RLJob, TransferQueue and WeightSync, and the status that the driver's service returns.

Invariant: importing this package loads nothing heavier than pydantic; each name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncflow.api.job import RLJob, RLJobSpec
    from asyncflow.api.load import check_files, load_job
    from asyncflow.api.queue import TransferQueue
    from asyncflow.api.status import DriverStatus
    from asyncflow.api.weights import WeightSync

_MODULE = {
    "DriverStatus": "status",
    "RLJob": "job",
    "RLJobSpec": "job",
    "TransferQueue": "queue",
    "WeightSync": "weights",
    "check_files": "load",
    "load_job": "load",
}

__all__ = ["DriverStatus", "RLJob", "RLJobSpec", "TransferQueue", "WeightSync", "check_files", "load_job"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE[name]}"), name)
