"""The versions that this trainer offers: the newest, and those that a later resume must be able to offer again.

A row of D_k may be bound to an older version than the checkpoint's own: in delayed updates D_{j+1} comes from
θ_{j-1}. If it has to be generated again after a resume at j, θ_{j-1} must still exist, so a checkpoint carries it
along.

Copying, digesting and announcing go on beside the training, which waits only where it would change weights that are not
copied yet, or begin the next publication before the last one is announced. Older versions that are at hand also serve
to measure the engine: a sample's log-probs are computed again with the weights that made it.

Invariants: versions are announced in their order, and what is announced was copied while it did not change; after a
resume at j, every version that an unfinished step may require is published under the new attempt, oldest first; what is
carried costs no second copy, since it is the memory that the sender serves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncflow.flow.schedule import Schedule
from asyncflow.identity import Version
from asyncflow.net.rpc import persist
from asyncflow.weights.arena import Arena
from asyncflow.weights.manifest import Part
from asyncflow.weights.probe import split_probe
from asyncflow.weights.sender import Copied

_CALL_S = 30.0
_AFFORDABLE_BYTES = 1 << 30
"""Memory for older versions that are kept only to measure the engine."""

log = logging.getLogger(__name__)

Weights: TypeAlias = Mapping[str, NDArray[Any]]


class Publisher(Protocol):
    """What a trainer uses of ``weights.sender.WeightSender``."""

    def copy(self, version: Version, tensors: Weights) -> Copied:
        """Copy the tensors aside; blocks."""

    def part(self, copied: Copied) -> Part:
        """Digest a copy; blocks."""

    async def announce(self, copied: Copied, part: Part, *, timeout: float) -> bool:
        """Make the version known."""

    def held(self, version: Version) -> Weights | None:
        """Return the tensors of a version that is still served, None where it is not; nobody may change them."""


class Publication:
    """Rank 0's versions of one attempt, published one after another while the trainer goes on.

    patience_s: how long the driver may be away; ended: told of each publication that is finished how many seconds it
    took. began_at: the step at which the attempt began, -1 before it has. seconds: what the last publication took that
    was finished, None before the first.
    """

    def __init__(
        self,
        sender: Publisher,
        *,
        schedule: Schedule,
        attempt: int,
        patience_s: float,
        ended: Callable[[float], None],
    ) -> None:
        self.began_at = -1
        self.seconds: float | None = None
        self._sender = sender
        self._schedule = schedule
        self._attempt = attempt
        self._patience_s = patience_s
        self._ended = ended
        self._held: dict[int, Arena] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publish")
        self._step = -1
        self._copying: asyncio.Future[Copied] | None = None
        self._publishing: asyncio.Task[None] | None = None

    @property
    def underway(self) -> int:
        """The step of the version that is being published, -1 for none."""
        return self._step if self._publishing is not None and not self._publishing.done() else -1

    async def begin(self, step: int, weights: Callable[[], Weights]) -> None:
        """Begin to publish θ_step as soon as the version before it is announced.

        weights: gives it, in another thread; it must not change before ``copied`` returns. Raises what ``announced``
        raises.
        """
        await self.announced()
        loop = asyncio.get_running_loop()
        self._step = step
        self._copying = loop.run_in_executor(self._thread, self._copy, step, weights)
        self._publishing = asyncio.create_task(self._publish(self._copying), name=f"publish θ_{step}")

    async def copied(self) -> None:
        """Wait until the weights that are being published may change."""
        if self._copying is not None:
            await asyncio.wait([self._copying])

    async def announced(self, *, within_s: float | None = None) -> None:
        """Wait until everything begun is announced, at most ``within_s`` seconds.

        Raises Fenced when a newer attempt has published, DeadlineExceeded when the driver is away for too long.
        """
        if self._publishing is not None:
            await asyncio.wait([self._publishing], timeout=within_s)
            self.check()

    def check(self) -> None:
        """Raise what the publication that ended last failed with."""
        if self._publishing is not None and self._publishing.done():
            self._publishing.result()

    def close(self) -> None:
        """Announce nothing any more."""
        if self.underway >= 0:
            log.info("θ_%d is left unannounced", self.underway)
        if self._publishing is not None and not self._publishing.cancel() and not self._publishing.cancelled():
            self._publishing.exception()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _publish(self, copying: asyncio.Future[Copied]) -> None:
        began = time.monotonic()
        copied = await copying
        part = await asyncio.get_running_loop().run_in_executor(self._thread, self._sender.part, copied)
        await persist(
            lambda: self._sender.announce(copied, part, timeout=_CALL_S),
            what=f"publishing {copied.version}",
            timeout=self._patience_s,
        )
        self.seconds = time.monotonic() - began
        self._ended(self.seconds)

    def _copy(self, step: int, weights: Callable[[], Weights]) -> Copied:
        copied = self._sender.copy(Version(self._attempt, step), weights())
        held = self._held | {step: copied.arena}
        newest = max(held)
        wanted = self._needed(newest) | {newest} | self._affordable(held)
        self._held = {number: arena for number, arena in held.items() if number in wanted}
        return copied

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
        if version.attempt != self._attempt and version.step > self.began_at:
            return None
        mine = self._held.get(version.step)
        held = mine.arrays if mine is not None else self._sender.held(Version(self._attempt, version.step))
        return held if held is None else split_probe(held)[0]

    def _affordable(self, held: Mapping[int, Arena]) -> set[int]:
        """Return the versions that may have made samples still to come, as many of the newest as cost little memory."""
        newest = max(held)
        window = [number for number in sorted(held, reverse=True) if number >= newest - self._schedule.lag]
        return set(window[: _AFFORDABLE_BYTES // max(1, held[newest].nbytes)])

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
