"""Catalogue of versions: which exist, who holds them, and which may be forgotten. Pure: no clock, no socket.

``revision`` counts the changes of what all workers are told: the versions, which are available, which are required and
which releasable. One more holder of an available version is no such change, and costs constant time: a worker that has
once said in full where it serves, and what, is believed by the numbers of versions that it reports.

Invariants:
* ``newest`` never goes back, and an older trainer attempt publishes nothing once a newer one is known.
* ``find`` and ``available`` speak only of versions of which live holders inside the job together have every byte.
* Nobody in the job is told to pull from a worker outside of it.
* A version is releasable only if no required step needs it, it is not among the newest ``keep`` available ones, and the
  driver has said at least once what is required (a restarted driver knows nothing at first).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from asyncflow.errors import Fenced, ProtocolError, Refused, StaleHandle
from asyncflow.identity import Version
from asyncflow.weights.manifest import Manifest, ManifestPart, encoded, merge
from asyncflow.weights.messages import WHOLE, layout_key
from asyncflow.weights.slices import Box, subtract
from asyncflow.weights.spread import Spread

_SEVERAL = 8


@dataclass(frozen=True, kw_only=True)
class Holding:
    """Holding of a version by one worker, and where it serves it; ``regions`` None means all of it.

    node: where the worker runs, "" if unknown; outside: whether it is no part of the job, so that no version is
    available by what it holds.
    """

    worker: str
    address: str
    node: str = ""
    regions: Mapping[str, Box] | None = None
    outside: bool = False


Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""By name the shapes of all tensors of a version; one object for all versions that have the same."""


@dataclass(kw_only=True)
class _Record:
    """One version. publishers: the holders that published a part."""

    parts: dict[int, ManifestPart] = field(default_factory=dict)
    manifest: Manifest | None = None
    manifest_nbytes: int = 0
    shapes: Shapes = field(default_factory=dict)
    holders: dict[str, Holding] = field(default_factory=dict)
    publishers: set[str] = field(default_factory=set)
    available: bool = False

    def settle(self) -> None:
        """Compute again whether the holders together have every byte."""
        self.available = self.manifest is not None and _cover(self.manifest, self.inside)

    @property
    def inside(self) -> list[Holding]:
        """The holdings of workers of the job."""
        return [holding for holding in self.holders.values() if not holding.outside]

    def roots(self) -> list[Holding]:
        """Return the publishers that are there if these have every byte, else some who do, else all who hold any."""
        assert self.manifest is not None
        published = [self.holders[worker] for worker in sorted(self.publishers)]
        if _cover(self.manifest, published):
            return published
        whole = [holding for holding in self.inside if holding.regions is None]
        return whole[:_SEVERAL] or self.inside


