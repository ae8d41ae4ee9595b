"""Catalogue of weight versions: existing versions, their holders, and releasable versions. Pure: no clock, no socket.

``revision`` counts the changes of the view that all workers receive: the versions, which of them are available, the
required steps and the releasable versions. One more holder of an available version does not change the view and costs
constant time: once a worker has announced its address and boxes in full, its reports of version numbers suffice.

Invariants:
* ``newest`` never goes back. Once a newer trainer attempt is known, an older attempt cannot publish.
* ``find`` and ``available`` return only versions of which live holders inside the job together have every byte.
* No worker of the job is directed to pull from a worker outside the job.
* A version is releasable only if no required step needs it, it is not among the newest ``keep`` available ones, and the
  driver has reported the required steps at least once (a restarted driver does not know them at first).
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
    """A version, or regions of it, that one worker holds and serves at ``address``.

    regions: box of each tensor that is held, None for the whole version.
    node: the worker's node, "" if unknown.
    outside: whether the worker is not part of the job; its holdings do not make a version available.
    """

    worker: str
    address: str
    node: str = ""
    regions: Mapping[str, Box] | None = None
    outside: bool = False


Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Shapes of all tensors of a version, by name. Versions with equal shapes share one object."""


@dataclass(kw_only=True)
class _Record:
    """State of one version. publishers: the holders that published a part."""

    parts: dict[int, ManifestPart] = field(default_factory=dict)
    manifest: Manifest | None = None
    manifest_nbytes: int = 0
    shapes: Shapes = field(default_factory=dict)
    holders: dict[str, Holding] = field(default_factory=dict)
    publishers: set[str] = field(default_factory=set)
    available: bool = False

    def settle(self) -> None:
        """Recompute whether the holders together have every byte."""
        self.available = self.manifest is not None and _covers(self.manifest, self.inside)

    @property
    def inside(self) -> list[Holding]:
        """The holdings of workers of the job."""
        return [holding for holding in self.holders.values() if not holding.outside]

    def roots(self) -> list[Holding]:
        """Return the publishers if they have every byte, otherwise a few full holders, otherwise all holders."""
        assert self.manifest is not None
        published = [self.holders[worker] for worker in sorted(self.publishers)]
        if _covers(self.manifest, published):
            return published
        whole = [holding for holding in self.inside if holding.regions is None]
        return whole[:_SEVERAL] or self.inside


