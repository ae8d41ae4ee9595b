"""The publishing side: a trainer rank copies its slices of a new version, and digests and announces the copy.

Invariants: after ``copy`` has returned, the trainer may change its tensors. A published version never changes, and is
served until the catalogue releases it. The sender never waits for a pull. A large tensor is published in several
slices, so that receivers can check and serve it slice by slice; all ranks that have the same box split it identically.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from asyncflow.errors import Refused
from asyncflow.identity import Version
from asyncflow.rpc.membership import Membership
from asyncflow.weights.holder import Holder
from asyncflow.weights.manifest import ManifestPart, Slice, TensorEntry, digest_of, dtype_name
from asyncflow.weights.slices import Allocate, AnyArray, Arena, Box, anonymous, split, view
from asyncflow.weights.transport import Transport

_SLICE_BYTES = 1 << 20
_MOST_SLICES = 16
"""Maximum number of slices per box: low because manifests list them all, not 1 because only whole slices are served."""


@dataclass(frozen=True, kw_only=True)
class PublishedSlice:
    """A slice of a tensor of ``shape``, held by this rank. offset: its position in the tensor."""

    array: AnyArray
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        """The box of the tensor that the slice covers."""
        return Box(self.offset, self.array.shape)


class Copied(NamedTuple):
    """A copy of a version. shapes: the shape of each whole tensor, by name."""

    version: Version
    arena: Arena
    shapes: Mapping[str, tuple[int, ...]]


Tensors = Mapping[str, AnyArray | PublishedSlice]
"""Whole tensors or slices of them, by name. dtypes: the keys of ``slices.DTYPES``; uint16 means bits of bfloat16."""


class WeightSender:
    """Publishes and serves the versions of trainer rank ``part`` of ``parts``.

    membership: provides the client to the driver; worker: id of this worker; transport: owned by this sender.
    """

    def __init__(
        self, *, membership: Membership, worker: str, transport: Transport, part: int = 0, parts: int = 1
    ) -> None:
        self._holder = Holder(membership=membership, worker=worker, transport=transport)
        self._part = part
        self._parts = parts

    @property
    def versions(self) -> list[Version]:
        """The versions held in memory here, oldest first."""
        return sorted(self._holder.copies)

    @property
    def address(self) -> str:
        """The address that peers pull from, "" before ``start``."""
        return self._holder.address

    def held(self, version: Version) -> Mapping[str, AnyArray] | None:
        """Return the tensors of a version, or this rank's slices of them; None if it is no longer held.

        They are the served memory and must not be changed.
        """
        copy = self._holder.copies.get(version)
        return None if copy is None else copy.arena.arrays

    async def start(self) -> None:
        """Start serving."""
        await self._holder.start()

    async def close(self) -> None:
        """Stop serving. Versions continue to exist only at workers that have pulled them."""
        await self._holder.close()

    def copy(self, version: Version, tensors: Tensors) -> Copied:
        """Copy tensors to memory of the transport; call ``part`` and ``announce`` next. Blocks; may run in any thread.

        Raises Refused for a dtype that cannot be published, or a slice that does not lie inside its tensor.
        """
        return copy_aside(version, tensors, allocate=self._holder.transport.allocate)

    def fill(
        self,
        version: Version,
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
        read: Callable[[str, AnyArray], None],
    ) -> Copied:
        """Read whole tensors directly into memory of the transport; call ``part`` and ``announce`` next. Blocks.

        tensors: dtype (a key of ``slices.DTYPES``) and shape by name; read: fills the array of the named tensor.
        """
        boxes = {name: (dtype, Box.whole(shape)) for name, (dtype, shape) in tensors.items()}
        arena = Arena(boxes, allocate=self._holder.transport.allocate)
        for name, array in arena.arrays.items():
            read(name, array)
        return Copied(version, arena, {name: shape for name, (_, shape) in tensors.items()})

    def part(self, copied: Copied) -> ManifestPart:
        """Compute the digests of a copy. Blocks; may run in any thread."""
        return ManifestPart(
            version=copied.version.packed,
            part=self._part,
            parts=self._parts,
            worker=self._holder.worker,
            address=self._holder.address,
            tensors=entries_of(copied, worker=self._holder.worker),
        )

    async def announce(self, copied: Copied, part: ManifestPart, *, timeout: float) -> bool:
        """Announce a copy with its ``part``; return whether all ranks' parts of the version have arrived.

        Raises Fenced if a newer trainer attempt has published, Refused if the content contradicts known content,
        DeadlineExceeded if the driver cannot be reached; the copy is then announced as soon as it can be.
        """
        return await self._holder.publish(copied.version, copied.arena, part, timeout=timeout)

    async def publish(self, version: Version, tensors: Tensors, *, timeout: float) -> bool:
        """Copy ``tensors`` in another thread, compute digests, and announce them.

        The tensors must not change until it returns.
        """
        copied = await asyncio.to_thread(self.copy, version, tensors)
        return await self.announce(copied, await asyncio.to_thread(self.part, copied), timeout=timeout)


def copy_aside(version: Version, tensors: Tensors, *, allocate: Allocate = anonymous) -> Copied:
    """Copy tensors into newly allocated memory. Raises like ``WeightSender.copy``."""
    shards = {name: slice_of(name, tensor) for name, tensor in tensors.items()}
    boxes = {name: (dtype_name(shard.array), shard.box) for name, shard in shards.items()}
    arena = Arena(boxes, allocate=allocate)
    for name, shard in shards.items():
        np.copyto(arena.arrays[name], shard.array)
    return Copied(version, arena, {name: shard.shape for name, shard in shards.items()})


def entries_of(copied: Copied, *, worker: str) -> tuple[TensorEntry, ...]:
    """Return the manifest entries of a copy in name order, with digests. worker: the holder of the copy."""
    return tuple(_entry(name, copied, worker) for name in sorted(copied.shapes))


def _entry(name: str, copied: Copied, worker: str) -> TensorEntry:
    array, at = copied.arena.arrays[name], copied.arena.boxes[name]
    most = max(_SLICE_BYTES, array.nbytes // _MOST_SLICES) // array.itemsize
    slices = tuple(
        Slice(box=box, holder=worker, nbytes=box.volume * array.itemsize, digest=digest_of(view(array, at, box)))
        for box in (tuple(split(at, most)) or (at,))
    )
    return TensorEntry(name=name, dtype=dtype_name(array), shape=copied.shapes[name], slices=slices)


def slice_of(name: str, tensor: AnyArray | PublishedSlice) -> PublishedSlice:
    """Return a tensor, or a slice of one, as a slice. Raises Refused if it does not lie inside its tensor."""
    if not isinstance(tensor, PublishedSlice):
        return PublishedSlice(array=tensor, offset=(0,) * tensor.ndim, shape=tensor.shape)
    if not tensor.box.fits(tensor.shape):
        raise Refused(f"{name!r}: {tensor.box} does not lie inside {tensor.shape}", where="weights")
    return tensor
