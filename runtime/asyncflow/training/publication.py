"""The versions that this trainer offers: the newest, and those that a later resume must be able to offer again.

A row of D_k may be bound to an older version than the checkpoint's own: in delayed updates D_{j+1} comes from
θ_{j-1}. If it has to be generated again after a resume at j, θ_{j-1} must still exist, so a checkpoint carries it
along.

Copying, digesting and announcing go on beside the training, which waits only where it would change weights that are not
copied yet, or begin the next publication before the last one is announced. Older versions that are at hand also serve
to measure the engine: a sample's log-probs are computed again with the weights that made it. Where the loss's old
policy is the one a step behind (``lagged``), θ_{j-1} is kept and carried too.

Every rank of a gang publishes what it holds of each version, its slices; no rank gathers them.

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
"""Memory for older versions that are kept only to measure the engine."""

log = logging.getLogger(__name__)

Weights: TypeAlias = Mapping[str, NDArray[Any]]
"""Arrays of what one rank holds of each tensor."""


class Publisher(Protocol):
    """Methods of ``weights.sender.WeightSender`` that a trainer uses."""

    def copy(self, version: Version, tensors: Tensors) -> Copied:
        """Copy the tensors aside; blocks."""

    def part(self, copied: Copied) -> ManifestPart:
        """Digest a copy; blocks."""

    async def announce(self, copied: Copied, part: ManifestPart, *, timeout: float) -> bool:
        """Make the version known."""

    def held(self, version: Version) -> Weights | None:
        """Return the tensors of a version that is still served, None where it is not; they must not be changed."""


class Publication:
    """One rank's versions of one attempt, published one after another while the trainer goes on.

    patience_s: how long the driver may be away; lagged: whether θ_{j-1} is kept beside θ_j, for the loss; ended: called
    for each publication that is finished with the seconds that it took; digested: called with this rank's part of each
    before it is announced. began_at: the step at which the attempt began,
    -1 before it has. seconds: what the last publication took that was finished, None before the first.
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
        with self._spans.beside("publish", step=self._step, version=self._step):
            copied = await copying
            part = await asyncio.get_running_loop().run_in_executor(self._thread, self._sender.part, copied)
            self._digested(part)
            await retry(
                lambda: self._sender.announce(copied, part, timeout=_CALL_S),
                what=f"publishing {copied.version}",
                timeout=self._patience_s,
            )
        self.seconds = time.monotonic() - began
        self._ended(self.seconds)

    def _copy(self, step: int, weights: Callable[[], Tensors]) -> Copied:
        copied = self._sender.copy(Version(self._attempt, step), weights())
        held = self._held | {step: copied}
        newest = max(held)
        wanted = self._needed(newest) | {newest} | self._affordable(held)
        self._held = {number: one for number, one in held.items() if number in wanted}
        return copied

    def carried(self, step: int) -> list[int]:
        """Return the steps, oldest first, of the versions that a checkpoint of θ_step has to carry."""
        return sorted(number for number in self._held.keys() & self._needed(step) if number < step)

    def slices(self, step: int) -> Tensors:
        """Return what this rank holds of a version that ``carried`` named."""
        _, arena, shapes = self._held[step]
        return {
            name: PublishedSlice(array=array, offset=arena.boxes[name].offset, shape=shapes[name])
            for name, array in arena.arrays.items()
        }

    def weights_of(self, version: Version) -> Weights | None:
        """Return the weights of a version that may have made a sample, None where they are not at hand.

        What an earlier attempt published up to the step at which this one began is what this one holds of those steps;
        what it published later were other weights. Nobody may change them.
        """
        if version.attempt != self._attempt and version.step > self.began_at:
            return None
        copy = self._held.get(version.step)
        held = copy.arena.arrays if copy is not None else self._sender.held(Version(self._attempt, version.step))
        return held if held is None else split_probe(held)[0]

    def _affordable(self, held: Mapping[int, Copied]) -> set[int]:
        """Return the versions that may have made samples still to come, as many of the newest as cost little memory."""
        newest = max(held)
        window = [number for number in sorted(held, reverse=True) if number >= newest - self._schedule.lag]
        return set(window[: _AFFORDABLE_BYTES // max(1, held[newest].arena.nbytes)])

    def _needed(self, step: int) -> set[int]:
        """The versions up to about θ_step that later steps need: to generate their samples, or as the old policy."""
        later = set(range(step + 1, step + 1 + self._schedule.lag + self._schedule.sync_every))
        return self._schedule.required(later) | ({step - 1} if self._lagged else set())

    @staticmethod
    def save(folder: Path, step: int, tensors: Tensors, *, rank: int) -> None:
        """Write a rank's part of θ_step into ``folder``; whole tensors are written by rank 0 alone.

        Raises DiskError where it cannot be written.
        """
        slices = {name: slice_of(name, given) for name, given in tensors.items()}
        wanted = {name: one for name, one in slices.items() if rank == 0 or one.array.shape != one.shape}
        write_slices(folder / f"{_stem(step)}.safetensors", wanted)

    @staticmethod
    def read(checkpoint: Path | None, step: int, *, group: ProcessGroup, shared: bool) -> Tensors:
        """Read a rank's part of θ_step, a version that a checkpoint of any number of ranks carries.

        Unless the ranks share the folder, rank 0 takes all of it, and the others, which see none, nothing.
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