def _covers(manifest: Manifest, holdings: Collection[Holding]) -> bool:
    """Return whether the holdings together have every byte."""
    if any(holding.regions is None for holding in holdings):
        return True
    boxes: dict[str, list[Box]] = {}
    for holding in holdings:
        for name, box in (holding.regions or {}).items():
            boxes.setdefault(name, []).append(box)
    return all(not subtract(Box.whole(entry.shape), boxes.get(entry.name, ())) for entry in manifest.tensors)


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Sources assigned to one receiver.

    whole: whether the sources already have everything that they offer.
    published: whether the receiver is a root of the tree: its sources are the publishers, or holders in place of them.
    """

    sources: list[Holding]
    whole: bool
    published: bool


class Catalogue:
    """The catalogue of a job's weight versions. keep: number of newest available versions that are always kept."""

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
        self._announced: object = None

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
        """Return the available version of ``step`` by the newest attempt, or None."""
        return max((v for v, record in self._records.items() if v.step == step and record.available), default=None)

    def manifest(self, version: Version) -> Manifest:
        """Return the manifest of ``version``. Raises StaleHandle if it is unknown or incomplete."""
        record = self._records.get(version)
        if record is None or record.manifest is None:
            raise StaleHandle(f"{version} is not in the catalogue", where="weights catalogue")
        return record.manifest

    def digest(self, version: Version) -> str | None:
        """Return the digest of ``version``, or None if it is unknown or incomplete."""
        record = self._records.get(version)
        return record.manifest.digest if record is not None and record.manifest is not None else None

    def holders(self, version: Version) -> list[Holding]:
        """Return the holders of ``version`` or of a part of it."""
        record = self._records.get(version)
        return list(record.holders.values()) if record is not None else []

    def held_by(self, worker: str) -> frozenset[Version]:
        """Return the versions that ``worker`` holds, fully or in part."""
        return frozenset(self._held.get(worker, ()))

    def manifest_nbytes(self, version: Version) -> int:
        """Return the length of the encoded manifest in bytes, 0 if the version is unknown or incomplete."""
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
        """Assign sources for ``version`` to a receiver, and make the receiver a source for others.

        The receiver serves each part as soon as it has checked it. node: the receiver's node, "" if unknown; failed:
        workers from which it could not pull; outside: whether it is not part of the job. Raises StaleHandle if the
        version is unknown or incomplete.
        """
        self.manifest(version)
        record = self._records[version]
        self._addresses[worker] = address
        parent = self._spread.place(
            worker,
            layout=_tree_key(layout, outside=outside),
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
        """Raise Fenced if a newer attempt than that of ``version`` is known."""
        if version.attempt < self._attempt:
            what = f"attempt {version.attempt} publishes {version}, but attempt {self._attempt} is known"
            raise Fenced(what, where="weights catalogue", hint="This trainer has been replaced: it should end")

    def publish(self, part: ManifestPart) -> bool:
        """Record one rank's part of a version, and return whether the version is now complete.

        The same part may arrive again, for example after a driver restart or a lost reply. Raises Fenced for an older
        attempt, Refused for a part that contradicts known content.
        """
        version = Version.unpack(part.version)
        self.check_attempt(version)
        record = self._records.get(version) or _Record()
        if record.manifest is None:
            self._complete(record, _accept(part, record))
        else:
            _check_agreement(part, record.manifest)
        self.fence(version.attempt)
        self._records[version] = record
        record.publishers.add(part.worker)
        regions = None if part.parts == 1 else part.regions
        self._hold(version, record, Holding(worker=part.worker, address=part.address, regions=regions))
        return record.manifest is not None

    def hold(self, version: Version, holding: Holding, *, manifest: Manifest | None = None) -> None:
        """Record that a worker holds a version or regions of it. manifest: required if the version is not known yet.

        Raises StaleHandle for an unknown version without a manifest, Refused if the manifest contradicts known content,
        ProtocolError if a region does not lie inside its tensor.
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
            self._spread.join(holding.worker, layout=_tree_key(layout, outside=holding.outside), node=holding.node)
            self._spread.clear_doubt(holding.worker)
            self._addresses[holding.worker] = holding.address
            self._known[holding.worker] = holding, record.shapes
        self._hold(version, record, holding)

    def report(self, worker: str, held: Collection[Version]) -> list[Version]:
        """Record that ``worker`` now holds exactly ``held``; return the versions that it must announce in full.

        A version whose tensors have the same shapes as one that the worker announced before counts as held in the same
        boxes at the same address. An unknown worker or version must be announced in full by ``hold`` or ``publish``.
        """
        known_holdings = self.held_by(worker)
        for version in known_holdings.difference(held):
            self.drop(worker, version)
        return [version for version in held if version not in known_holdings and not self._infer(worker, version)]

    def _infer(self, worker: str, version: Version) -> bool:
        """Record a holding like the worker's last announced one; return False if there is none with these shapes."""
        record, known = self._records.get(version), self._known.get(worker)
        if record is None or known is None or known[1] is not record.shapes:
            return False
        self._spread.clear_doubt(worker)
        self._hold(version, record, known[0])
        return True

    def _complete(self, record: _Record, manifest: Manifest | None) -> None:
        """Record the contents of a version if all its parts have arrived."""
        if manifest is not None:
            shapes = {entry.name: entry.shape for entry in manifest.tensors}
            same = (known.shapes for known in self._records.values() if known.shapes == shapes)
            record.manifest, record.manifest_nbytes = manifest, len(encoded(manifest))
            record.shapes = next(same, shapes)

    def drop(self, worker: str, version: Version) -> None:
        """Record that a worker no longer holds ``version``."""
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
            self._note_change()

    def leave(self, worker: str) -> None:
        """Remove a worker that has ended, with all its holdings."""
        for version in self.versions:
            self.drop(worker, version)
        self._spread.leave(worker)
        tables: tuple[dict[str, Any], ...] = (self._held, self._known, self._addresses)
        for table in tables:
            table.pop(worker, None)

    def require(self, steps: Iterable[int]) -> None:
        """Set the steps that unfinished work needs. Versions of a step that is left out once may be dropped."""
        self._required = frozenset(steps)
        self._note_change()

    @property
    def releasable(self) -> list[Version]:
        """The versions that holders may drop, oldest first."""
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
            self._note_change()

    def _note_change(self) -> None:
        """Increment ``revision`` if the view that all workers receive has changed."""
        complete = [(version, record.available) for version, record in self._records.items() if record.manifest]
        announced = (sorted(complete), self._required, self.releasable)
        if announced != self._announced:
            self._announced = announced
            self.revision += 1


def _tree_key(layout: str, *, outside: bool) -> str:
    """Return the key of a layout in the tree: workers outside the job have a tree of their own."""
    return f"outside {layout}" if outside else layout


def _accept(part: ManifestPart, record: _Record) -> Manifest | None:
    """Add a part; return the manifest if it was the last missing part."""
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


def _check_agreement(part: ManifestPart, manifest: Manifest) -> None:
    """Raise Refused unless every slice of the part has the digest that is in the manifest."""
    known = {(entry.name, each.box): each.digest for entry in manifest.tensors for each in entry.slices}
    for entry in part.tensors:
        for each in entry.slices:
            if known.get((entry.name, each.box)) != each.digest:
                what = f"{entry.name!r} at {each.box} was published before with other content"
                raise Refused(what, where=f"weights {Version.unpack(part.version)}")
