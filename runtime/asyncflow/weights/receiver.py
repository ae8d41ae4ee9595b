"""The rollout's side: it pulls versions into host memory at its own pace, while generation goes on, and serves them.

Invariants: an arena's arrays are returned only when every byte was checked; a version in use, staged or waited for is
never dropped, nor one that differences refer to; only the event loop's idle moments and threads that release the GIL
are used, so the engine is not held up. What was checked of a version on its way is served to peers already. What a
caller waits for comes before what the worker wants; an unfinished transfer is given up for a newer version only if no
unfinished step needs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
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
"""So many times as long as the fastest of the last transfers one may take before another source is asked for."""
_USUAL = 4

Layout = Callable[[str, tuple[int, ...]], Box | None]
"""Says which box of a tensor (name, shape) a receiver needs; None: nothing of it."""


def whole(name: str, shape: tuple[int, ...]) -> Box | None:
    """Need all of every tensor."""
    del name
    return Box.whole(shape)


class WeightReceiver:
    """Pulls the versions that ``want`` names, and those that ``ensure`` asks for.

    membership: gives the client to the driver; worker: id of this worker; transport: made for this receiver alone;
    node: where it runs, "" if unknown; want: the step to fetch next given the catalogue, None for nothing (asked again
    at every change, see ``notify``); layout: what is needed of each tensor; on_transfer: called with the record of
    every finished transfer.
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
        self._asked: Counter[int] = Counter()
        self._current: Version | None = None
        self._transfer: Transfer | None = None
        self._base: Version | None = None
        self._source: tuple[PeerView, ...] = ()
        self._source_of = 0
        self._outage = Outage("pulling weights")
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights-digest")

    @property
    def view(self) -> CatalogueView:
        """The catalogue as known now."""
        return self._holder.view

    @property
    def current(self) -> Version | None:
        """The version that was taken last."""
        return self._current

    @property
    def staged(self) -> Version | None:
        """The newest version that is complete here and newer than the current one."""
        return max((v for v in self._holder.copies if self._current is None or v > self._current), default=None)

    @property
    def held(self) -> list[int]:
        """The steps that can be taken now, in order."""
        return sorted({version.step for version in self._holder.copies})

    @property
    def nbytes(self) -> int:
        """Bytes of the versions held here."""
        return sum(copy.arena.nbytes for copy in self._holder.copies.values())

    @property
    def progress(self) -> tuple[Version, int, int] | None:
        """The version that is being pulled, its bytes that are here, and all its bytes; None when nothing is."""
        if self._transfer is None:
            return None
        return self._transfer.version, self._transfer.nbytes - self._transfer.missing, self._transfer.nbytes

    def status(self) -> dict[str, Any]:
        """Return what heartbeats report of versions, which are packed, -1 for none.

        version: that which was taken last; newest: the newest that is known; received: share of ``receiving`` that is
        here; transfer_s, wire_bytes: seconds that the last transfer took, and bytes that travelled for it, left out
        before the first.
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
        """Return the steps that are held or could be loaded, in order."""
        return sorted({*self.held, *(version.step for version in self.view.available)})

    async def start(self) -> None:
        """Begin to watch, pull and serve."""
        await self._holder.start()
        self._holder.spawn(self._run())

    async def close(self) -> None:
        """End the pull and serve no longer. Arrays that were taken stay valid."""
        await self._holder.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def notify(self) -> None:
        """Evaluate ``want`` again: what it depends on has changed."""
        self._holder.notify()

    def take(self, step: int) -> tuple[Version, Mapping[str, AnyArray]]:
        """Hand a held version of ``step``, of the newest attempt held, to the engine: it is the current one now.

        The arrays are read-only views of host memory, bfloat16 as its bits in uint16; they stay valid for as long as
        they are referenced. Raises StaleHandle where the step is not held: ``ensure`` it first.
        """
        version = self._held(step)
        if version is None:
            raise StaleHandle(f"step {step} is not held, only {self.held}", where="weights", hint="ensure() it first.")
        self._current = version
        self.notify()
        return version, self.tensors(version)

    def tensors(self, version: Version) -> Mapping[str, AnyArray]:
        """Return the arrays of a held version, as ``take`` does, without making it the current one."""
        return self._holder.copies[version].arena.tensors

    async def ensure(self, step: int, *, timeout: float) -> Version:
        """Wait until a version of ``step`` can be taken, and fetch it before anything else. Raises as ``wait_for``."""
        with self.keeping(step):
            self.notify()
            await self.wait_for(lambda: self._held(step) is not None, what=f"weights of step {step}", timeout=timeout)
        version = self._held(step)
        assert version is not None
        return version

    @contextlib.contextmanager
    def keeping(self, step: int) -> Iterator[None]:
        """Keep the held version of ``step``, also when newer ones come: it can be taken until the context ends."""
        self._asked[step] += 1
        try:
            yield
        finally:
            self._asked[step] -= 1
            self._asked += Counter()

    async def wait_for(self, predicate: Callable[[], bool], *, what: str, timeout: float) -> None:
        """Wait until ``predicate``, of this receiver's state, is true.

        Raises DeadlineExceeded that names ``what``, or at once what has ended this receiver's work: an error of
        ``layout``, ValueError for a box of it that does not lie inside its tensor.
        """
        await self._holder.wait_for(predicate, what=what, timeout=timeout)

    def _held(self, step: int) -> Version | None:
        return max((version for version in self._holder.copies if version.step == step), default=None)

    def _in_use(self) -> set[Version]:
        asked = {self._held(step) for step in self._asked}
        return {version for version in (self._current, self.staged, self._base, *asked) if version is not None}

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
                    asked=list(self._asked),
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
        log.info("weights: %s: %d bytes in %.2f s, %d of them sent", version, record.nbytes, seconds, record.sent)
        self.transfers.append(record)
        if self._on_transfer is not None:
            self._on_transfer(record)

    async def _fill(self, version: Version) -> TransferRecord:
        manifest, peers = await self._described(version)
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
                raise ValueError(f"the layout wants {box} of {entry.name!r}, which has the shape {entry.shape}")
            boxes[entry.name] = entry.dtype, box
        return Arena(boxes, allocate=self._holder.transport.allocate)

    async def _described(self, version: Version) -> tuple[Manifest, tuple[PeerView, ...]]:
        """Return what a version consists of, and whom to pull it from, nobody where that is not known with it.

        The driver is asked for no manifest that a peer can give, and for no source by who has one from before.
        """
        source = self._source if self._source_of == self._membership.registrations else ()
        silent: set[str] = set()
        found = await self._manifest_of(version, source, silent=silent)
        if found is None and self._layout_key is not None:
            located = await self._locate(version, manifest=True, failed=silent)
            source = located.peers
            found = located.manifest or await self._manifest_of(version, source, silent=silent)
        if found is None:
            asked = Locate(
                worker=self._holder.worker, address=self._holder.address, version=version.packed, layout=None
            )
            found, source = (await self._call(asked)).manifest, ()
        if found is None:
            raise ProtocolError(f"the catalogue gave no manifest of {version}", where="weights")
        return _checked(found, version), source

    async def _manifest_of(self, version: Version, peers: Sequence[PeerView], *, silent: set[str]) -> Manifest | None:
        """Return the manifest of a version that a peer has, None where it cannot be had there in time.

        silent: takes a peer that is gone, or does not answer; one that has not got it yet, or does not want it, has
        not failed.
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
            log.info("weights: %s has no manifest of %s yet", peer.worker, version)
        except StaleHandle as error:
            log.info("weights: %s has no %s: %s", peer.worker, version, error)
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
            what=f"where {Version.unpack(request.version)} is",
            timeout=3 * _CALL_S,
        )

    def _review_s(self) -> float:
        """Return the seconds after which there may be a better source than the one that has been good so far."""
        usual = [record.finished - record.started for record in list(self.transfers)[-_USUAL:]]
        return max(REVIEW_S, _LONGER * min(usual, default=0.0)) if self._source else REVIEW_S

    def _base_of(self, arena: Arena) -> Version | None:
        """Return the newest version held whose boxes and dtypes are those of ``arena``, None where there is none."""
        return max((v for v, copy in self._holder.copies.items() if copy.arena.is_like(arena)), default=None)

    def _known(self) -> dict[str, AnyArray]:
        """Return by digest the published slices that are at hand in other versions."""
        return {
            each.digest: view(copy.arena.arrays[entry.name], copy.arena.boxes[entry.name], each.box)
            for copy in self._holder.copies.values()
            if isinstance(copy.origin, Manifest)
            for entry in copy.origin.tensors
            for each in entry.slices
            if entry.name in copy.arena.boxes and not subtract(each.box, [copy.arena.boxes[entry.name]])
        }


def _checked(manifest: Manifest, version: Version) -> Manifest:
    """Return ``manifest``. Raises ProtocolError unless it is a whole one of ``version``."""
    manifest.check()
    if manifest.version != version.packed:
        raise ProtocolError(f"the manifest of {Version.unpack(manifest.version)} came for {version}", where="weights")
    return manifest


async def _cancel(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
