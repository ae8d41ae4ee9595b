"""Weights: immutable versions that a trainer publishes and that each rollout pulls for itself.

``follow`` is for inference processes outside the job: it yields every new version of a job as tensors.

Invariant: importing the package loads no heavy module. Each name is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncflow.weights.follower import Follower, follow

__all__ = ["Follower", "follow"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("asyncflow.weights.follower"), name)
