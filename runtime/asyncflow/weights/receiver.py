"""The rollout's side: pulls versions into host memory while generation continues, and serves them to peers.

Invariants:
* An arena's arrays are returned only after every byte was checked.
* A version is never dropped while it is in use, staged, waited for, or the base of differences.
* The receiver uses only idle time of the event loop and threads that release the GIL, so it does not delay the engine.
* Checked parts of an arriving version are served to peers immediately.
* A version that a caller waits for takes precedence over the version that the worker wants. An unfinished transfer is
  cancelled for a newer version only if no unfinished step needs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from msgspec.structs import replace

from asyncflow.errors import AsyncFlowError, ProtocolError, StaleHandle
from asyncflow.flow.versions import next_version
from asyncflow.identity import Version
from asyncflow.rpc.membership import Membership
from asyncflow.rpc.retry import Outage, retry
from asyncflow.weights.holder import Copy, Holder
from asyncflow.weights.manifest import MANIFEST, Manifest, decoded
from asyncflow.weights.messages import WHOLE, CatalogueView, Locate, Located, PeerView, layout_key, newest_step
from asyncflow.weights.slices import AnyArray, Arena, Box, subtract, view
from asyncflow.weights.transfer import REVIEW_S, Transfer, TransferRecord
from asyncflow.weights.transport import Pull, Region, Source, Transport

log = logging.getLogger(__name__)

_CALL_S = 10.0
_RECORDS = 256
_LONGER = 1.5
"""A transfer may take this multiple of the fastest recent one before the receiver looks for another source."""
_USUAL = 4

Layout = Callable[[str, tuple[int, ...]], Box | None]
"""Returns the box of a tensor (name, shape) that a receiver needs, or None if it does not need the tensor."""


def whole(name: str, shape: tuple[int, ...]) -> Box | None:
    """Return the box of the whole tensor: the layout of a receiver that needs everything."""
    del name
    return Box.whole(shape)


class WeightReceiver:
    """Pulls the versions that ``want`` selects, and those that callers request by ``ensure``.

    membership: provides the client to the driver; worker: id of this worker; transport: owned by this receiver.
    node: the worker's node, "" if unknown.
    want: returns the step to fetch next for a catalogue, None for nothing; evaluated at every change (see ``notify``).
    layout: the needed box of each tensor; on_transfer: called with the record of every finished transfer.
    """

    def __init__(
        self,
        *,
        membership: Membership,
        worker: str,
        transport: Transport,
        node: str = "",
        want: Callable[[CatalogueView], int | None] = newest_step,
        layout: Layout = whole,
        on_transfer: Callable[[TransferRecord], None] | None = None,
    ) -> None:
        self.transfers: deque[TransferRecord] = deque(maxlen=_RECORDS)
        self._holder = Holder(membership=membership, worker=worker, transport=transport, node=node, in_use=self._in_use)
        self._membership = membership
        self._driver = membership.driver
        self._want = want
        self._layout = layout
        self._layout_key = WHOLE if layout is whole else None
        self._on_transfer = on_transfer
        self._requested: Counter[int] = Counter()
        self._current: Version | None = None
        self._transfer: Transfer | None = None
        self._base: Version | None = None
        self._source: tuple[PeerView, ...] = ()
        self._source_of = 0
        self._outage = Outage("pulling weights")
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights-digest")

    @property
    def view(self) -> CatalogueView:
        """The current view of the catalogue."""
        return self._holder.view

    @property
    def current(self) -> Version | None:
        """The version that was taken last."""
        return self._current

    @property
    def staged(self) -> Version | None:
        """The newest complete version here that is newer than the current one."""
        return max((v for v in self._holder.copies if self._current is None or v > self._current), default=None)

    @property
    def held(self) -> list[int]:
        """The steps whose versions can be taken now, in order."""
        return sorted({version.step for version in self._holder.copies})

    @property
    def nbytes(self) -> int:
        """Bytes of all versions held here."""
        return sum(copy.arena.nbytes for copy in self._holder.copies.values())

    @property
    def progress(self) -> tuple[Version, int, int] | None:
        """The version being pulled, its bytes that have arrived, and all its bytes; None if none is being pulled."""
        if self._transfer is None:
            return None
        return self._transfer.version, self._transfer.nbytes - self._transfer.missing, self._transfer.nbytes

    def status(self) -> dict[str, Any]:
        """Return the report of versions for heartbeats. Versions are packed, -1 for none.

        version: the version taken last; newest: the newest known version; received: fraction of ``receiving`` that has
        arrived; transfer_s, wire_bytes: duration of the last transfer in seconds, and the bytes sent for it, absent
        before the first transfer.
        """
        progress, newest = self.progress, max(self.view.available, default=None)
        status = {
            "newest": -1 if newest is None else newest.packed,
            "version": -1 if self.current is None else self.current.packed,
            "staged": -1 if self.staged is None else self.staged.packed,
            "receiving": -1 if progress is None else progress[0].packed,
            "received": 0.0 if progress is None else progress[1] / max(1, progress[2]),
        }
        if self.transfers:
            last = self.transfers[-1]
            status |= {"transfer_s": last.finished - last.started, "wire_bytes": last.sent}
        return status

    def available(self) -> list[int]:
        """Return the steps whose versions are held or can be pulled, in order."""
        return sorted({*self.held, *(version.step for version in self.view.available)})

    async def start(self) -> None:
        """Start to watch the catalogue, pull and serve."""
        await self._holder.start()
        self._holder.spawn(self._run())

    async def close(self) -> None:
        """Cancel the pull and stop serving. Arrays that were taken stay valid."""
        await self._holder.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def notify(self) -> None:
        """Evaluate ``want`` again, because its inputs have changed."""
        self._holder.notify()

    def take(self, step: int) -> tuple[Version, Mapping[str, AnyArray]]:
        """Make the held version of ``step``, by the newest attempt, the current one, and return its arrays.

        The arrays are read-only views of host memory (bfloat16 as its bits in uint16), valid as long as they are
        referenced. Raises StaleHandle if the step is not held: call ``ensure`` first.
        """
        version = self._held(step)
        if version is None:
            raise StaleHandle(f"step {step} is not held, only {self.held}", where="weights", hint="ensure() it first")
        self._current = version
        self.notify()
        return version, self.tensors(version)

    def tensors(self, version: Version) -> Mapping[str, AnyArray]:
        """Return the arrays of a held version, as ``take`` does, without making it the current one."""
        return self._holder.copies[version].arena.tensors

    async def ensure(self, step: int, *, timeout: float, lost_s: float = math.inf) -> Version:
        """Fetch a version of ``step`` before any other, and wait until it can be taken. Raises like ``wait_for``.

        lost_s: seconds for which the wait continues although the known processes do not hold the whole version.
        """
        what, deadline = f"weights of step {step}", time.monotonic() + timeout
        with self.keeping(step):
            self.notify()
            while (version := self._held(step)) is None:
                offered, left = step in self.available(), max(0.0, deadline - time.monotonic())
                await self.wait_for(
                    lambda: (step in self.available()) != offered or self._held(step) is not None,  # noqa: B023
                    what=what if offered else f"a process that holds the {what}",
                    timeout=left if offered else min(left, lost_s),
                )
        return version

    @contextlib.contextmanager
    def keeping(self, step: int) -> Iterator[None]:
        """Keep the held version of ``step`` inside the context, even if newer versions arrive."""
        self._requested[step] += 1
        try:
            yield
        finally:
            self._requested[step] -= 1
            self._requested += Counter()

    async def wait_for(self, predicate: Callable[[], bool], *, what: str, timeout: float) -> None:
        """Wait until ``predicate`` on the state of this receiver is true.

        Raises DeadlineExceeded, with ``what`` in its text, or immediately the error that ended this receiver's work: an
        error of ``layout``, or ValueError for one of its boxes that does not lie inside its tensor.
        """
        await self._holder.wait_for(predicate, what=what, timeout=timeout)

    def _held(self, step: int) -> Version | None:
        return max((version for version in self._holder.copies if version.step == step), default=None)

    def _in_use(self) -> set[Version]:
        requested = {self._held(step) for step in self._requested}
        return {version for version in (self._current, self.staged, self._base, *requested) if version is not None}

    async def _run(self) -> None:
        unfinished: Version | None = None
        transfer: asyncio.Task[None] | None = None
        try:
            while True:
                changed = self._holder.changed
                if transfer is not None and transfer.done():
                    transfer.result()
                    transfer = unfinished = None
                target = next_version(
                    self.view,
                    held=self._holder.copies,
                    unfinished=unfinished,
                    asked=list(self._requested),
                    wanted=self._want(self.view),
                )
                if target is not None and target != unfinished:
                    await _cancel(transfer)
                    unfinished = target
                    transfer = asyncio.create_task(self._pull(target), name=f"pull {target}")
                    transfer.add_done_callback(lambda _: self._holder.notify())
                await changed.wait()
        finally:
            await _cancel(transfer)

    async def _pull(self, version: Version) -> None:
        self._holder.arriving[version] = None
        try:
            record = await self._fill(version)
        except (AsyncFlowError, OSError) as error:
            await self._outage.wait(error)
            return
        finally:
            self._holder.arriving.pop(version, None)
            self._holder.notify()
        self._outage.end()
        seconds = record.finished - record.started
        log.info("weights: %s: %d bytes in %.2f s, %d bytes sent", version, record.nbytes, seconds, record.sent)
        self.transfers.append(record)
        if self._on_transfer is not None:
            self._on_transfer(record)

    async def _fill(self, version: Version) -> TransferRecord:
        manifest, peers = await self._describe(version)
        arena = await asyncio.to_thread(self._arena_of, manifest)
        key = layout_key(arena.boxes, manifest)
        if not peers or key != self._layout_key:
            self._layout_key = key
            peers = await self._sources(version, ())
        self._base = self._base_of(arena)
        transfer = self._transfer = Transfer(
            manifest=manifest,
            arena=arena,
            receiver=self._holder.worker,
            transport=self._holder.transport,
            peers=peers,
            sources=lambda failed: self._sources(version, failed),
            changed=lambda: self._holder.changed,
            known=self._known(),
            review_s=self._review_s(),
            base=self._base,
            executor=self._executor,
        )
        self._holder.arriving[version] = transfer
        self._holder.notify()
        try:
            record = await transfer.run()
            self._holder.add(version, Copy(arena=arena, origin=manifest))
        finally:
            self._transfer = self._base = None
            transfer.end()
        return record

    def _arena_of(self, manifest: Manifest) -> Arena:
        boxes = {}
        for entry in manifest.tensors:
            box = self._layout(entry.name, entry.shape)
            if box is None:
                continue
            if not box.fits(entry.shape):
                raise ValueError(f"the layout requests {box} of {entry.name!r}, which has the shape {entry.shape}")
            boxes[entry.name] = entry.dtype, box
        return Arena(boxes, allocate=self._holder.transport.allocate)

    async def _describe(self, version: Version) -> tuple[Manifest, tuple[PeerView, ...]]:
        """Return the manifest of a version, and its sources, empty if they were not received along with it.

        The driver is asked for the manifest only if no peer provides it, and for sources only if there is no earlier
        source.
        """
        source = self._source if self._source_of == self._membership.registrations else ()
        silent: set[str] = set()
        found = await self._manifest_of(version, source, silent=silent)
        if found is None and self._layout_key is not None:
            located = await self._locate(version, manifest=True, failed=silent)
            source = located.peers
            found = located.manifest or await self._manifest_of(version, source, silent=silent)
        if found is None:
            request = Locate(
                worker=self._holder.worker, address=self._holder.address, version=version.packed, layout=None
            )
            found, source = (await self._call(request)).manifest, ()
        if found is None:
            raise ProtocolError(f"the catalogue sent no manifest of {version}", where="weights")
        return _check_manifest(found, version), source

    async def _manifest_of(self, version: Version, peers: Sequence[PeerView], *, silent: set[str]) -> Manifest | None:
        """Return the manifest of a version from the first peer, None if the peer does not provide it in time.

        silent: receives the peer if it has ended or does not reply. A peer that does not have the manifest yet, or does
        not hold the version, is not added.
        """
        known = self.view.get(version)
        if known is None or not peers:
            return None
        whole = Region(tensor=MANIFEST, box=Box.whole((known.nbytes,)), itemsize=1)
        data = bytearray(whole.nbytes)

        def sink(region: Region, part: memoryview, /, *, sent: int | None = None) -> None:
            del sent
            data[region.box.offset[0] : region.box.offset[0] + region.nbytes] = part

        peer = peers[0]
        source = Source(worker=peer.worker, address=peer.address)
        try:
            async with asyncio.timeout(self._review_s()):
                await self._holder.transport.pull(Pull(source, version, [whole], checked=False), sink=sink)
            return decoded(memoryview(data), version=version, digest=known.digest)
        except TimeoutError:
            log.info("weights: %s does not have the manifest of %s yet", peer.worker, version)
        except StaleHandle as error:
            log.info("weights: %s does not hold %s: %s", peer.worker, version, error)
        except AsyncFlowError as error:
            silent.add(peer.worker)
            log.info("weights: no manifest of %s from %s: %s", version, peer.worker, error)
        return None

    async def _sources(self, version: Version, failed: Collection[str]) -> tuple[PeerView, ...]:
        return (await self._locate(version, failed=failed)).peers

    async def _locate(self, version: Version, *, failed: Collection[str] = (), manifest: bool = False) -> Located:
        request = Locate(
            worker=self._holder.worker,
            address=self._holder.address,
            version=version.packed,
            layout=self._layout_key,
            node=self._holder.node,
            failed=tuple(failed),
            manifest=manifest,
        )
        located = await self._call(request)
        self._source_of = self._membership.registrations
        self._source = () if located.published else tuple(replace(peer, whole=False) for peer in located.peers)
        return located

    async def _call(self, request: Locate) -> Located:
        return await retry(
            lambda: self._driver.call("weights.locate", request, Located, timeout=_CALL_S),
            what=f"locating {Version.unpack(request.version)}",
            timeout=3 * _CALL_S,
        )

    def _review_s(self) -> float:
        """Return the seconds after which a source that was good so far is compared with others."""
        usual = [record.finished - record.started for record in list(self.transfers)[-_USUAL:]]
        return max(REVIEW_S, _LONGER * min(usual, default=0.0)) if self._source else REVIEW_S

    def _base_of(self, arena: Arena) -> Version | None:
        """Return the newest held version with the same boxes and element sizes as ``arena``, or None."""
        return max((v for v, copy in self._holder.copies.items() if copy.arena.is_like(arena)), default=None)

    def _known(self) -> dict[str, AnyArray]:
        """Return the published slices that other held versions contain, by digest."""
        return {
            each.digest: view(copy.arena.arrays[entry.name], copy.arena.boxes[entry.name], each.box)
            for copy in self._holder.copies.values()
            if isinstance(copy.origin, Manifest)
            for entry in copy.origin.tensors
            for each in entry.slices
            if entry.name in copy.arena.boxes and not subtract(each.box, [copy.arena.boxes[entry.name]])
        }


def _check_manifest(manifest: Manifest, version: Version) -> Manifest:
    """Return ``manifest``. Raises ProtocolError unless it is a valid manifest of ``version``."""
    manifest.check()
    if manifest.version != version.packed:
        raise ProtocolError(
            f"received the manifest of {Version.unpack(manifest.version)}, not {version}", where="weights"
        )
    return manifest


async def _cancel(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
