"""A worker that holds versions: it serves them to peers, and keeps its entries in the catalogue correct.

The protocol is level-triggered: each heartbeat reports the held versions. The reply carries the catalogue, if it has
changed, and the versions that the worker must announce in full. A restarted driver, a lost announcement and a worker
that was wrongly considered dead therefore recover in the same way, and a version like an earlier one needs no extra
call.

Invariants: a version is dropped only if ``in_use`` does not return it, and the catalogue has released it, does not want
it, or knows it with other content. A worker ends if it uses a version that the catalogue knows with other content. Of
an arriving version only checked parts are served, and nothing is announced.
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
from asyncflow.rpc.membership import Membership
from asyncflow.rpc.retry import Outage, retry
from asyncflow.weights.manifest import MANIFEST, Manifest, ManifestPart, encoded
from asyncflow.weights.messages import (
    EMPTY_VIEW,
    WHOLE,
    CatalogueView,
    Published,
    VersionsHeld,
    VersionsHeldReply,
    layout_key,
)
from asyncflow.weights.slices import Arena, Box
from asyncflow.weights.transport import Region, Transport

log = logging.getLogger(__name__)

_CALL_S = 10.0


def node_name() -> str:
    """Return the name of this process's node: the value of ``ASYNCFLOW_NODE``, or the host name."""
    return os.environ.get(NODE_ENV) or socket.gethostname()


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A version in this worker's memory. origin: the part that this worker published, or the manifest it pulled."""

    arena: Arena
    origin: ManifestPart | Manifest


class Arriving(Protocol):
    """A version that is arriving and of which the parts that have arrived are served: a ``Transfer``."""

    @property
    def manifest(self) -> Manifest:
        """The manifest of the version."""

    def read(self, tensor: str, box: Box) -> memoryview:
        """Return the bytes of a box. Raises StaleHandle unless all of it has arrived and was checked."""

    async def until(self, tensor: str, box: Box) -> None:
        """Wait until a box has arrived and was checked, or will not arrive."""


