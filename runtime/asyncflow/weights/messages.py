"""Messages between holders and the catalogue, and the catalogue as one worker sees it.

Invariant: a ``CatalogueView`` is whole: who has it needs no earlier one. Revisions compare only within one ``epoch``,
the life of one catalogue.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from asyncflow.identity import Version
from asyncflow.weights.manifest import Manifest
from asyncflow.weights.slices import Box


class HolderView(msgspec.Struct, frozen=True, kw_only=True):
    """Holder of a version, or of a part of it (``whole`` False), and where it serves it."""

    worker: str
    address: str
    whole: bool


class VersionView(msgspec.Struct, frozen=True, kw_only=True):
    """One version. digest: "" while parts are missing; available: whether its holders together have every byte."""

    version: int
    digest: str
    available: bool
    holders: tuple[HolderView, ...]


class CatalogueView(msgspec.Struct, frozen=True, kw_only=True):
    """The catalogue as one worker sees it. Versions are packed and in order.

    newest: the newest version ever complete, -1 for none; required: steps that unfinished work needs; releasable: the
    versions that this worker holds and may forget.
    """

    epoch: str
    revision: int
    newest: int
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

    def held_by(self, worker: str) -> set[Version]:
        """Return the versions that the catalogue believes ``worker`` to hold, wholly or in part."""
        return {
            Version.unpack(known.version)
            for known in self.versions
            if any(holder.worker == worker for holder in known.holders)
        }


EMPTY_VIEW = CatalogueView(epoch="", revision=-1, newest=-1, required=(), releasable=(), versions=())


def newest_step(view: CatalogueView) -> int | None:
    """Want the newest version that is available: what a receiver wants unless its worker says otherwise."""
    return view.available[-1].step if view.available else None


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to ``weights.publish`` (a ``Part``): whether all parts of the version have arrived."""

    complete: bool


class Watch(msgspec.Struct, frozen=True, kw_only=True):
    """Request of ``weights.watch``: answered by a ``CatalogueView`` when it differs from the one known, or after
    wait_s seconds.
    """

    worker: str
    epoch: str
    revision: int
    wait_s: float


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """Request of ``weights.held``: a worker has got a packed version and serves it at ``address``.

    regions: None where it has all of it, else the box of each tensor; manifest: for a catalogue that does not know it.
    """

    worker: str
    address: str
    version: int
    regions: Mapping[str, Box] | None = None
    manifest: Manifest | None = None


class HeldReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to ``weights.held``: False where it must be said again with the manifest."""

    known: bool


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """Request of ``weights.dropped``: a worker holds these packed versions no longer."""

    worker: str
    versions: tuple[int, ...]


class DroppedReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to ``weights.dropped``."""


class Locate(msgspec.Struct, frozen=True, kw_only=True):
    """Request of ``weights.manifest``: the packed version asked for."""

    version: int


class Located(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to ``weights.manifest``. regions: what the holders that do not have all of it have, by worker."""

    manifest: Manifest
    regions: Mapping[str, Mapping[str, Box]]
