"""The publishing side: a trainer rank copies its slices of a new version aside, digests the copy, and announces it.

Invariant: when ``copy`` has returned, the trainer may change its tensors; what was published never changes, and is
served until the catalogue releases it. Nobody's pull is ever waited for. A large tensor is published in several slices,
so that receivers can check it, and pass it on, part by part; all ranks that have the same box cut it in the same way.
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
"""Of one box: few, as manifests list them all, and many, as only a whole slice can be passed on."""


@dataclass(frozen=True, kw_only=True)
class PublishedSlice:
    """The slice of a tensor of ``shape`` that begins at ``offset`` and that this rank holds."""

    array: AnyArray
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        """Box of the tensor that the slice fills."""
        return Box(self.offset, self.array.shape)


class Copied(NamedTuple):
    """A version that was copied aside. shapes: by name that of the whole tensor."""

    version: Version
    arena: Arena
    shapes: Mapping[str, tuple[int, ...]]


Tensors = Mapping[str, AnyArray | PublishedSlice]
"""By name whole tensors, or slices of them. dtypes: those of ``slices.DTYPES``; uint16 means the bits of bfloat16."""


class WeightSender:
    """Publishes the versions of trainer rank ``part`` of ``parts`` and serves them.

    membership: gives the client to the driver; worker: id of this worker; transport: made for this sender alone.
    """

    def __init__(
        self, *, membership: Membership, worker: str, transport: Transport, part: int = 0, parts: int = 1
    ) -> None:
        self._holder = Holder(membership=membership, worker=worker, transport=transport)
        self._part = part
        self._parts = parts

    @property
    def versions(self) -> list[Version]:
        """The versions whose memory is held here, oldest first."""
        return sorted(self._holder.copies)

    @property
    def address(self) -> str:
        """The address that peers pull from, "" before ``start``."""
        return self._holder.address

    def held(self, version: Version) -> Mapping[str, AnyArray] | None:
        """Return the tensors of a version, or this rank's slices of them, None where it is not held any more.

        They are what is served: they must not be changed.
        """
        copy = self._holder.copies.get(version)
        return None if copy is None else copy.arena.arrays

    async def start(self) -> None:
        """Begin to serve."""
        await self._holder.start()

    async def close(self) -> None:
        """Serve no longer; versions live on only where others have pulled them."""
        await self._holder.close()

    def copy(self, version: Version, tensors: Tensors) -> Copied:
        """Copy tensors aside; blocks, in whatever thread. ``part`` and ``announce`` are to follow.

        Raises Refused for a dtype that cannot be published, or a slice that sticks out of its tensor.
        """
        return copy_aside(version, tensors, allocate=self._holder.transport.allocate)

    def fill(
        self,
        version: Version,
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
        read: Callable[[str, AnyArray], None],
    ) -> Copied:
        """Read whole tensors, by ``read``, to where they will be served from; blocks. ``part`` and ``announce`` follow.

        tensors: by name dtype (a key of ``slices.DTYPES``) and shape; read: fills the array of a tensor by its name.
        """
        boxes = {name: (dtype, Box.whole(shape)) for name, (dtype, shape) in tensors.items()}
        arena = Arena(boxes, allocate=self._holder.transport.allocate)
        for name, array in arena.arrays.items():
            read(name, array)
        return Copied(version, arena, {name: shape for name, (_, shape) in tensors.items()})

    def part(self, copied: Copied) -> ManifestPart:
        """Digest a copy; blocks, in whatever thread."""
        return ManifestPart(
            version=copied.version.packed,
            part=self._part,
            parts=self._parts,
            worker=self._holder.worker,
            address=self._holder.address,
            tensors=entries_of(copied, worker=self._holder.worker),
        )

    async def announce(self, copied: Copied, part: ManifestPart, *, timeout: float) -> bool:
        """Announce a copy, of which ``part`` was made; say whether all ranks' parts of the version have arrived.

        Raises Fenced when a newer trainer attempt has published, Refused when the content contradicts what is known,
        DeadlineExceeded when the driver could not be reached: it is then announced as soon as it can.
        """
        return await self._holder.publish(copied.version, copied.arena, part, timeout=timeout)

    async def publish(self, version: Version, tensors: Tensors, *, timeout: float) -> bool:
        """Copy ``tensors`` in another thread, digest and announce them.

        The tensors must not change until it returns.
        """
        copied = await asyncio.to_thread(self.copy, version, tensors)
        return await self.announce(copied, await asyncio.to_thread(self.part, copied), timeout=timeout)


def copy_aside(version: Version, tensors: Tensors, *, allocate: Allocate = anonymous) -> Copied:
    """Copy tensors into memory of their own. Raises as ``WeightSender.copy`` does."""
    shards = {name: slice_of(name, given) for name, given in tensors.items()}
    boxes = {name: (dtype_name(shard.array), shard.box) for name, shard in shards.items()}
    arena = Arena(boxes, allocate=allocate)
    for name, shard in shards.items():
        np.copyto(arena.arrays[name], shard.array)
    return Copied(version, arena, {name: shard.shape for name, shard in shards.items()})


def entries_of(copied: Copied, *, worker: str) -> tuple[TensorEntry, ...]:
    """Return what a copy consists of, in the order of names, with digests; ``worker`` holds it."""
    return tuple(_entry(name, copied, worker) for name in sorted(copied.shapes))


def _entry(name: str, copied: Copied, worker: str) -> TensorEntry:
    array, at = copied.arena.arrays[name], copied.arena.boxes[name]
    most = max(_SLICE_BYTES, array.nbytes // _MOST_SLICES) // array.itemsize
    slices = tuple(
        Slice(box=box, holder=worker, nbytes=box.volume * array.itemsize, digest=digest_of(view(array, at, box)))
        for box in (tuple(split(at, most)) or (at,))
    )
    return TensorEntry(name=name, dtype=dtype_name(array), shape=copied.shapes[name], slices=slices)


def slice_of(name: str, given: AnyArray | PublishedSlice) -> PublishedSlice:
    """Return a tensor, or a slice of one, as a slice. Raises Refused where it sticks out of its tensor."""
    if not isinstance(given, PublishedSlice):
        return PublishedSlice(array=given, offset=(0,) * given.ndim, shape=given.shape)
    if not given.box.fits(given.shape):
        raise Refused(f"{name!r}: {given.box} does not lie inside {given.shape}", where="weights")
    return given
