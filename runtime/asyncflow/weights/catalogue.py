"""Catalogue of versions: which exist, who holds them, and which may be forgotten. Pure: no clock, no socket.

Invariants:
* ``newest`` never goes back, and an older trainer attempt publishes nothing once a newer one is known.
* ``find`` and ``available`` speak only of versions of which live holders together have every byte.
* A version is releasable only if no required step needs it, it is not among the newest ``keep`` available ones, and the
  driver has said at least once what is required (a restarted driver knows nothing at first).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from asyncflow.errors import Fenced, ProtocolError, Refused, StaleHandle
from asyncflow.identity import Version
from asyncflow.weights.manifest import Manifest, ManifestPart, TensorEntry, merge
from asyncflow.weights.slices import Box, subtract


@dataclass(frozen=True, kw_only=True)
class Holding:
    """Holding of a version by one worker, and where it serves it; ``regions`` None means all of it."""

    worker: str
    address: str
    regions: Mapping[str, Box] | None = None


@dataclass(kw_only=True)
class _Record:
    parts: dict[int, ManifestPart] = field(default_factory=dict)
    manifest: Manifest | None = None
    holders: dict[str, Holding] = field(default_factory=dict)
    available: bool = False

    def settle(self) -> None:
        """Compute again whether the holders together have every byte."""
        self.available = self.manifest is not None and (
            any(holding.regions is None for holding in self.holders.values())
            or all(self._covered(entry) for entry in self.manifest.tensors)
        )

    def _covered(self, entry: TensorEntry) -> bool:
        regions = [holding.regions or {} for holding in self.holders.values()]
        boxes = (held[entry.name] for held in regions if entry.name in held)
        return not subtract(Box.whole(entry.shape), boxes)


class Catalogue:
    """The catalogue of a job's weight versions. ``keep``: how many of the newest available versions stay anyway."""

    def __init__(self, *, keep: int = 2) -> None:
        self._keep = keep
        self._records: dict[Version, _Record] = {}
        self._required: frozenset[int] | None = None
        self._attempt = 0
        self._newest: Version | None = None
        self.revision = 0

    @property
    def newest(self) -> Version | None:
        """The newest version that was ever complete, whether or not it is still available."""
        return self._newest

    @property
    def required(self) -> frozenset[int]:
        """The steps that unfinished work needs, as the driver last reported."""
        return self._required or frozenset()

    @property
    def versions(self) -> list[Version]:
        """All versions of which a worker holds at least a part, oldest first."""
        return sorted(self._records)

    def available(self, version: Version) -> bool:
        """Return whether live holders together have every byte of ``version``."""
        return version in self._records and self._records[version].available

    def find(self, step: int) -> Version | None:
        """Return the available version of ``step``, that of the newest attempt, or None."""
        return max((v for v, record in self._records.items() if v.step == step and record.available), default=None)

    def manifest(self, version: Version) -> Manifest:
        """Return the manifest of ``version``. Raises StaleHandle where it is unknown or not complete."""
        record = self._records.get(version)
        if record is None or record.manifest is None:
            raise StaleHandle(f"{version} is not in the catalogue", where="weights catalogue")
        return record.manifest

    def digest(self, version: Version) -> str | None:
        """Return the digest of ``version``, None while it is unknown or not complete."""
        record = self._records.get(version)
        return record.manifest.digest if record is not None and record.manifest is not None else None

    def holders(self, version: Version) -> list[Holding]:
        """Return who holds ``version`` or a part of it."""
        record = self._records.get(version)
        return list(record.holders.values()) if record is not None else []

    def fence(self, attempt: int) -> None:
        """Refuse publications by trainer attempts older than ``attempt`` from now on."""
        self._attempt = max(self._attempt, attempt)

    def publish(self, part: ManifestPart) -> bool:
        """Take one rank's part of a version; say whether the version is complete now.

        The same part may come again (a driver restarted, an answer was lost). Raises Fenced for an older attempt,
        Refused for a part that contradicts what is known.
        """
        version = Version.unpack(part.version)
        if version.attempt < self._attempt:
            what = f"attempt {version.attempt} publishes {version}, but attempt {self._attempt} is known"
            raise Fenced(what, where="weights catalogue", hint="This trainer has been replaced: it should end.")
        record = self._records.get(version) or _Record()
        if record.manifest is None:
            _accept(part, record)
        else:
            _agree(part, record.manifest)
        self.fence(version.attempt)
        self._records[version] = record
        regions = None if part.parts == 1 else part.regions
        self._hold(version, record, Holding(worker=part.worker, address=part.address, regions=regions))
        return record.manifest is not None

    def hold(self, version: Version, holding: Holding, *, manifest: Manifest | None = None) -> None:
        """Note that a worker holds a complete version or regions of it; ``manifest`` for a version not yet known.

        Raises StaleHandle for an unknown version without a manifest, Refused where the manifest contradicts what is
        known, ProtocolError where regions do not lie inside its tensors.
        """
        record = self._records.get(version) or _Record()
        known = record.manifest or manifest
        if known is None:
            raise StaleHandle(f"{version} is not in the catalogue", where="weights catalogue")
        if manifest is not None and manifest.digest != known.digest:
            raise Refused(f"two different {version} exist", where="weights catalogue")
        shapes = {entry.name: entry.shape for entry in known.tensors}
        for name, box in (holding.regions or {}).items():
            if name not in shapes or not box.fits(shapes[name]):
                raise ProtocolError(f"{box} is no region of {name!r} in {version}", where=holding.worker)
        record.manifest = known
        self._records[version] = record
        self._hold(version, record, holding)

    def drop(self, worker: str, version: Version) -> None:
        """Note that a worker does not hold ``version`` any more."""
        record = self._records.get(version)
        if record is None or record.holders.pop(worker, None) is None:
            return
        record.parts = {rank: part for rank, part in record.parts.items() if part.worker != worker}
        record.settle()
        if not record.holders:
            del self._records[version]
        self.revision += 1

    def leave(self, worker: str) -> None:
        """Note that a worker is gone with all it held."""
        for version in self.versions:
            self.drop(worker, version)

    def require(self, steps: Iterable[int]) -> None:
        """Set the steps that unfinished work needs. A step that is left out once may be gone when it is named again."""
        required = frozenset(steps)
        if required != self._required:
            self._required = required
            self.revision += 1

    def releasable(self, worker: str) -> list[Version]:
        """Return the versions that ``worker`` holds and may forget, oldest first."""
        if self._required is None:
            return []
        kept = self._kept(self._required)
        return [v for v in self.versions if worker in self._records[v].holders and v not in kept]

    def _kept(self, required: frozenset[int]) -> set[Version]:
        available = [v for v in self.versions if self._records[v].available]
        kept = set(available[-self._keep :])
        for version, record in self._records.items():
            arriving = record.manifest is None and version.attempt >= self._attempt
            if arriving or version == self._newest or (version.step in required and self.find(version.step) is None):
                kept.add(version)
        return kept | {found for step in required if (found := self.find(step)) is not None}

    def _hold(self, version: Version, record: _Record, holding: Holding) -> None:
        if record.holders.get(holding.worker) == holding and record.available:
            return
        record.holders[holding.worker] = holding
        record.settle()
        if record.manifest is not None and (self._newest is None or version > self._newest):
            self._newest = version
        self.revision += 1


def _accept(part: ManifestPart, record: _Record) -> None:
    known = record.parts.get(part.part)
    where = f"weights {Version.unpack(part.version)}"
    if known is not None and known.tensors != part.tensors:
        raise Refused(f"part {part.part} was published before with other content", where=where)
    if any(other.parts != part.parts for other in record.parts.values()):
        raise Refused(f"{part.parts} parts, but another rank says otherwise", where=where)
    parts = {**record.parts, part.part: part}
    if len(parts) == part.parts:
        record.manifest = merge(parts.values())
        parts = {}
    record.parts = parts


def _agree(part: ManifestPart, manifest: Manifest) -> None:
    known = {(entry.name, each.box): each.digest for entry in manifest.tensors for each in entry.slices}
    for entry in part.tensors:
        for each in entry.slices:
            if known.get((entry.name, each.box)) != each.digest:
                what = f"{entry.name!r} at {each.box} was published before with other content"
                raise Refused(what, where=f"weights {Version.unpack(part.version)}")
