"""The catalogue as a service of the driver: ``weights.`` publish, watch, manifest, held and dropped.

Invariant: every change of the catalogue wakes every parked watch; nothing is pushed, so a worker that does not ask
costs nothing and delays nobody.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable, Sequence

from asyncflow.errors import DeadlineExceeded
from asyncflow.identity import Version
from asyncflow.rpc.server import RpcServer
from asyncflow.weights.catalogue import Catalogue, Holding
from asyncflow.weights.manifest import (
    CatalogueView,
    HolderView,
    Locate,
    Located,
    ManifestPart,
    Published,
    VersionDropped,
    VersionDroppedReply,
    VersionsHeld,
    VersionsHeldReply,
    VersionView,
    WatchVersions,
)

log = logging.getLogger(__name__)

_LONGEST_WAIT_S = 30.0


class CatalogueService:
    """Serves a catalogue on the driver's ``server``; must be made before the server starts.

    A restarted driver begins with an empty catalogue: holders announce what they have, by themselves, and until
    ``require`` has been called nothing is releasable.
    """

    def __init__(self, server: RpcServer, *, catalogue: Catalogue | None = None) -> None:
        self.catalogue = catalogue if catalogue is not None else Catalogue()
        self._epoch = uuid.uuid4().hex
        self._changed = asyncio.Event()
        server.route("weights.publish", ManifestPart, self._publish)
        server.route("weights.watch", WatchVersions, self._watch)
        server.route("weights.manifest", Locate, self._locate)
        server.route("weights.held", VersionsHeld, self._held)
        server.route("weights.dropped", VersionDropped, self._dropped)

    def require(self, steps: Iterable[int]) -> None:
        """Set the steps that unfinished work needs, all of them each time. See ``Catalogue.require``."""
        self.catalogue.require(steps)
        self._wake()

    def leave(self, worker: str) -> None:
        """Forget what ``worker`` held: it is gone. If it was only silent, it announces again by itself."""
        self.catalogue.leave(worker)
        self._wake()

    def view(self, worker: str = "") -> CatalogueView:
        """Return the catalogue as ``worker`` sees it."""
        catalogue = self.catalogue
        return CatalogueView(
            epoch=self._epoch,
            revision=catalogue.revision,
            newest=catalogue.newest.packed if catalogue.newest is not None else -1,
            required=tuple(sorted(catalogue.required)),
            releasable=tuple(version.packed for version in catalogue.releasable(worker)),
            versions=tuple(self._version_view(version) for version in catalogue.versions),
        )

    async def wait_for(self, predicate: Callable[[Catalogue], bool], *, what: str, timeout: float) -> None:
        """Wait until the catalogue satisfies ``predicate``. Raises DeadlineExceeded that names ``what``."""
        try:
            async with asyncio.timeout(timeout):
                while not predicate(self.catalogue):
                    await self._changed.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"{what} did not come within {timeout:g} s", where="weights catalogue") from None

    def _version_view(self, version: Version) -> VersionView:
        return VersionView(
            version=version.packed,
            digest=self.catalogue.digest(version) or "",
            available=self.catalogue.available(version),
            holders=tuple(
                HolderView(worker=holding.worker, address=holding.address, whole=holding.regions is None)
                for holding in self.catalogue.holders(version)
            ),
        )

    async def _publish(self, part: ManifestPart, _frames: Sequence[memoryview]) -> Published:
        part.check()
        complete = self.catalogue.publish(part)
        log.info("weights %s: part %d of %d published", Version.unpack(part.version), part.part + 1, part.parts)
        self._wake()
        return Published(complete=complete)

    async def _watch(self, request: WatchVersions, _frames: Sequence[memoryview]) -> CatalogueView:
        deadline = asyncio.get_running_loop().time() + min(max(request.wait_s, 0.0), _LONGEST_WAIT_S)
        try:
            async with asyncio.timeout_at(deadline):
                while (request.epoch, request.revision) == (self._epoch, self.catalogue.revision):
                    await self._changed.wait()
        except TimeoutError:
            pass
        return self.view(request.worker)

    async def _locate(self, request: Locate, _frames: Sequence[memoryview]) -> Located:
        version = Version.unpack(request.version)
        holders = self.catalogue.holders(version)
        regions = {holding.worker: holding.regions for holding in holders if holding.regions is not None}
        return Located(manifest=self.catalogue.manifest(version), regions=regions)

    async def _held(self, request: VersionsHeld, _frames: Sequence[memoryview]) -> VersionsHeldReply:
        version = Version.unpack(request.version)
        if self.catalogue.digest(version) is None and request.manifest is None:
            return VersionsHeldReply(known=False)
        if request.manifest is not None:
            request.manifest.check()
        holding = Holding(worker=request.worker, address=request.address, regions=request.regions)
        self.catalogue.hold(version, holding, manifest=request.manifest)
        self._wake()
        return VersionsHeldReply(known=True)

    async def _dropped(self, request: VersionDropped, _frames: Sequence[memoryview]) -> VersionDroppedReply:
        for packed in request.versions:
            self.catalogue.drop(request.worker, Version.unpack(packed))
        self._wake()
        return VersionDroppedReply()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
