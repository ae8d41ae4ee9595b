"""Contents of a version: a manifest lists the tensors, the slices in which they were published, and their digests.

A manifest describes content, not location: it is the same at every worker that holds the version. A slice's ``holder``
only names the worker that published it.

Invariants: a manifest that passed ``check`` is complete: its slices tile every tensor. It is also consistent: sizes
follow from shapes, and ``digest`` follows from the entries. Two manifests with equal digests describe equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from math import prod

import msgspec
import numpy as np
import xxhash

from asyncflow.errors import ProtocolError, Refused
from asyncflow.identity import Version
from asyncflow.weights.slices import DTYPES, AnyArray, Box, hull, split, subtract, view

MANIFEST = ""
"""The tensor name under which holders serve the encoded manifest itself, as bytes."""

HASH = "xxh3-128"
"""The hash function for the bytes of slices."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_RANK = 8
_DIGEST_BYTES = 16
_HASH_STRIDE = 1 << 20


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """One box of a tensor as it was published.

    holder: the worker that published it; nbytes: its size; digest: the name of the hash and its value (``digest_of``).
    """

    box: Box
    holder: str
    nbytes: int
    digest: str


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor: its name, dtype (a key of ``DTYPES``), full shape, and the slices in which it was published."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.itemsize


class ManifestPart(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a version, published by rank ``part`` of ``parts``. address: where the rank serves it."""

    version: int
    part: int
    parts: int
    worker: str
    address: str
    tensors: tuple[TensorEntry, ...]

    def check(self) -> None:
        """Raise ProtocolError unless every entry is well formed and its slices, all of this worker, tile one box."""
        if not 0 <= self.part < self.parts:
            raise ProtocolError(f"part {self.part} of {self.parts} does not exist", where=_where(self.version))
        _check_entries(self.tensors)
        for entry in self.tensors:
            if {each.holder for each in entry.slices} != {self.worker}:
                raise ProtocolError(f"{entry.name!r} is not of {self.worker} alone", where=_where(self.version))
            _check_tiling(entry.name, hull(each.box for each in entry.slices), entry.slices)

    @property
    def regions(self) -> dict[str, Box]:
        """The box of each tensor that this rank holds."""
        return {entry.name: hull(each.box for each in entry.slices) for entry in self.tensors}


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A complete version, packed ``version``. tensors: in name order; nbytes, digest: of all contents."""

    version: int
    tensors: tuple[TensorEntry, ...]
    nbytes: int
    digest: str

    def check(self) -> None:
        """Raise ProtocolError unless the manifest is complete and consistent."""
        _check_entries(self.tensors)
        for entry in self.tensors:
            _check_tiling(entry.name, Box.whole(entry.shape), entry.slices)
        if self.nbytes != sum(entry.nbytes for entry in self.tensors):
            raise ProtocolError(f"{self.nbytes} bytes do not follow from the tensors", where=_where(self.version))
        if self.digest != entries_digest(self.tensors):
            raise ProtocolError("the digest does not follow from the tensors", where=_where(self.version))


def encoded(manifest: Manifest) -> bytes:
    """Encode a manifest for ``decoded``."""
    return msgspec.msgpack.encode(manifest)


def decoded(data: memoryview, *, version: Version, digest: str) -> Manifest:
    """Return the manifest of ``version`` that a peer sent. Raises ProtocolError unless it has that ``digest``."""
    try:
        manifest = msgspec.msgpack.decode(data, type=Manifest)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a peer's manifest cannot be read: {error}", where=_where(version.packed)) from error
    if (manifest.version, manifest.digest) != (version.packed, digest):
        raise ProtocolError("a peer's manifest is not that of the catalogue", where=_where(version.packed))
    manifest.check()
    return manifest


def merge(parts: Iterable[ManifestPart]) -> Manifest:
    """Merge the parts of all ranks into the manifest of a version. Raises Refused if parts contradict each other."""
    found = list(parts)
    entries: dict[str, TensorEntry] = {}
    for entry in (entry for part in found for entry in part.tensors):
        known = entries.get(entry.name)
        if known is None:
            entries[entry.name] = entry
            continue
        if (known.dtype, known.shape) != (entry.dtype, entry.shape):
            what = f"{entry.name!r} is {known.dtype}{known.shape} at one rank, {entry.dtype}{entry.shape} at another"
            raise Refused(what, where=_where(found[0].version), hint="Publish the same model from all ranks")
        boxes = {each.box: each.digest for each in known.slices}
        for each in entry.slices:
            if boxes.get(each.box, each.digest) != each.digest:
                what = f"two ranks publish different bytes for {entry.name!r} at {each.box}"
                raise Refused(what, where=_where(found[0].version), hint="Replicated weights have drifted apart")
        fresh = tuple(each for each in entry.slices if each.box not in boxes)
        entries[entry.name] = msgspec.structs.replace(known, slices=known.slices + fresh)
    tensors = tuple(entries[name] for name in sorted(entries))
    for entry in tensors:
        try:
            _check_tiling(entry.name, Box.whole(entry.shape), entry.slices)
        except ProtocolError as error:
            raise Refused(error.what, where=_where(found[0].version), hint="Check the ranks' slices") from error
    return Manifest(
        version=found[0].version,
        tensors=tensors,
        nbytes=sum(entry.nbytes for entry in tensors),
        digest=entries_digest(tensors),
    )


def dtype_name(array: AnyArray) -> str:
    """Return the published name of an array's dtype. Raises Refused for a dtype that weights cannot have."""
    name = _NAMES.get(array.dtype)
    if name is None:
        hint = f"Weights may be {', '.join(DTYPES)}; bfloat16 as its bits in uint16"
        raise Refused(f"dtype {array.dtype} cannot be published", where="weights", hint=hint)
    return name


def digest_of(array: AnyArray) -> str:
    """Return the hash of an array's bytes in C order, as the hash name and hex digits. Copies at most 1 MiB at a time.

    The hash detects corruption by a disk, a network or a bug. It does not protect against an attacker; the job's
    certificates do. It is fast (about 20 GB/s per core) and releases the GIL.
    """
    digest = xxhash.xxh3_128()
    at = Box.whole(array.shape)
    for box in split(at, max(1, _HASH_STRIDE // array.itemsize)):
        digest.update(np.ascontiguousarray(view(array, at, box)).reshape(-1).view(np.uint8).data)
    return f"{HASH}:{digest.hexdigest()}"


def entries_digest(tensors: Sequence[TensorEntry]) -> str:
    """Return the digest of the content of tensors, in hex. It does not depend on the publishers."""
    content = [
        (entry.name, entry.dtype, entry.shape, sorted((each.box.offset, each.digest) for each in entry.slices))
        for entry in tensors
    ]
    return blake2b(msgspec.msgpack.encode(content), digest_size=_DIGEST_BYTES).hexdigest()


def _check_entries(tensors: Sequence[TensorEntry]) -> None:
    names: set[str] = set()
    for entry in tensors:
        where = f"weights manifest, {entry.name!r}"
        if entry.name in names:
            raise ProtocolError("the tensor is named twice", where=where)
        names.add(entry.name)
        if entry.name == MANIFEST:
            raise ProtocolError("a tensor needs a name", where=where)
        if entry.dtype not in DTYPES:
            raise ProtocolError(f"unknown dtype {entry.dtype!r}", where=where)
        if len(entry.shape) > _MAX_RANK or any(size < 0 for size in entry.shape):
            raise ProtocolError(f"impossible shape {entry.shape}", where=where)
        for each in entry.slices:
            if not each.box.fits(entry.shape):
                raise ProtocolError(f"{each.box} does not lie inside {entry.shape}", where=where)
            if each.nbytes != each.box.volume * entry.itemsize:
                raise ProtocolError(f"{each.nbytes} bytes do not follow from {each.box}", where=where)
            if not each.digest.startswith(f"{HASH}:"):
                raise ProtocolError(f"digest {each.digest!r} is not of {HASH}", where=where)


def _check_tiling(name: str, whole: Box, slices: Sequence[Slice]) -> None:
    where = f"weights manifest, {name!r}"
    if missing := subtract(whole, (each.box for each in slices)):
        raise ProtocolError(f"no rank publishes {missing[0]}", where=where)
    if sum(each.box.volume for each in slices) != whole.volume:
        raise ProtocolError(f"a slice of {whole} overlaps another", where=where)


def _where(version: int) -> str:
    return f"weights {Version.unpack(version)}"
