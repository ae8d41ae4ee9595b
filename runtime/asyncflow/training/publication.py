"""The versions that a trainer publishes: the newest, and the older ones that a resumed run must publish again.

A row of D_k may be bound to an older version than the checkpoint's own: in delayed updates D_{j+1} comes from θ_{j-1}.
If the row must be generated again after a resume at j, θ_{j-1} must still exist, so the checkpoint contains it.

Copying, digesting and announcing run in the background of training. Training waits only before it changes weights that
are not copied yet, and before it starts a publication while the previous one is not announced. Older versions that are
still in memory also serve to measure the engine: a sample's log-probs are recomputed with the weights that generated
it. If the loss uses the policy one step before (``lagged``), θ_{j-1} is kept and carried too.

Each rank of a gang publishes its slices of each version; no rank gathers them.

Invariants: versions are announced in order, and announced weights were copied while they did not change. After a resume
at j, every version that an unfinished step may require is published under the new attempt, oldest first. Carried
versions need no second copy: they are the memory that the sender serves.
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
from asyncflow.rpc.retry import retry
from asyncflow.telemetry.spans import NO_SPANS, Spans
from asyncflow.training.ranks import ProcessGroup
from asyncflow.training.slice_files import SliceFiles, share_of, within, write_slices
from asyncflow.weights.manifest import ManifestPart
from asyncflow.weights.probe import is_probe, split_probe
from asyncflow.weights.sender import Copied, PublishedSlice, Tensors, slice_of
from asyncflow.weights.slices import Box

_CALL_S = 30.0
_AFFORDABLE_BYTES = 1 << 30
"""Memory for older versions that are kept only to measure the engine, in bytes."""

log = logging.getLogger(__name__)

Weights: TypeAlias = Mapping[str, NDArray[Any]]
"""One rank's part of each tensor."""


class Publisher(Protocol):
    """The methods of ``weights.sender.WeightSender`` that a trainer uses."""

    def copy(self, version: Version, tensors: Tensors) -> Copied:
        """Return a copy of the tensors; blocks."""

    def part(self, copied: Copied) -> ManifestPart:
        """Return the manifest part with the digest of a copy; blocks."""

    async def announce(self, copied: Copied, part: ManifestPart, *, timeout: float) -> bool:
        """Announce the version to the driver."""

    def held(self, version: Version) -> Weights | None:
        """Return the read-only tensors of a version that is still served, otherwise None."""


