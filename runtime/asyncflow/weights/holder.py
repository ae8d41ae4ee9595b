"""A worker that holds versions: it serves them to peers, and keeps the catalogue's opinion of it true.

Level-triggered: whenever the catalogue's view or the own holdings changed, what the catalogue believes is compared with
what is held, and the difference is announced; with each watch the catalogue compares, too. So a restarted driver, a
lost announcement and a worker that was believed dead all heal in the same way.

Invariants: a version is dropped only when the catalogue called it releasable, or will not know it, and ``in_use`` does
not name it; of a version that is still arriving only what was checked is served, and nothing is announced.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from asyncflow.api.names import NODE_ENV
from asyncflow.errors import AsyncFlowError, DeadlineExceeded, Refused, StaleHandle
from asyncflow.identity import Version
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.retry import Outage, retry
from asyncflow.weights.manifest import MANIFEST, Manifest, ManifestPart, encoded
from asyncflow.weights.messages import (
    EMPTY_VIEW,
    WHOLE,
    CatalogueView,
    Published,
    VersionDropped,
    VersionDroppedReply,
    VersionsHeld,
    VersionsHeldReply,
    WatchVersions,
    layout_key,
)
from asyncflow.weights.slices import Arena, Box
from asyncflow.weights.transport import Region, Transport

log = logging.getLogger(__name__)

_WATCH_S = 20.0
_CALL_S = 10.0
_LEAVE_S = 1.0


def node_name() -> str:
    """Return the name of the node that this process runs on: what ``ASYNCFLOW_NODE`` says, else the host's name."""
    return os.environ.get(NODE_ENV) or socket.gethostname()


class Linked(Protocol):
    """Whoever has a client to the driver: a ``Membership``."""

    @property
    def driver(self) -> RpcClient:
        """The client."""


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A version in this worker's memory. origin: the part that this worker published, or the manifest it pulled."""

    arena: Arena
    origin: ManifestPart | Manifest


class Arriving(Protocol):
    """A version of which this worker has a part that it serves, and gets the rest: a ``Transfer``."""

    @property
    def manifest(self) -> Manifest:
        """The manifest."""

    def read(self, tensor: str, box: Box) -> memoryview:
        """Return the bytes of a box. Raises StaleHandle unless all of it is here and was checked."""

    async def until(self, tensor: str, box: Box) -> None:
        """Wait until a box is here and was checked, or will not come."""


