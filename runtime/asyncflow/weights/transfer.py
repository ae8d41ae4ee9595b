"""Transfer of one version to one receiver: portions, their sources, and their digests.

The needed box of each tensor is split at the borders of the published slices. A portion that is a whole published slice
is checked against the publisher's digest. A smaller portion is checked against the digest that its source sends.

Invariants:
* ``run`` returns only after every byte has arrived and was checked. Only checked bytes can be read.
* Bytes from a peer that failed afterwards are not pulled again, unless their digest was wrong.
* Of several peers, a receiver prefers those with fewer failures.
* A source that is itself still receiving the version is left as soon as the catalogue, queried every ``review_s``
  seconds, returns a better one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from asyncflow import clock
from asyncflow.errors import AsyncFlowError, DeadlineExceeded, PeerLost, StaleHandle
from asyncflow.identity import Version
from asyncflow.rpc.retry import delays
from asyncflow.weights.manifest import Manifest, digest_of
from asyncflow.weights.messages import PeerView
from asyncflow.weights.slices import AnyArray, Arena, Box, intersect, route, subtract, view
from asyncflow.weights.transport import Pull, Region, Source, Transport

log = logging.getLogger(__name__)

_STREAMS = 4
REVIEW_S = 5.0
"""Seconds after which a receiver requests a better source than one that is itself still receiving."""
_ASK_S = 0.5
_SMALL = 64 * 1024
"""Maximum size of a portion whose digest is computed in the event loop: another thread would take longer."""

Plan = Mapping[tuple[str, bool, Version | None], list[Region]]
"""The regions to pull, by worker of the peer, whether it sends digests, and the base of differences."""


def preference(workers: Iterable[str], *, version: Version, receiver: str, faults: Mapping[str, int]) -> list[str]:
    """Order the holders of ``version`` for ``receiver``: fewest faults first, then by a hash of the three names."""

    def key(worker: str) -> tuple[int, bytes]:
        return faults.get(worker, 0), blake2b(f"{receiver} {worker} {version.packed}".encode(), digest_size=8).digest()

    return sorted(workers, key=key)


@dataclass(frozen=True, kw_only=True)
class TransferRecord:
    """Record of one finished transfer.

    started, finished: times by ``clock.now``; nbytes: needed bytes of the version; sent: bytes that travelled for them.
    holders: bytes received from each worker, as content, not as sent.
    reused: bytes of slices that were copied from a version held before, because they had not changed.
    faults: number of failures, stalls and wrong bytes of peers; fallbacks: pulls that used another path than the
    intended one, because the intended one failed.
    """

    version: Version
    nbytes: int
    sent: int
    started: float
    finished: float
    holders: Mapping[str, int]
    reused: int
    faults: int
    fallbacks: int = 0


@dataclass(kw_only=True)
class _Portion:
    """Part of a tensor that lies inside one published slice.

    place: array that receives it; digest: published digest, "" unless it is the whole slice; left: missing boxes.
    checked: whether its digest was compared; whole: whether its bytes must be sent in full, not as a difference.
    senders: workers that sent parts of it.
    """

    tensor: str
    box: Box
    place: AnyArray
    digest: str
    left: list[Box]
    checked: bool = False
    whole: bool = False
    senders: set[str] = field(default_factory=set)


class Transfer:
    """Fills ``arena`` with its boxes of the version of ``manifest``.

    receiver: this worker's id; peers: the first sources; sources: returns current sources, given failed workers.
    changed: returns the event that is set when the catalogue changes; known: available slices by digest.
    review_s: interval of requests for a better source while the current one is itself still receiving.
    base: a version whose same boxes are held here during the transfer, None for none; executor: computes digests.
    """

    def __init__(
        self,
        *,
        manifest: Manifest,
        arena: Arena,
        receiver: str,
        transport: Transport,
        peers: Sequence[PeerView],
        sources: Callable[[frozenset[str]], Awaitable[Sequence[PeerView]]],
        changed: Callable[[], asyncio.Event],
        known: Mapping[str, AnyArray],
        review_s: float,
        base: Version | None,
        executor: Executor,
    ) -> None:
        self.manifest = manifest
        self.version = Version.unpack(manifest.version)
        self._arena = arena
        self._receiver = receiver
        self._transport = transport
        self._peers = peers
        self._sources = sources
        self._changed = changed
        self._known = known
        self._review_s = review_s
        self._base = base
        self._executor = executor
        self._portions = _portions(manifest, arena)
        self._verifying: set[asyncio.Future[None]] = set()
        self._received: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._failed: set[str] = set()
        self._reused = 0
        self._sent = 0
        self._advanced = asyncio.Event()
        self._over = False

    async def run(self) -> TransferRecord:
        """Pull until all bytes have arrived. Waits without limit while no peer has missing bytes; cancel it to stop."""
        started, fallbacks = clock.now(), self._transport.fallbacks
        await self._reuse()
        waits = delays()
        while self._unfinished():
            changed, before, peers = self._changed(), self.missing, self._peers
            await self._pull_from(peers)
            if not self._unfinished():
                break
            if self._peers is not peers:
                continue
            if self.missing < before:
                waits = delays()
            else:
                await _wait_for(changed, within_s=next(waits))
            await self._find()
        return TransferRecord(
            version=self.version,
            nbytes=self.nbytes,
            sent=self._sent,
            started=started,
            finished=clock.now(),
            holders=dict(self._received),
            reused=self._reused,
            faults=self._faults.total(),
            fallbacks=self._transport.fallbacks - fallbacks,
        )

    def end(self) -> None:
        """Wake all waiters for parts of the version: the transfer is complete, or was cancelled."""
        self._over = True
        self._advance()

    def read(self, tensor: str, box: Box) -> memoryview:
        """Return the bytes of a box. Raises StaleHandle unless all of it has arrived and was checked."""
        if not self._has(tensor, box):
            raise StaleHandle(f"{self.version}: {tensor!r} at {box} has not arrived yet", where=self._receiver)
        return self._arena.read(tensor, box)

    async def until(self, tensor: str, box: Box) -> None:
        """Wait until a box has arrived and was checked, or will not arrive."""
        while not self._over and not self._has(tensor, box):
            await self._advanced.wait()

    def _has(self, tensor: str, box: Box) -> bool:
        for portion in self._portions.get(tensor, ()):
            common = intersect(portion.box, box)
            if common is None or portion.checked:
                continue
            if portion.digest or any(intersect(left, common) for left in portion.left):
                return False
        return True

    def _advance(self) -> None:
        advanced, self._advanced = self._advanced, asyncio.Event()
        advanced.set()

    async def _find(self) -> None:
        """Request the current sources. If there is no reply, keep the previous ones, which may have recovered.

        Raises an error that the catalogue returns if the previous sources have failed, or there are none.
        """
        failed, self._failed = frozenset(self._failed), set()
        try:
            self._peers = await self._sources(failed)
        except AsyncFlowError as error:
            no_reply = isinstance(error, PeerLost | DeadlineExceeded)
            if not no_reply and (failed or not self._peers):
                raise
            self._failed |= failed
            log.info("weights: %s: %s; it continues with the previous sources", self.version, error)

    async def _pull_from(self, peers: Sequence[PeerView]) -> None:
        """Pull the missing bytes until all streams have ended or there are better sources."""
        gate, addresses = asyncio.Semaphore(_STREAMS), {peer.worker: peer.address for peer in peers}
        streams = {
            asyncio.create_task(
                self._stream(
                    Source(worker=worker, address=addresses[worker]), regions, checked=checked, base=base, gate=gate
                )
            )
            for (worker, checked, base), regions in self._plan(peers).items()
        }
        left, review_s = set(streams), None if all(peer.whole for peer in peers) else self._review_s
        try:
            while left:
                done, left = await asyncio.wait(left, timeout=review_s)
                if left and not done and await self._has_better():
                    break
        finally:
            for stream in left:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
        for stream in streams - left:
            stream.result()
        await asyncio.gather(*self._verifying)

    async def _has_better(self) -> bool:
        """Request the current sources; if they have changed, use them for the rest and return True."""
        try:
            async with asyncio.timeout(_ASK_S):
                found = await self._sources(frozenset())
        except (AsyncFlowError, TimeoutError):
            return False
        if {peer.worker for peer in found} == {peer.worker for peer in self._peers}:
            return False
        self._peers = found
        return True

    def _unfinished(self) -> list[_Portion]:
        return [portion for portions in self._portions.values() for portion in portions if portion.left]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole transfer."""
        return self._arena.nbytes

    @property
    def missing(self) -> int:
        """Bytes that have not arrived, or were wrong."""
        return sum(box.volume * portion.place.itemsize for portion in self._unfinished() for box in portion.left)

    async def _reuse(self) -> None:
        loop = asyncio.get_running_loop()
        for portion in self._unfinished():
            same = self._known.get(portion.digest)
            if same is not None and (same.dtype, same.shape) == (portion.place.dtype, portion.place.shape):
                await loop.run_in_executor(self._executor, np.copyto, portion.place, same)
                portion.left, portion.checked = [], True
                self._reused += portion.place.nbytes

    def _plan(self, peers: Sequence[PeerView]) -> Plan:
        by_worker = {peer.worker: peer for peer in peers}
        order = preference(by_worker, version=self.version, receiver=self._receiver, faults=self._faults)
        plan: dict[tuple[str, bool, Version | None], list[Region]] = {}
        for portion in self._unfinished():
            boxes = {worker: _box(by_worker[worker].regions, portion) for worker in order}
            for worker, taken in route(portion.left, boxes)[0].items():
                base = None if portion.whole else self._base
                regions = plan.setdefault((worker, not portion.digest, base), [])
                itemsize = portion.place.itemsize
                regions.extend(Region(tensor=portion.tensor, box=box, itemsize=itemsize) for box in taken)
        return plan

    async def _stream(
        self, source: Source, regions: list[Region], *, checked: bool, base: Version | None, gate: asyncio.Semaphore
    ) -> None:
        def sink(region: Region, data: memoryview, /, *, sent: int | None = None) -> None:
            self._sent += data.nbytes if sent is None else sent
            self._take(source.worker, region, data)

        async with gate:
            try:
                await self._transport.pull(Pull(source, self.version, regions, checked, base), sink=sink)
            except AsyncFlowError as error:
                self._faults[source.worker] += 1
                self._failed.add(source.worker)
                log.info("weights: %s: %s; the rest comes from other sources", self.version, error)

    def _take(self, worker: str, region: Region, data: memoryview) -> None:
        portion = next(portion for portion in self._portions[region.tensor] if intersect(portion.box, region.box))
        self._arena.write(region.tensor, region.box, data)
        portion.left = [rest for box in portion.left for rest in subtract(box, [region.box])]
        portion.senders.add(worker)
        self._received[worker] += data.nbytes
        if not portion.left and portion.digest and data.nbytes == portion.place.nbytes <= _SMALL:
            self._compare(portion, digest_of(portion.place))
        elif not portion.left and portion.digest:
            task = asyncio.ensure_future(self._verify(portion))
            self._verifying.add(task)
            task.add_done_callback(self._verifying.discard)
        elif not portion.digest:
            self._advance()

    async def _verify(self, portion: _Portion) -> None:
        loop = asyncio.get_running_loop()
        self._compare(portion, await loop.run_in_executor(self._executor, digest_of, portion.place))

    def _compare(self, portion: _Portion, digest: str) -> None:
        if digest == portion.digest:
            portion.checked = True
            self._advance()
        else:
            log.warning("weights: %s: %s from %s is wrong", self.version, portion.tensor, ", ".join(portion.senders))
            self._faults.update(portion.senders)
            self._failed |= portion.senders
            for worker in portion.senders:
                self._transport.doubt(worker)
            portion.left, portion.senders, portion.whole = [portion.box], set(), True


def _portions(manifest: Manifest, arena: Arena) -> dict[str, list[_Portion]]:
    portions: dict[str, list[_Portion]] = {}
    for entry in manifest.tensors:
        at = arena.boxes.get(entry.name)
        for published in entry.slices if at is not None else ():
            assert at is not None
            box = intersect(at, published.box)
            if box is None:
                continue
            portion = _Portion(
                tensor=entry.name,
                box=box,
                place=view(arena.arrays[entry.name], at, box),
                digest=published.digest if box == published.box else "",
                left=[box],
            )
            portions.setdefault(entry.name, []).append(portion)
    return portions


def _box(held: Mapping[str, Box] | None, portion: _Portion) -> Box | None:
    return portion.box if held is None else held.get(portion.tensor)


async def _wait_for(changed: asyncio.Event, *, within_s: float) -> None:
    """Wait for a change, at most ``within_s`` seconds."""
    try:
        async with asyncio.timeout(within_s):
            await changed.wait()
    except TimeoutError:
        return
