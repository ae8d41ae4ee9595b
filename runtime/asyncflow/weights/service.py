"""The catalogue as a service of the driver, or of a publisher: broadcast to all workers that hold versions.

The view of the catalogue is sent in the replies to heartbeats (``rpc.directory``), and heartbeats report the versions
that a worker holds, so a new version costs no extra call per worker. The calls are ``weights.publish``,
``weights.locate`` and ``weights.held``; with the last, a worker announces a holding in full, once, and again if the
catalogue requests it.

Invariants: the view is encoded once per change, and a change outside the view wakes no worker. A silent worker costs
nothing and delays no other worker. Every holder and publisher is a member, so the service notices its end. A follower,
which is not part of the job, cannot introduce a version, and can report failures of other followers only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from asyncflow.api.names import FOLLOWER
from asyncflow.errors import DeadlineExceeded, PeerLost, StaleHandle
from asyncflow.identity import Version
from asyncflow.rpc.access import place_of
from asyncflow.rpc.directory import Directory
from asyncflow.rpc.framing import encode
from asyncflow.rpc.server import RpcServer
from asyncflow.weights.catalogue import Catalogue, Holding
from asyncflow.weights.manifest import ManifestPart
from asyncflow.weights.messages import (
    CatalogueView,
    Locate,
    Located,
    PeerView,
    Published,
    VersionsHeld,
    VersionsHeldReply,
    VersionView,
)

log = logging.getLogger(__name__)


class CatalogueService:
    """Serves a catalogue on the driver's ``server``; must be made before the server starts.

    on_newest: called when a version newer than all earlier ones is complete.

    A restarted driver starts with an empty catalogue. Holders announce their versions without a request, and no version
    is releasable until ``require`` has been called.
    """

    def __init__(self, server: RpcServer, *, directory: Directory, catalogue: Catalogue | None = None) -> None:
        self.catalogue = catalogue if catalogue is not None else Catalogue()
        self.on_newest: list[Callable[[], None]] = []
        self._newest = self.catalogue.newest
        self._changed = asyncio.Event()
        self._directory = directory
        self._reports: dict[str, tuple[int, ...]] = {}
        self._revision = -1
        directory.held = self._reported
        directory.on_leave.append(lambda member, _reason: self.leave(member.incarnation))
        self._broadcast()
        server.route("weights.publish", ManifestPart, self._publish)
        server.route("weights.locate", Locate, self._locate)
        server.route("weights.held", VersionsHeld, self._held)

    def require(self, steps: Iterable[int]) -> None:
        """Set all steps that unfinished work needs. See ``Catalogue.require``."""
        self.catalogue.require(steps)
        self._wake()

    def leave(self, worker: str) -> None:
        """Remove the holdings of ``worker``, which has ended. A worker that was only silent announces them again."""
        self.catalogue.leave(worker)
        self._reports.pop(worker, None)
        self._wake()

    def view(self) -> CatalogueView:
        """Return the catalogue as all workers see it."""
        catalogue = self.catalogue
        return CatalogueView(
            required=tuple(sorted(catalogue.required)),
            releasable=tuple(version.packed for version in catalogue.releasable),
            versions=tuple(
                VersionView(
                    version=version.packed,
                    digest=digest,
                    available=catalogue.available(version),
                    nbytes=catalogue.manifest_nbytes(version),
                )
                for version in catalogue.versions
                if (digest := catalogue.digest(version)) is not None
            ),
        )

    async def wait_for(self, predicate: Callable[[Catalogue], bool], *, what: str, timeout: float) -> None:
        """Wait until the catalogue satisfies ``predicate``. Raises DeadlineExceeded, with ``what`` in its text."""
        try:
            async with asyncio.timeout(timeout):
                while not predicate(self.catalogue):
                    await self._changed.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"{what} did not come within {timeout:g} s", where="weights catalogue") from None

    def _publish(self, part: ManifestPart, _frames: Sequence[memoryview]) -> Published:
        part.check()
        self.catalogue.check_attempt(Version.unpack(part.version))
        self._check_member(part.worker)
        complete = self.catalogue.publish(part)
        log.info("weights %s: part %d of %d published", Version.unpack(part.version), part.part + 1, part.parts)
        self._wake()
        return Published(complete=complete)

    def _reported(self, worker: str, held: tuple[int, ...]) -> tuple[int, ...]:
        """Record the versions that a heartbeat reports; return those that the worker must announce in full."""
        if self._reports.get(worker) == held:
            return ()
        unknown = self.catalogue.report(worker, [Version.unpack(packed) for packed in held])
        self._wake()
        if not unknown:
            self._reports[worker] = held
        return tuple(version.packed for version in unknown)

    def _locate(self, request: Locate, _frames: Sequence[memoryview]) -> Located:
        version = Version.unpack(request.version)
        manifest = self.catalogue.manifest(version)
        if self._directory.member(request.worker) is None:
            raise StaleHandle(f"{request.worker} is not registered", where="weights catalogue")
        if request.layout is None:
            return Located(peers=(), manifest=manifest)
        outside = _follows(request.worker)
        placed = self.catalogue.place(
            version,
            request.worker,
            address=request.address,
            layout=request.layout,
            node=request.node,
            failed=[worker for worker in request.failed if not outside or _follows(worker)],
            outside=outside,
        )
        return Located(
            peers=tuple(
                PeerView(worker=source.worker, address=source.address, whole=placed.whole, regions=source.regions)
                for source in placed.sources
            ),
            published=placed.published,
            manifest=manifest if request.manifest and placed.published else None,
        )

    def _held(self, request: VersionsHeld, _frames: Sequence[memoryview]) -> VersionsHeldReply:
        version, outside = Version.unpack(request.version), _follows(request.worker)
        self._check_member(request.worker)
        if self.catalogue.digest(version) is None and (request.manifest is None or outside):
            return VersionsHeldReply(known=False, wanted=not outside)
        if request.manifest is not None:
            request.manifest.check()
        holding = Holding(
            worker=request.worker,
            address=request.address,
            node=request.node,
            regions=request.regions,
            outside=outside,
        )
        self.catalogue.hold(version, holding, manifest=request.manifest)
        self._wake()
        return VersionsHeldReply(known=True)

    def _check_member(self, worker: str) -> None:
        """Raise PeerLost if ``worker`` is not registered, for example after a driver restart."""
        if self._directory.member(worker) is None:
            raise PeerLost(
                f"{worker} is not registered", where="weights catalogue", hint="It registers again automatically"
            )

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if self.catalogue.newest != self._newest:
            self._newest = self.catalogue.newest
            for callback in self.on_newest:
                callback()
        if self.catalogue.revision != self._revision:
            self._broadcast()

    def _broadcast(self) -> None:
        self._revision = self.catalogue.revision
        self._directory.broadcast(encode(self.view()))


def _follows(worker: str) -> bool:
    place = place_of(worker)
    return place is not None and place[0] == FOLLOWER