class Holder:
    """Holds versions for the worker with id ``worker``.

    membership: gives the client to the driver; transport: serves what is held, and belongs to the holder from now on;
    node: where it runs, "" if unknown; in_use: gives the versions that must not be dropped now. arriving: versions of
    which parts are served already, None where it is not known yet what they consist of; changed: the event that the
    next change will set.
    """

    def __init__(
        self,
        *,
        membership: Linked,
        worker: str,
        transport: Transport,
        node: str = "",
        in_use: Callable[[], Collection[Version]] = tuple,
    ) -> None:
        self.worker = worker
        self.node = node
        self.transport = transport
        self.address = ""
        self.copies: dict[Version, Copy] = {}
        self.arriving: dict[Version, Arriving | None] = {}
        self.view: CatalogueView = EMPTY_VIEW
        self._driver = membership.driver
        self._believed: set[Version] = set()
        self._in_use = in_use
        self.changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Serve and begin to watch the catalogue; the driver may come later."""
        self.address = await self.transport.start(self._read, until=self._until)
        self.spawn(self._watch())
        self.spawn(self._keep_true())

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` until this holder is closed; it must not end by itself."""
        task = asyncio.create_task(work, name=f"weights of {self.worker}")
        task.add_done_callback(_report)
        self._tasks.append(task)

    async def close(self) -> None:
        """Notify the catalogue, stop serving, and drop every copy."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        dropped = VersionDropped(worker=self.worker, versions=tuple(version.packed for version in self.copies))
        self.copies.clear()
        try:
            await self._driver.call("weights.dropped", dropped, VersionDroppedReply, timeout=_LEAVE_S)
        except AsyncFlowError as error:
            log.info("weights: left without telling the driver: %s", error)
        await self.transport.close()

    def add(self, version: Version, copy: Copy) -> None:
        """Hold ``copy`` of ``version`` from now on, and announce it."""
        self.copies[version] = copy
        self.notify()

    def notify(self) -> None:
        """Wake everybody who waits for a change, also of what is in use."""
        self.changed.set()
        self.changed = asyncio.Event()

    async def wait_for(self, predicate: Callable[[], bool], *, what: str, timeout: float) -> None:
        """Wait until ``predicate`` of view and holdings is true. Raises DeadlineExceeded that names ``what``."""
        try:
            async with asyncio.timeout(timeout):
                while not predicate():
                    await self.changed.wait()
        except TimeoutError:
            hint = f"The catalogue offers {', '.join(map(str, self.view.available)) or 'no version'}."
            raise DeadlineExceeded(
                f"{what} did not come within {timeout:g} s", where=f"weights of {self.worker}", hint=hint
            ) from None

    async def publish(self, version: Version, arena: Arena, part: ManifestPart, *, timeout: float) -> bool:
        """Hold what this worker publishes of a version and announce it; say whether the version is complete now.

        Raises Fenced or Refused, and then nothing has changed; DeadlineExceeded, and then it is held all the same, and
        announced as soon as the driver can be reached.
        """
        before = self.copies.get(version)
        self.copies[version] = Copy(arena=arena, origin=part)
        try:
            return await retry(lambda: self._publish(part), what=f"publishing {version}", timeout=timeout)
        except Refused:
            del self.copies[version]
            if before is not None:
                self.copies[version] = before
            raise

    def _read(self, version: Version, tensor: str, box: Box) -> memoryview:
        copy = self.copies.get(version)
        arriving = self.arriving.get(version)
        manifest = copy.origin if copy is not None else arriving.manifest if arriving is not None else None
        if tensor == MANIFEST and isinstance(manifest, Manifest):
            return _part(encoded(manifest), box)
        if copy is not None:
            return copy.arena.read(tensor, box)
        if arriving is not None:
            return arriving.read(tensor, box)
        raise StaleHandle(f"{version} is not held any more", where=f"weights of {self.worker}")

    async def _until(self, version: Version, regions: Sequence[Region]) -> None:
        while version in self.arriving and self.arriving[version] is None:
            await self.changed.wait()
        arriving = self.arriving.get(version)
        if arriving is not None and regions[0].tensor != MANIFEST:
            await arriving.until(regions[0].tensor, regions[0].box)

    async def _watch(self) -> None:
        outage = Outage("watching the catalogue of weights")
        while True:
            known = WatchVersions(
                worker=self.worker,
                epoch=self.view.epoch,
                revision=self.view.revision,
                held=tuple(version.packed for version in sorted(self._believed)),
                wait_s=_WATCH_S,
            )
            try:
                view = await self._driver.call("weights.watch", known, CatalogueView, timeout=_WATCH_S + _CALL_S)
            except AsyncFlowError as error:
                await outage.wait(error)
                continue
            outage.end()
            if view.held is not None:
                self._believed = {Version.unpack(packed) for packed in view.held}
            if view.held is not None or (view.epoch, view.revision) != (known.epoch, known.revision):
                self.view = view
                self.notify()

    async def _keep_true(self) -> None:
        outage = Outage("announcing the weights that are held")
        while True:
            changed = self.changed
            self._release()
            try:
                if self.view.epoch:
                    await self._announce()
            except AsyncFlowError as error:
                await outage.wait(error)
            else:
                outage.end()
                await changed.wait()

    def _release(self) -> None:
        for version in [Version.unpack(packed) for packed in self.view.releasable]:
            if version in self.copies and version not in self._in_use():
                del self.copies[version]
                log.info("weights: dropped %s", version)

    async def _announce(self) -> None:
        for version in sorted(self.copies.keys() - self._believed):
            copy = self.copies.get(version)
            if copy is None:
                continue
            try:
                if isinstance(copy.origin, ManifestPart):
                    await self._publish(copy.origin)
                elif not await self._hold(copy, copy.origin) and version not in self._in_use():
                    del self.copies[version]
                    log.info("weights: dropped %s, which the catalogue does not want", version)
            except Refused as error:
                del self.copies[version]
                log.warning("weights: dropped %s: %s", version, error)
        if removed := self._believed - self.copies.keys():
            request = VersionDropped(worker=self.worker, versions=tuple(version.packed for version in removed))
            await self._driver.call("weights.dropped", request, VersionDroppedReply, timeout=_CALL_S)
            self._believed -= removed

    async def _publish(self, part: ManifestPart) -> bool:
        published = await self._driver.call("weights.publish", part, Published, timeout=_CALL_S)
        self._believed.add(Version.unpack(part.version))
        return published.complete

    async def _hold(self, copy: Copy, manifest: Manifest) -> bool:
        """Announce a copy; return whether the catalogue knows it now: of a follower it learns of no version."""
        boxes = copy.arena.boxes
        request = VersionsHeld(
            worker=self.worker,
            address=self.address,
            version=manifest.version,
            node=self.node,
            regions=None if layout_key(boxes, manifest) == WHOLE else boxes,
        )
        reply = await self._driver.call("weights.held", request, VersionsHeldReply, timeout=_CALL_S)
        if not reply.known:
            told = msgspec.structs.replace(request, manifest=manifest)
            reply = await self._driver.call("weights.held", told, VersionsHeldReply, timeout=_CALL_S)
        if reply.known:
            self._believed.add(Version.unpack(manifest.version))
        return reply.known


def _part(data: bytes, box: Box) -> memoryview:
    """Return a part of bytes that are served as if they were a tensor. Raises StaleHandle where it sticks out."""
    if not box.fits((len(data),)):
        raise StaleHandle(f"{box} is no part of {len(data)} bytes", where="weights manifest")
    return memoryview(data)[box.offset[0] : box.offset[0] + box.extent[0]]


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s ended unexpectedly", task.get_name(), exc_info=error)
