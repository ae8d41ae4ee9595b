"""Messages between holders and the catalogue: which versions there are, who holds what, whom to pull from.

Invariants: a ``CatalogueView`` is whole, so who has it needs no earlier one, and it is the same for all workers, who
hear it with their heartbeats. Who holds a version is no part of it: a receiver is told a few sources when it asks
(``Located``).
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

import msgspec

from asyncflow.identity import Version
from asyncflow.weights.manifest import Manifest
from asyncflow.weights.slices import Box

WHOLE = ""
"""Key of the layout of a worker that needs all of every tensor."""


class VersionView(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One version, all parts of which were published. digest: of its manifest; nbytes: of its encoded manifest;
    available: whether its holders together have every byte.
    """

    version: int
    digest: str
    available: bool
    nbytes: int


class CatalogueView(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The catalogue as workers see it. Versions are packed and in order.

    required: steps that unfinished work needs; releasable: the versions that whoever holds them may forget.
    """

    required: tuple[int, ...]
    releasable: tuple[int, ...]
    versions: tuple[VersionView, ...]

    def get(self, version: Version) -> VersionView | None:
        """Return what is known of ``version``."""
        return next((known for known in self.versions if known.version == version.packed), None)

    def find(self, step: int) -> Version | None:
        """Return the available version of ``step``, that of the newest attempt, or None."""
        return max((version for version in self.available if version.step == step), default=None)

    @property
    def available(self) -> list[Version]:
        """The versions that can be pulled, oldest first."""
        return [Version.unpack(known.version) for known in self.versions if known.available]


EMPTY_VIEW = CatalogueView(required=(), releasable=(), versions=())


def newest_step(view: CatalogueView) -> int | None:
    """Want the newest version that is available: what a receiver wants unless its worker says otherwise."""
    return view.available[-1].step if view.available else None


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to ``weights.publish`` (a ``ManifestPart``): whether all parts of the version have arrived."""

    complete: bool


class VersionsHeld(msgspec.Struct, frozen=True, kw_only=True):
    """Request of ``weights.held``: a worker has got a packed version and serves it at ``address``.

    node: where it runs, "" if unknown; regions: None where it has all of it, else the box of each tensor; manifest: for
    a catalogue that does not know it.
    """

    worker: str
    address: str
    version: int
    node: str = ""
    regions: Mapping[str, Box] | None = None
    manifest: Manifest | None = None


class VersionsHeldReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to ``weights.held``. wanted: whether a version that is not known is to be told of with its manifest."""

    known: bool
    wanted: bool = True


class Locate(msgspec.Struct, frozen=True, kw_only=True):
    """Request of ``weights.locate``: from whom to pull a packed version that is available.

    worker, address: who asks, and where it serves what it gets as it gets it; layout: key of the boxes that it needs
    (``layout_key``), None where it only wants the manifest; node: where it runs, "" if unknown; failed: workers that it
    could get nothing from; manifest: whether it lacks the manifest.
    """

    worker: str
    address: str
    version: int
    layout: str | None
    node: str = ""
    failed: tuple[str, ...] = ()
    manifest: bool = False


class PeerView(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Whom to pull from.

    whole: whether it has what it offers already, or is getting it; regions: by tensor the box that it offers, None for
    all that is needed.
    """

    worker: str
    address: str
    whole: bool
    regions: Mapping[str, Box] | None = None


class Located(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to ``weights.locate``. published: whether the sources are publishers, who know but their parts of the
    manifest; manifest: where it is lacking, and they are.
    """

    peers: tuple[PeerView, ...]
    published: bool = False
    manifest: Manifest | None = None


def layout_key(boxes: Mapping[str, Box], manifest: Manifest) -> str:
    """Return the key of a layout: "" where ``boxes`` are all of every tensor, else a digest of them."""
    if all(boxes.get(entry.name) == Box.whole(entry.shape) for entry in manifest.tensors):
        return WHOLE
    return blake2b(msgspec.msgpack.encode(sorted(boxes.items())), digest_size=8).hexdigest()