class Publication:
    """One rank's versions of one attempt, published one after another in the background of training.

    patience_s: time for which the driver may be unreachable; lagged: whether θ_{j-1} is kept with θ_j, for the loss;
    ended: called with the duration of each finished publication in seconds; digested: called with this rank's part of
    each version before it is announced. began_at: the step at which the attempt started, -1 before. seconds: duration
    of the last finished publication, None before the first.
    """

    def __init__(
        self,
        sender: Publisher,
        *,
        schedule: Schedule,
        attempt: int,
        patience_s: float,
        lagged: bool,
        ended: Callable[[float], None],
        spans: Spans = NO_SPANS,
        digested: Callable[[ManifestPart], None] = lambda _: None,
    ) -> None:
        self.began_at = -1
        self.seconds: float | None = None
        self._sender = sender
        self._schedule = schedule
        self._attempt = attempt
        self._patience_s = patience_s
        self._lagged = lagged
        self._ended = ended
        self._spans = spans
        self._digested = digested
        self._held: dict[int, Copied] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publish")
        self._step = -1
        self._copying: asyncio.Future[Copied] | None = None
        self._publishing: asyncio.Task[None] | None = None

    @property
    def underway(self) -> int:
        """The step of the version that is being published, -1 for none."""
        return self._step if self._publishing is not None and not self._publishing.done() else -1

    async def begin(self, step: int, weights: Callable[[], Tensors]) -> None:
        """Start to publish θ_step after the previous version is announced.

        weights: returns the weights, called in another thread; they must not change before ``copied`` returns. Raises
        the errors of ``announced``.
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
        """Wait until all started publications are announced, at most ``within_s`` seconds.

        Raises Fenced if a newer attempt has published, DeadlineExceeded if the driver is unreachable for too long.
        """
        if self._publishing is not None:
            await asyncio.wait([self._publishing], timeout=within_s)
            self.check()

    def check(self) -> None:
        """Raise the error of the last publication if it has ended with one."""
        if self._publishing is not None and self._publishing.done():
            self._publishing.result()

    def close(self) -> None:
        """Stop announcing versions."""
        if self.underway >= 0:
            log.info("θ_%d was not announced", self.underway)
        if self._publishing is not None and not self._publishing.cancel() and not self._publishing.cancelled():
            self._publishing.exception()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _publish(self, copying: asyncio.Future[Copied]) -> None:
        started = time.monotonic()
        with self._spans.background("publish", step=self._step, version=self._step):
            copied = await copying
            part = await asyncio.get_running_loop().run_in_executor(self._thread, self._sender.part, copied)
            self._digested(part)
            await retry(
                lambda: self._sender.announce(copied, part, timeout=_CALL_S),
                what=f"publishing {copied.version}",
                timeout=self._patience_s,
            )
        self.seconds = time.monotonic() - started
        self._ended(self.seconds)

    def _copy(self, step: int, weights: Callable[[], Tensors]) -> Copied:
        copied = self._sender.copy(Version(self._attempt, step), weights())
        held = self._held | {step: copied}
        newest = max(held)
        wanted = self._needed(newest) | {newest} | self._affordable(held)
        self._held = {number: one for number, one in held.items() if number in wanted}
        return copied

    def carried(self, step: int) -> list[int]:
        """Return the steps, oldest first, of the versions that a checkpoint of θ_step must carry."""
        return sorted(number for number in self._held.keys() & self._needed(step) if number < step)

    def slices(self, step: int) -> Tensors:
        """Return this rank's part of a version in ``carried``."""
        _, arena, shapes = self._held[step]
        return {
            name: PublishedSlice(array=array, offset=arena.boxes[name].offset, shape=shapes[name])
            for name, array in arena.arrays.items()
        }

    def weights_of(self, version: Version) -> Weights | None:
        """Return the weights of a version that may have generated a sample, None if they are not in memory; read-only.

        Versions of earlier attempts up to the first step of this attempt equal this attempt's versions of those steps;
        later versions of earlier attempts had other weights.
        """
        if version.attempt != self._attempt and version.step > self.began_at:
            return None
        copy = self._held.get(version.step)
        held = copy.arena.arrays if copy is not None else self._sender.held(Version(self._attempt, version.step))
        return held if held is None else split_probe(held)[0]

    def _affordable(self, held: Mapping[int, Copied]) -> set[int]:
        """Return versions that may have generated future samples: as many of the newest as fit into little memory."""
        newest = max(held)
        window = [number for number in sorted(held, reverse=True) if number >= newest - self._schedule.lag]
        return set(window[: _AFFORDABLE_BYTES // max(1, held[newest].arena.nbytes)])

    def _needed(self, step: int) -> set[int]:
        """Return the versions that steps after ``step`` need: to generate their samples, or as the old policy."""
        later = set(range(step + 1, step + 1 + self._schedule.lag + self._schedule.sync_every))
        return self._schedule.required(later) | ({step - 1} if self._lagged else set())

    @staticmethod
    def save(folder: Path, step: int, tensors: Tensors, *, rank: int) -> None:
        """Write a rank's part of θ_step into ``folder``; only rank 0 writes tensors that are not sharded.

        Raises DiskError if it cannot be written.
        """
        slices = {name: slice_of(name, tensor) for name, tensor in tensors.items()}
        wanted = {name: one for name, one in slices.items() if rank == 0 or one.array.shape != one.shape}
        write_slices(folder / f"{_stem(step)}.safetensors", wanted)

    @staticmethod
    def read(checkpoint: Path | None, step: int, *, group: ProcessGroup, shared: bool) -> Tensors:
        """Read a rank's part of θ_step from a checkpoint that carries it, written by any number of ranks.

        Unless the ranks share the folder, rank 0 reads all of it, and the other ranks, which cannot access it, nothing.
        """
        if checkpoint is None:
            return {}
        rank, world = (group.rank, group.world) if shared else (0, 1)
        read: dict[str, PublishedSlice] = {}
        old = checkpoint / f"{_stem(step)}.npz"
        if old.is_file():
            with np.load(old, allow_pickle=False) as tensors:
                for name, array in tensors.items():
                    box = share_of(array.shape, rank=rank, world=world)
                    part = array[within(box, Box.whole(array.shape))]
                    read[name] = PublishedSlice(array=part, offset=box.offset, shape=array.shape)
            return read
        files = SliceFiles(sorted(checkpoint.rglob(f"{_stem(step)}.safetensors")), framework="numpy")
        for name, shape in files.shapes.items():
            box = share_of(shape, rank=rank, world=world)
            if is_probe(name):
                box = Box.whole(shape) if rank == 0 else Box.whole((0,))
            if box.volume:
                read[name] = PublishedSlice(array=files.array(name, box), offset=box.offset, shape=shape)
        return read


def _stem(step: int) -> str:
    return f"carried-{step:06d}"
