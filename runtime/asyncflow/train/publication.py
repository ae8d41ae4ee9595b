"""The versions that this trainer offers: the newest, and those that a later resume must be able to offer again.

A row of D_k may be bound to an older version than the checkpoint's own: in delayed updates D_{j+1} comes from
θ_{j-1}. If it has to be generated again after a resume at j, θ_{j-1} must still exist, so a checkpoint carries it
along.

Older versions that are at hand also serve to measure the engine: a sample's log-probs are computed again with the
weights that made it.

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

_AFFORDABLE_BYTES = 1 << 30
"""Memory for older versions that are kept only to measure the engine."""

Weights: TypeAlias = Mapping[str, NDArray[Any]]


class Publisher(Protocol):
    """What a trainer uses of ``weights.sender.WeightSender``."""

    def copy(self, version: Version, tensors: Weights) -> tuple[Arena, Part]:
        """Copy the tensors aside; blocks."""

    def held(self, version: Version) -> Weights | None:
        """Return the tensors of a version that is still served, None where it is not; nobody may change them."""

    async def announce(self, copied: tuple[Arena, Part], *, timeout: float) -> bool:
        """Make the version known."""


class Publication:
    """Rank 0's versions of one attempt. begun: the step at which the attempt began, -1 before it has."""

    def __init__(self, sender: Publisher, *, schedule: Schedule, attempt: int) -> None:
        self._sender = sender
        self._schedule = schedule
        self._attempt = attempt
        self._held: dict[int, Arena] = {}
        self.begun = -1

    def copy(self, step: int, weights: Weights) -> tuple[Arena, Part]:
        """Copy θ_step aside, to be announced; blocks, and afterwards ``weights`` may change."""
        copied = self._sender.copy(Version(self._attempt, step), weights)
        self._held[step] = copied[0]
        newest = max(self._held)
        wanted = self._needed(newest) | {newest} | self._affordable(newest)
        self._held = {number: held for number, held in self._held.items() if number in wanted}
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
            np.savez(folder / _file(step), allow_pickle=False, **self._held[step].arrays)

    def weights_of(self, version: Version) -> Weights | None:
        """Return the weights of a version that may have made a sample, None where they are not at hand.

        What an earlier attempt published up to the step at which this one began is what this one holds of those steps;
        what it published later were other weights. Nobody may change them.
        """
        if version.attempt != self._attempt and version.step > self.begun:
            return None
        mine = self._held.get(version.step)
        return mine.arrays if mine is not None else self._sender.held(Version(self._attempt, version.step))

    def _affordable(self, newest: int) -> set[int]:
        """Return the versions that may have made samples still to come, as many of the newest as cost little memory."""
        window = [number for number in sorted(self._held, reverse=True) if number >= newest - self._schedule.lag]
        return set(window[: _AFFORDABLE_BYTES // max(1, self._held[newest].nbytes)])

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
