"""The versions that this trainer offers: the newest, and those that a later resume must be able to offer again.

A row of D_k may be bound to an older version than the checkpoint's own: in delayed updates D_{j+1} comes from
θ_{j-1}. If it has to be generated again after a resume at j, θ_{j-1} must still exist, so a checkpoint carries it
along.

Invariant: after a resume at j, every version that an unfinished step may require is published under the new attempt,
oldest first; what is carried costs no second copy, since it is the memory that the sender serves.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncflow.flow.schedule import Schedule
from asyncflow.identity import Version
from asyncflow.weights.arena import Arena
from asyncflow.weights.manifest import Part

Weights: TypeAlias = Mapping[str, NDArray[Any]]


class Publisher(Protocol):
    """What a trainer uses of ``weights.sender.WeightSender``."""

    def copy(self, version: Version, tensors: Weights) -> tuple[Arena, Part]:
        """Copy the tensors aside; blocks."""

    async def announce(self, copied: tuple[Arena, Part], *, timeout: float) -> bool:
        """Make the version known."""


class Publication:
    """Rank 0's versions of one attempt."""

    def __init__(self, sender: Publisher, *, schedule: Schedule, attempt: int) -> None:
        self._sender = sender
        self._schedule = schedule
        self._attempt = attempt
        self._held: dict[int, Weights] = {}

    def copy(self, step: int, weights: Weights) -> tuple[Arena, Part]:
        """Copy θ_step aside, to be announced; blocks, and afterwards ``weights`` may change."""
        copied = self._sender.copy(Version(self._attempt, step), weights)
        self._held[step] = copied[0].tensors
        newest = max(self._held)
        self._held = {number: held for number, held in self._held.items() if number in self._needed(newest) | {newest}}
        return copied

    async def announce(self, copied: tuple[Arena, Part], *, timeout: float) -> None:
        """Let rollouts know of a copy. Raises Fenced when a newer attempt has published."""
        await self._sender.announce(copied, timeout=timeout)

    def carried(self, step: int) -> list[int]:
        """Give the steps, oldest first, of the versions that a checkpoint of θ_step has to carry."""
        return sorted(number for number in self._held.keys() & self._needed(step) if number < step)

    def save(self, folder: Path, steps: list[int]) -> None:
        """Write versions that ``carried`` named into ``folder``."""
        for step in steps:
            np.savez(folder / _file(step), allow_pickle=False, **self._held[step])

    def _needed(self, step: int) -> set[int]:
        """The versions up to about θ_step that D_{step+1} or later may only be generated with."""
        return self._schedule.required(set(range(step + 1, step + 1 + self._schedule.lag + self._schedule.sync_every)))

    @staticmethod
    def read(folder: Path, step: int) -> Weights:
        """Read a version that ``save`` wrote."""
        with np.load(folder / _file(step), allow_pickle=False) as tensors:
            return dict(tensors)


def _file(step: int) -> str:
    return f"carried-{step:06d}.npz"
