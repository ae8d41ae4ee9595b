"""Messages between holders and the catalogue: existing versions, their holders, and sources to pull from.

Invariants: a ``CatalogueView`` is complete, so it replaces every earlier one, and it is the same for all workers, which
receive it in the replies to their heartbeats. It does not list the holders of a version: a receiver requests a few
sources instead (``Located``).
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

import msgspec

from asyncflow.identity import Version
from asyncflow.weights.manifest import Manifest
from asyncflow.weights.slices import Box

WHOLE = ""
"""Key of the layout of a worker that needs every tensor in full."""


class VersionView(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One version of which all parts were published.

    digest: of its manifest; nbytes: of its encoded manifest; available: whether its holders together have every byte.
    """

    version: int
    digest: str
    available: bool
    nbytes: int


class CatalogueView(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The catalogue as workers see it. Versions are packed and in order.

    required: steps that unfinished work needs; releasable: versions that their holders may drop.
    """

    required: tuple[int, ...]
    releasable: tuple[int, ...]
    versions: tuple[VersionView, ...]

    def get(self, version: Version) -> VersionView | None:
        """Return the entry of ``version``, or None."""
        return next((known for known in self.versions if known.version == version.packed), None)

    def find(self, step: int) -> Version | None:
        """Return the available version of ``step`` by the newest attempt, or None."""
        return max((version for version in self.available if version.step == step), default=None)

    @property
    def available(self) -> list[Version]:
        """The versions that can be pulled, oldest first."""
        return [Version.unpack(known.version) for known in self.versions if known.available]


EMPTY_VIEW = CatalogueView(required=(), releasable=(), versions=())


def newest_step(view: CatalogueView) -> int | None:
    """Return the step of the newest available version: the default choice of the next version to pull."""
    return view.available[-1].step if view.available else None


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to ``weights.publish`` (a ``ManifestPart``). complete: whether all parts of the version have arrived."""

    complete: bool


class VersionsHeld(msgspec.Struct, frozen=True, kw_only=True):
    """Request of ``weights.held``: a worker holds a version (packed) and serves it at ``address``.

    node: the worker's node, "" if unknown.
    regions: the box of each tensor that it holds, None for the whole version.
    manifest: the manifest, if the catalogue may not know the version.
    """

    worker: str
    address: str
    version: int
    node: str = ""
    regions: Mapping[str, Box] | None = None
    manifest: Manifest | None = None


class VersionsHeldReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to ``weights.held``. wanted: whether the worker is to repeat an unknown version with its manifest."""

    known: bool
    wanted: bool = True


class Locate(msgspec.Struct, frozen=True, kw_only=True):
    """Request of ``weights.locate``: the sources of an available version (packed).

    worker: the receiver; address: where the receiver serves the parts that it has pulled.
    layout: key of the boxes that it needs (``layout_key``), None if it needs only the manifest.
    node: the receiver's node, "" if unknown; failed: workers from which it could not pull.
    manifest: whether it needs the manifest.
    """

    worker: str
    address: str
    version: int
    layout: str | None
    node: str = ""
    failed: tuple[str, ...] = ()
    manifest: bool = False


class PeerView(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A source to pull from.

    whole: True if the source already has everything that it offers, False if it is still receiving.
    regions: the box of each tensor that it offers, None for all that is needed.
    """

    worker: str
    address: str
    whole: bool
    regions: Mapping[str, Box] | None = None


class Located(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to ``weights.locate``.

    published: whether the sources are publishers, which know only their own parts of the manifest.
    manifest: the manifest, if it was requested and the sources are publishers, or if only the manifest was requested.
    """

    peers: tuple[PeerView, ...]
    published: bool = False
    manifest: Manifest | None = None


def layout_key(boxes: Mapping[str, Box], manifest: Manifest) -> str:
    """Return the key of a layout: "" if ``boxes`` cover every tensor, otherwise a digest of the boxes."""
    if all(boxes.get(entry.name) == Box.whole(entry.shape) for entry in manifest.tensors):
        return WHOLE
    return blake2b(msgspec.msgpack.encode(sorted(boxes.items())), digest_size=8).hexdigest()
