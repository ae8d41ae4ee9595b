"""The catalogue as a service of the driver, or of a publisher: ``weights.`` publish, watch, locate, held and dropped.

Invariants: what all workers are told is encoded once a change, and every such change wakes every parked watch; changes
that come while many are being told are told together; what concerns few wakes nobody. Nothing is pushed, so a worker
that does not ask costs nothing and delays nobody. A follower, which is no part of the job, introduces no version, and
says nothing about others than followers.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable, Sequence

import msgspec

from asyncflow.api.names import FOLLOWER
from asyncflow.errors import DeadlineExceeded
from asyncflow.identity import Version
from asyncflow.rpc.access import place_of
from asyncflow.rpc.server import RpcServer
from asyncflow.weights.catalogue import Catalogue, Holding
from asyncflow.weights.manifest import ManifestPart
from asyncflow.weights.messages import (
    CatalogueView,
    Locate,
    Located,
    PeerView,
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
_TELLING_S = 100e-6
"""Seconds that it takes to tell one worker: for so long a change waits for the next."""


class CatalogueService:
    """Serves a catalogue on the driver's ``server``; must be made before the server starts.

    on_newest: called when a version newer than all before is complete.

    A restarted driver begins with an empty catalogue: holders announce what they have, by themselves, and until
    ``require`` has been called nothing is releasable.
    """

    def __init__(self, server: RpcServer, *, catalogue: Catalogue | None = None) -> None:
        self.catalogue = catalogue if catalogue is not None else Catalogue()
        self.on_newest: list[Callable[[], None]] = []
        self._newest = self.catalogue.newest
        self._epoch = uuid.uuid4().hex[:16]
        self._changed = asyncio.Event()
        self._watches: dict[asyncio.Future[msgspec.Raw], str] = {}
        self._revision = -1
        self._pending: asyncio.TimerHandle | None = None
        self._encoded: tuple[int, msgspec.Raw] = (-1, msgspec.Raw())
        server.route("weights.publish", ManifestPart, self._publish)
        server.route("weights.watch", WatchVersions, self._watch)
        server.route("weights.locate", Locate, self._locate)
        server.route("weights.held", VersionsHeld, self._held)
        server.route("weights.dropped", VersionDropped, self._dropped)

    def require(self, steps: Iterable[int]) -> None:
        """Set the steps that unfinished work needs, all of them each time. See ``Catalogue.require``."""
        self.catalogue.require(steps)
        self._wake()

    def leave(self, worker: str) -> None:
        """Forget what ``worker`` held: it is gone. If it was only silent, it announces again by itself."""
        self.catalogue.leave(worker)
        for watch in [watch for watch, watcher in self._watches.items() if watcher == worker]:
            self._answer(watch)
        self._wake()

    def view(self) -> CatalogueView:
        """Return the catalogue as all workers see it."""
        catalogue = self.catalogue
        return CatalogueView(
            epoch=self._epoch,
            revision=catalogue.revision,
            required=tuple(sorted(catalogue.required)),
            releasable=tuple(version.packed for version in catalogue.releasable),
            versions=tuple(
                VersionView(
                    version=version.packed,
                    digest=catalogue.digest(version) or "",
                    available=catalogue.available(version),
                )
                for version in catalogue.versions
            ),
        )

    async def wait_for(self, predicate: Callable[[Catalogue], bool], *, what: str, timeout: float) -> None:
        """Wait until the catalogue satisfies ``predicate``. Raises DeadlineExceeded that names ``what``."""
        try:
            async with asyncio.timeout(timeout):
                while not predicate(self.catalogue):
                    await self._changed.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"{what} did not come within {timeout:g} s", where="weights catalogue") from None

    def _publish(self, part: ManifestPart, _frames: Sequence[memoryview]) -> Published:
        part.check()
        complete = self.catalogue.publish(part)
        log.info("weights %s: part %d of %d published", Version.unpack(part.version), part.part + 1, part.parts)
        self._wake()
        return Published(complete=complete)

    def _watch(
        self, request: WatchVersions, _frames: Sequence[memoryview]
    ) -> CatalogueView | msgspec.Raw | asyncio.Future[msgspec.Raw]:
        held = tuple(version.packed for version in sorted(self.catalogue.held_by(request.worker)))
        if held != request.held:
            return msgspec.structs.replace(self.view(), held=held)
        if (request.epoch, request.revision) != (self._epoch, self.catalogue.revision):
            return self._encoded_view()
        loop = asyncio.get_running_loop()
        watch: asyncio.Future[msgspec.Raw] = loop.create_future()
        self._watches[watch] = request.worker
        expiry = loop.call_later(min(max(request.wait_s, 0.0), _LONGEST_WAIT_S), self._answer, watch)

        def ended(_: asyncio.Future[msgspec.Raw]) -> None:
            expiry.cancel()
            del self._watches[watch]

        watch.add_done_callback(ended)
        return watch

    def _answer(self, watch: asyncio.Future[msgspec.Raw]) -> None:
        if not watch.done():
            watch.set_result(self._encoded_view())

    def _encoded_view(self) -> msgspec.Raw:
        if self._encoded[0] != self.catalogue.revision:
            self._encoded = self.catalogue.revision, msgspec.Raw(msgspec.msgpack.encode(self.view()))
        return self._encoded[1]

    def _locate(self, request: Locate, _frames: Sequence[memoryview]) -> Located:
        version = Version.unpack(request.version)
        manifest = self.catalogue.manifest(version)
        nbytes = self.catalogue.manifest_nbytes(version)
        if request.layout is None:
            return Located(peers=(), manifest_nbytes=nbytes, manifest=manifest)
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
            manifest_nbytes=nbytes,
            manifest=manifest if request.manifest and placed.published else None,
        )

    def _held(self, request: VersionsHeld, _frames: Sequence[memoryview]) -> VersionsHeldReply:
        version, outside = Version.unpack(request.version), _follows(request.worker)
        if self.catalogue.digest(version) is None and (request.manifest is None or outside):
            return VersionsHeldReply(known=False)
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

    def _dropped(self, request: VersionDropped, _frames: Sequence[memoryview]) -> VersionDroppedReply:
        for packed in request.versions:
            self.catalogue.drop(request.worker, Version.unpack(packed))
        self._wake()
        return VersionDroppedReply()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if self.catalogue.newest != self._newest:
            self._newest = self.catalogue.newest
            for told in self.on_newest:
                told()
        if self.catalogue.revision != self._revision and self._pending is None:
            wait_s = len(self._watches) * _TELLING_S
            self._pending = asyncio.get_running_loop().call_later(wait_s, self._tell)

    def _tell(self) -> None:
        self._pending, self._revision = None, self.catalogue.revision
        for watch in list(self._watches):
            self._answer(watch)


def _follows(worker: str) -> bool:
    place = place_of(worker)
    return place is not None and place[0] == FOLLOWER
