"""One pull of one version: portions, the peers they come from, their digests.

The wanted box of each tensor is cut at the borders of the published slices. A portion that is a whole published slice
is checked against the publisher's digest; a smaller one against what its source says it sent.

Invariants: ``run`` returns only when every byte has come and was checked; what was checked can be read, and nothing
else; what a failed peer gave before it failed is not pulled again, unless its digest was wrong; of several peers, a
receiver takes one that failed after those that failed less. A peer that is itself still getting the version is left as
soon as the catalogue, asked every ``review_s``, knows a better one.
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
"""Seconds after which a receiver asks whether there is a better source than one that is itself still receiving."""
_ASK_S = 0.5
_SMALL = 64 * 1024
"""Bytes of a portion whose digest takes less time than to hand it to another thread."""

Plan = Mapping[tuple[str, bool, Version | None], list[Region]]
"""By peer's worker, whether it sends digests, and the base of differences: the regions that come from it."""


def preference(workers: Iterable[str], *, version: Version, receiver: str, faults: Mapping[str, int]) -> list[str]:
    """Order the holders of ``version`` for ``receiver``: fewest faults first, else by a hash of the three names."""

    def key(worker: str) -> tuple[int, bytes]:
        return faults.get(worker, 0), blake2b(f"{receiver} {worker} {version.packed}".encode(), digest_size=8).digest()

    return sorted(workers, key=key)


@dataclass(frozen=True, kw_only=True)
class TransferRecord:
    """Record of one finished transfer.

    Times by ``clock.now``; nbytes: of the version, as far as it is needed here; sent: bytes that travelled for it;
    holders: bytes that came from each worker, whatever travelled for them; reused: bytes of slices that had not changed
    since a version held before; faults: peers that failed, stalled or sent wrong bytes; fallbacks: pulls that went
    another way than the transport is meant to go, because that one failed.
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
    """Part of a tensor that comes out of one published slice.

    digest: "" where it is not the whole slice; checked: whether it was compared; whole: whether its bytes must travel
    themselves, no difference.
    """

    tensor: str
    box: Box
    place: AnyArray
    digest: str
    left: list[Box]
    checked: bool = False
    whole: bool = False
    givers: set[str] = field(default_factory=set)


class Transfer:
    """Fills ``arena`` with what it has room for of ``manifest``'s version.

    receiver: this worker's id; peers: whom to pull from at first; sources: gives whom to pull from now, given the
    workers that failed; changed: gives the event that is set when the catalogue changes; known: by digest, arrays whose
    bytes are at hand already; review_s: how often a better source is asked for while the one there is has not got all
    itself; base: a version of which the same boxes are held here until the transfer is over, None for none; executor:
    where digests are computed.
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
        self._given: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._failed: set[str] = set()
        self._reused = 0
        self._sent = 0
        self._advanced = asyncio.Event()
        self._over = False

    async def run(self) -> TransferRecord:
        """Pull until everything is here. Waits for as long as no peer has what is missing; cancel it to give up."""
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
                await _either(changed, within_s=next(waits))
            await self._find()
        return TransferRecord(
            version=self.version,
            nbytes=self.nbytes,
            sent=self._sent,
            started=started,
            finished=clock.now(),
            holders=dict(self._given),
            reused=self._reused,
            faults=self._faults.total(),
            fallbacks=self._transport.fallbacks - fallbacks,
        )

    def end(self) -> None:
        """Let go of those who wait for something of it: it is complete, or was given up."""
        self._over = True
        self._advance()

    def read(self, tensor: str, box: Box) -> memoryview:
        """Return the bytes of a box. Raises StaleHandle unless all of it is here and was checked."""
        if not self._has(tensor, box):
            raise StaleHandle(f"{self.version}: {tensor!r} at {box} has not come yet", where=self._receiver)
        return self._arena.read(tensor, box)

    async def until(self, tensor: str, box: Box) -> None:
        """Wait until a box is here and was checked, or will not come."""
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
        """Ask whom to pull from now; if nobody answers, go on with those before, which may be back.

        Raises what the catalogue answers where those have failed, or there are none.
        """
        failed, self._failed = frozenset(self._failed), set()
        try:
            self._peers = await self._sources(failed)
        except AsyncFlowError as error:
            unheard = isinstance(error, PeerLost | DeadlineExceeded)
            if not unheard and (failed or not self._peers):
                raise
            self._failed |= failed
            log.info("weights: %s: %s; it goes on with those it has", self.version, error)

    async def _pull_from(self, peers: Sequence[PeerView]) -> None:
        """Pull what is missing, until all streams have ended or there are better peers."""
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
        """Ask whom to pull from, and return whether it is somebody else, from whom the rest is pulled then."""
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
        """Bytes that have not come, or were wrong."""
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
                log.info("weights: %s: %s; its rest comes from elsewhere", self.version, error)

    def _take(self, worker: str, region: Region, data: memoryview) -> None:
        portion = next(portion for portion in self._portions[region.tensor] if intersect(portion.box, region.box))
        self._arena.write(region.tensor, region.box, data)
        portion.left = [rest for box in portion.left for rest in subtract(box, [region.box])]
        portion.givers.add(worker)
        self._given[worker] += data.nbytes
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
            log.warning("weights: %s: %s from %s is wrong", self.version, portion.tensor, ", ".join(portion.givers))
            self._faults.update(portion.givers)
            self._failed |= portion.givers
            for worker in portion.givers:
                self._transport.doubt(worker)
            portion.left, portion.givers, portion.whole = [portion.box], set(), True


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


async def _either(changed: asyncio.Event, *, within_s: float) -> None:
    """Wait until a change, at most so long."""
    try:
        async with asyncio.timeout(within_s):
            await changed.wait()
    except TimeoutError:
        return