class Holder:
    """Holds versions for the worker with id ``worker``.

    membership: of this process; the holder becomes its subscriber. transport: serves the versions; owned by the holder.
    node: the worker's node, "" if unknown. in_use: returns the versions that must not be dropped now.
    arriving: versions of which parts are already served, None for a version whose manifest is not known yet.
    changed: the event that the next change sets.
    """

    def __init__(
        self,
        *,
        membership: Membership,
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
        self._membership = membership
        self._driver = membership.driver
        self._unknown: set[Version] = set()
        self._unwanted: set[Version] = set()
        self._in_use = in_use
        self.changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start serving. The catalogue arrives with the next heartbeat."""
        self.address = await self.transport.start(self._read, until=self._until)
        self.spawn(self._synchronise())
        self._membership.subscriber = self
        self._membership.report_soon()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work``, which must not return, until close. ``wait_for`` raises an error that ends it."""
        task = asyncio.create_task(work, name=f"weights of {self.worker}")
        task.add_done_callback(self._report)
        self._tasks.append(task)

    async def close(self) -> None:
        """Stop serving and drop every copy. The catalogue learns of it by a heartbeat, or when the member leaves."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.copies.clear()
        self._membership.report_soon()
        await self.transport.close()

    def add(self, version: Version, copy: Copy) -> None:
        """Hold ``copy`` of ``version`` from now on, and announce it."""
        self.copies[version] = copy
        self._membership.report_soon()
        self.notify()

    def notify(self) -> None:
        """Wake all waiters for a change, including changes of the versions in use."""
        self.changed.set()
        self.changed = asyncio.Event()

    async def wait_for(self, predicate: Callable[[], bool], *, what: str, timeout: float) -> None:
        """Wait until ``predicate`` on the view and the copies is true.

        Raises DeadlineExceeded, with ``what`` in its text, or immediately the error that ended the work of this holder.
        """
        try:
            async with asyncio.timeout(timeout):
                while not predicate():
                    if self._failure is not None:
                        raise self._failure
                    await self.changed.wait()
        except TimeoutError:
            hint = f"The catalogue offers {', '.join(map(str, self.view.available)) or 'no version'}"
            raise DeadlineExceeded(
                f"{what} did not come within {timeout:g} s", where=f"weights of {self.worker}", hint=hint
            ) from None

    async def publish(self, version: Version, arena: Arena, part: ManifestPart, *, timeout: float) -> bool:
        """Hold and announce this worker's part of a version; return whether the version is now complete.

        Raises Fenced or Refused, and then changes nothing. Raises DeadlineExceeded if the driver cannot be reached; the
        version is then held, and announced as soon as the driver can be reached.
        """
        before = self.copies.get(version)
        self.copies[version] = Copy(arena=arena, origin=part)
        try:
            return await retry(lambda: self._publish(part), what=f"publishing {version}", timeout=timeout)
        except Refused:
            self.copies.pop(version, None)
            if before is not None:
                self.copies[version] = before
            raise

    def _read(self, version: Version, tensor: str, box: Box) -> memoryview:
        copy = self.copies.get(version)
        arriving = self.arriving.get(version)
        manifest = copy.origin if copy is not None else arriving.manifest if arriving is not None else None
        if tensor == MANIFEST and isinstance(manifest, Manifest):
            return _slice_of_bytes(encoded(manifest), box)
        if copy is not None:
            return copy.arena.read(tensor, box)
        if arriving is not None:
            return arriving.read(tensor, box)
        raise StaleHandle(f"{version} is no longer held", where=f"weights of {self.worker}")

    async def _until(self, version: Version, regions: Sequence[Region]) -> None:
        while (version in self.arriving and self.arriving[version] is None) or self._not_yet_known(version):
            await self.changed.wait()
        arriving = self.arriving.get(version)
        if arriving is not None and regions[0].tensor != MANIFEST:
            await arriving.until(regions[0].tensor, regions[0].box)

    def holds(self) -> tuple[int, ...]:
        """Return the packed versions that are held here and may be wanted, in order."""
        return tuple(version.packed for version in sorted(self.copies.keys() - self._unwanted))

    def receive(self, broadcast: msgspec.Raw | None, unknown: tuple[int, ...]) -> None:
        """Process a heartbeat's reply: the catalogue, if it has changed, and the versions to announce in full."""
        if broadcast is not None:
            self.view = msgspec.msgpack.decode(broadcast, type=CatalogueView)
            self._unwanted.clear()
        self._unknown.update(Version.unpack(packed) for packed in unknown)
        self.notify()

    def _not_yet_known(self, version: Version) -> bool:
        """Return whether a version is newer than every version known to this worker."""
        newest = max(self.view.available, default=None)
        return version not in self.copies and version not in self.arriving and (newest is None or version > newest)

    async def _synchronise(self) -> None:
        outage = Outage("announcing the held weights")
        while True:
            changed = self.changed
            self._check_contents()
            self._release()
            try:
                await self._announce()
            except AsyncFlowError as error:
                await outage.wait(error)
            else:
                outage.end()
                await changed.wait()

    def _check_contents(self) -> None:
        """Drop versions whose content differs from the catalogue's. Raises Refused if such a version is in use."""
        for version, copy in list(self.copies.items()):
            known = self.view.get(version)
            if known is None or not isinstance(copy.origin, Manifest) or copy.origin.digest == known.digest:
                continue
            what = f"two different {version} exist: the one held here is not the one of the catalogue"
            if version in self._in_use():
                hint = "Restart this process; it then pulls the other one"
                raise Refused(what, where=f"weights of {self.worker}", hint=hint)
            self._forget(version)
            log.warning("weights: dropped %s: %s", version, what)

    def _release(self) -> None:
        for version in {*map(Version.unpack, self.view.releasable), *self._unwanted}:
            if version in self.copies and version not in self._in_use():
                self._forget(version)
                log.info("weights: dropped %s", version)

    async def _announce(self) -> None:
        for version in sorted(self._unknown):
            copy = self.copies.get(version)
            try:
                wanted = copy is None or await self._announce_copy(copy)
            except Refused as error:
                log.warning("weights: the catalogue refuses %s: %s", version, error)
                wanted = False
            if not wanted:
                self._unwanted.add(version)
            self._unknown.discard(version)
            self._membership.report_soon()
        self._release()

    async def _announce_copy(self, copy: Copy) -> bool:
        """Announce a copy in full; return whether the catalogue then knows its version."""
        if isinstance(copy.origin, ManifestPart):
            await self._publish(copy.origin)
            return True
        return await self._hold(copy, copy.origin)

    def _forget(self, version: Version) -> None:
        self.copies.pop(version, None)
        self._unwanted.discard(version)
        self._membership.report_soon()

    async def _publish(self, part: ManifestPart) -> bool:
        published = await self._driver.call("weights.publish", part, Published, timeout=_CALL_S)
        return published.complete

    async def _hold(self, copy: Copy, manifest: Manifest) -> bool:
        """Announce a copy; return whether the catalogue now knows its version: a follower cannot introduce one."""
        boxes = copy.arena.boxes
        request = VersionsHeld(
            worker=self.worker,
            address=self.address,
            version=manifest.version,
            node=self.node,
            regions=None if layout_key(boxes, manifest) == WHOLE else boxes,
        )
        reply = await self._driver.call("weights.held", request, VersionsHeldReply, timeout=_CALL_S)
        if not reply.known and reply.wanted:
            with_manifest = msgspec.structs.replace(request, manifest=manifest)
            reply = await self._driver.call("weights.held", with_manifest, VersionsHeldReply, timeout=_CALL_S)
        return reply.known

    def _report(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s ended unexpectedly", task.get_name(), exc_info=error)
            self._failure = error
            self.notify()


def _slice_of_bytes(data: bytes, box: Box) -> memoryview:
    """Return a part of bytes that are served like a tensor. Raises StaleHandle if it lies outside them."""
    if not box.fits((len(data),)):
        raise StaleHandle(f"{box} is no part of {len(data)} bytes", where="weights manifest")
    return memoryview(data)[box.offset[0] : box.offset[0] + box.extent[0]]