def _cover(manifest: Manifest, holdings: Collection[Holding]) -> bool:
    """Return whether holders together have every byte."""
    if any(holding.regions is None for holding in holdings):
        return True
    boxes: dict[str, list[Box]] = {}
    for holding in holdings:
        for name, box in (holding.regions or {}).items():
            boxes.setdefault(name, []).append(box)
    return all(not subtract(Box.whole(entry.shape), boxes.get(entry.name, ())) for entry in manifest.tensors)


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Sources of one receiver. whole: whether they have what they offer already; published: whether as publishers."""

    sources: list[Holding]
    whole: bool
    published: bool


class Catalogue:
    """The catalogue of a job's weight versions. ``keep``: how many of the newest available versions stay anyway."""

    def __init__(self, *, keep: int = 2) -> None:
        self._keep = keep
        self._records: dict[Version, _Record] = {}
        self._held: dict[str, set[Version]] = {}
        self._known: dict[str, tuple[Holding, Shapes]] = {}
        self._addresses: dict[str, str] = {}
        self._spread = Spread()
        self._required: frozenset[int] | None = None
        self._attempt = 0
        self._newest: Version | None = None
        self.revision = 0
        self._told: object = None

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

    def held_by(self, worker: str) -> frozenset[Version]:
        """Return the versions that ``worker`` holds, wholly or in part."""
        return frozenset(self._held.get(worker, ()))

    def manifest_nbytes(self, version: Version) -> int:
        """Return the length of the encoded manifest, 0 while it is unknown or not complete."""
        return self._records[version].manifest_nbytes if version in self._records else 0

    def place(
        self,
        version: Version,
        worker: str,
        *,
        address: str,
        layout: str,
        node: str = "",
        failed: Collection[str] = (),
        outside: bool = False,
    ) -> Assignment:
        """Return whom a receiver is to pull ``version`` from, and let others pull from it what it has got by then.

        node: where it runs, "" if unknown; failed: whom it could get nothing from; outside: whether it is no part of
        the job. Raises StaleHandle for a version that is unknown or not complete.
        """
        self.manifest(version)
        record = self._records[version]
        self._addresses[worker] = address
        parent = self._spread.place(
            worker,
            layout=_apart(layout, outside=outside),
            node=node,
            failed=failed,
            version=version,
            whole=record.holders,
        )
        if parent is not None:
            source = Holding(worker=parent, address=self._addresses[parent])
            return Assignment(sources=[source], whole=parent in record.holders, published=False)
        sources = [holding for holding in record.roots() if holding.worker != worker]
        return Assignment(sources=sources, whole=True, published=True)

    def fence(self, attempt: int) -> None:
        """Refuse publications by trainer attempts older than ``attempt`` from now on."""
        self._attempt = max(self._attempt, attempt)

    def check_attempt(self, version: Version) -> None:
        """Raise Fenced where a newer attempt than that of ``version`` is known."""
        if version.attempt < self._attempt:
            what = f"attempt {version.attempt} publishes {version}, but attempt {self._attempt} is known"
            raise Fenced(what, where="weights catalogue", hint="This trainer has been replaced: it should end.")

    def publish(self, part: ManifestPart) -> bool:
        """Take one rank's part of a version; say whether the version is complete now.

        The same part may come again (a driver restarted, an answer was lost). Raises Fenced for an older attempt,
        Refused for a part that contradicts what is known.
        """
        version = Version.unpack(part.version)
        self.check_attempt(version)
        record = self._records.get(version) or _Record()
        if record.manifest is None:
            self._complete(record, _accept(part, record))
        else:
            _agree(part, record.manifest)
        self.fence(version.attempt)
        self._records[version] = record
        record.publishers.add(part.worker)
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
        if record.manifest is None:
            self._complete(record, known)
        self._records[version] = record
        if holding.worker not in record.publishers:
            layout = WHOLE if holding.regions is None else layout_key(holding.regions, known)
            self._spread.join(holding.worker, layout=_apart(layout, outside=holding.outside), node=holding.node)
            self._spread.heard(holding.worker)
            self._addresses[holding.worker] = holding.address
            self._known[holding.worker] = holding, record.shapes
        self._hold(version, record, holding)

    def report(self, worker: str, held: Collection[Version]) -> list[Version]:
        """Take the versions that ``worker`` holds now for true; return those of which it must say more.

        It holds of each what it said in full of an earlier one that had the same tensors. ``hold``, or ``publish``,
        says more: a worker that was never heard of, or a version that is unknown, is believed in full only.
        """
        believed = self.held_by(worker)
        for version in believed.difference(held):
            self.drop(worker, version)
        return [version for version in held if version not in believed and not self._believe(worker, version)]

    def _believe(self, worker: str, version: Version) -> bool:
        record, known = self._records.get(version), self._known.get(worker)
        if record is None or known is None or known[1] is not record.shapes:
            return False
        self._spread.heard(worker)
        self._hold(version, record, known[0])
        return True

    def _complete(self, record: _Record, manifest: Manifest | None) -> None:
        """Note what a version consists of, once all its parts are there."""
        if manifest is not None:
            shapes = {entry.name: entry.shape for entry in manifest.tensors}
            same = (known.shapes for known in self._records.values() if known.shapes == shapes)
            record.manifest, record.manifest_nbytes = manifest, len(encoded(manifest))
            record.shapes = next(same, shapes)

    def drop(self, worker: str, version: Version) -> None:
        """Note that a worker does not hold ``version`` any more."""
        record = self._records.get(version)
        if record is None:
            return
        if record.holders.pop(worker, None) is None:
            return
        self._held[worker].discard(version)
        record.publishers.discard(worker)
        record.parts = {rank: part for rank, part in record.parts.items() if part.worker != worker}
        was_available = record.available
        record.settle()
        if not record.holders:
            del self._records[version]
        if not record.holders or record.available != was_available:
            self._tell()

    def leave(self, worker: str) -> None:
        """Note that a worker is gone with all it held."""
        for version in self.versions:
            self.drop(worker, version)
        self._spread.leave(worker)
        tables: tuple[dict[str, Any], ...] = (self._held, self._known, self._addresses)
        for table in tables:
            table.pop(worker, None)

    def require(self, steps: Iterable[int]) -> None:
        """Set the steps that unfinished work needs. A step that is left out once may be gone when it is named again."""
        self._required = frozenset(steps)
        self._tell()

    @property
    def releasable(self) -> list[Version]:
        """The versions that whoever holds them may forget, oldest first."""
        if self._required is None:
            return []
        kept = self._kept(self._required)
        return [version for version in self.versions if version not in kept]

    def _kept(self, required: frozenset[int]) -> set[Version]:
        available = [v for v in self.versions if self._records[v].available]
        kept = set(available[-self._keep :])
        for version, record in self._records.items():
            arriving = record.manifest is None and version.attempt >= self._attempt
            if arriving or version == self._newest or (version.step in required and self.find(version.step) is None):
                kept.add(version)
        return kept | {found for step in required if (found := self.find(step)) is not None}

    def _hold(self, version: Version, record: _Record, holding: Holding) -> None:
        was_available, before = record.available, record.holders.get(holding.worker)
        record.holders[holding.worker] = holding
        self._held.setdefault(holding.worker, set()).add(version)
        if record.manifest is not None and (self._newest is None or version > self._newest):
            self._newest = version
        if not was_available or before not in (None, holding):
            record.settle()
        if not was_available or not record.available:
            self._tell()

    def _tell(self) -> None:
        """Count a change, if what all workers are told has changed."""
        complete = [(version, record.available) for version, record in self._records.items() if record.manifest]
        told = (sorted(complete), self._required, self.releasable)
        if told != self._told:
            self._told = told
            self.revision += 1


def _apart(layout: str, *, outside: bool) -> str:
    """Return the name of a layout in the tree: what is no part of the job has a tree of its own."""
    return f"outside {layout}" if outside else layout


def _accept(part: ManifestPart, record: _Record) -> Manifest | None:
    """Take a part; return the manifest if it was the last one that was missing."""
    known = record.parts.get(part.part)
    where = f"weights {Version.unpack(part.version)}"
    if known is not None and known.tensors != part.tensors:
        raise Refused(f"part {part.part} was published before with other content", where=where)
    if any(other.parts != part.parts for other in record.parts.values()):
        raise Refused(f"{part.parts} parts, but another rank says otherwise", where=where)
    parts = {**record.parts, part.part: part}
    manifest = merge(parts.values()) if len(parts) == part.parts else None
    record.parts = {} if manifest is not None else parts
    return manifest


def _agree(part: ManifestPart, manifest: Manifest) -> None:
    known = {(entry.name, each.box): each.digest for entry in manifest.tensors for each in entry.slices}
    for entry in part.tensors:
        for each in entry.slices:
            if known.get((entry.name, each.box)) != each.digest:
                what = f"{entry.name!r} at {each.box} was published before with other content"
                raise Refused(what, where=f"weights {Version.unpack(part.version)}")
