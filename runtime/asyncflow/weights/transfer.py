"""One pull of one version: pieces, the peers they come from, their digests.

The wanted box of each tensor is cut at the borders of the published slices. A piece that is a whole published slice is
checked against the publisher's digest; a smaller one against what its source says it sent.

Invariant: ``run`` returns only when every byte has come and was checked; what a failed peer gave before it failed is
not pulled again, unless its digest was wrong.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np

from asyncflow import clock
from asyncflow.errors import AsyncFlowError
from asyncflow.identity import Version
from asyncflow.net.retry import delays
from asyncflow.weights.arena import Arena
from asyncflow.weights.manifest import Manifest, digest_of
from asyncflow.weights.policy import preference
from asyncflow.weights.slices import AnyArray, Box, intersect, route, subtract, view
from asyncflow.weights.transports.base import Region, Source, Transport

log = logging.getLogger(__name__)

_STREAMS = 4

Sources = Mapping[Source, Mapping[str, Box] | None]
"""Holders of a version, and the box of each tensor that it has; None: all of it."""


@dataclass(frozen=True, kw_only=True)
class TransferRecord:
    """Record of one finished transfer.

    Times by ``clock.now``; holders: bytes by worker; reused: bytes of slices that had not changed since a version held
    before; faults: peers that failed, stalled or sent wrong bytes.
    """

    version: Version
    nbytes: int
    started: float
    finished: float
    holders: Mapping[str, int]
    reused: int
    faults: int


@dataclass(kw_only=True)
class _Piece:
    """Part of a tensor that comes out of one published slice. digest: "" where it is not the whole slice."""

    tensor: str
    box: Box
    place: AnyArray
    digest: str
    left: list[Box]
    givers: set[str] = field(default_factory=set)


class Transfer:
    """Fills ``arena`` with what it has room for of ``manifest``'s version.

    receiver: this worker's id; sources: gives who holds the version now; changed: gives the event that is set when
    that changes; known: by digest, arrays whose bytes are at hand already; executor: where digests are computed.
    """

    def __init__(
        self,
        *,
        manifest: Manifest,
        arena: Arena,
        receiver: str,
        transport: Transport,
        sources: Callable[[], Awaitable[Sources]],
        changed: Callable[[], asyncio.Event],
        known: Mapping[str, AnyArray],
        executor: Executor,
    ) -> None:
        self.version = Version.unpack(manifest.version)
        self._arena = arena
        self._receiver = receiver
        self._transport = transport
        self._sources = sources
        self._changed = changed
        self._known = known
        self._executor = executor
        self._pieces = _pieces(manifest, arena)
        self._verifying: set[asyncio.Future[None]] = set()
        self._given: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._reused = 0

    async def run(self) -> TransferRecord:
        """Pull until everything is here. Waits for as long as no peer has what is missing; cancel it to give up."""
        started = clock.now()
        await self._reuse()
        waits = delays()
        while self._unfinished():
            changed = self._changed()
            plan = self._plan(await self._sources())
            if not plan:
                await changed.wait()
                continue
            before = self.missing
            gate = asyncio.Semaphore(_STREAMS)
            async with asyncio.TaskGroup() as streams:
                for (source, checked), regions in plan.items():
                    streams.create_task(self._stream(source, regions, checked=checked, gate=gate))
            await asyncio.gather(*self._verifying)
            if self.missing < before:
                waits = delays()
            else:
                await asyncio.sleep(next(waits))
        return TransferRecord(
            version=self.version,
            nbytes=self.nbytes,
            started=started,
            finished=clock.now(),
            holders=dict(self._given),
            reused=self._reused,
            faults=self._faults.total(),
        )

    def _unfinished(self) -> list[_Piece]:
        return [piece for pieces in self._pieces.values() for piece in pieces if piece.left]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole transfer."""
        return self._arena.nbytes

    @property
    def missing(self) -> int:
        """Bytes that have not come, or were wrong."""
        return sum(box.volume * piece.place.itemsize for piece in self._unfinished() for box in piece.left)

    async def _reuse(self) -> None:
        loop = asyncio.get_running_loop()
        for piece in self._unfinished():
            same = self._known.get(piece.digest)
            if same is not None and (same.dtype, same.shape) == (piece.place.dtype, piece.place.shape):
                await loop.run_in_executor(self._executor, np.copyto, piece.place, same)
                piece.left = []
                self._reused += piece.place.nbytes

    def _plan(self, sources: Sources) -> dict[tuple[Source, bool], list[Region]]:
        by_worker = {source.worker: source for source in sources}
        order = preference(by_worker, version=self.version, receiver=self._receiver, faults=self._faults)
        plan: dict[tuple[Source, bool], list[Region]] = {}
        for piece in self._unfinished():
            boxes = {worker: _box(sources[by_worker[worker]], piece) for worker in order}
            for worker, pieces in route(piece.left, boxes)[0].items():
                regions = plan.setdefault((by_worker[worker], not piece.digest), [])
                itemsize = piece.place.itemsize
                regions.extend(Region(tensor=piece.tensor, box=box, itemsize=itemsize) for box in pieces)
        return plan

    async def _stream(self, source: Source, regions: list[Region], *, checked: bool, gate: asyncio.Semaphore) -> None:
        def sink(region: Region, data: memoryview) -> None:
            self._take(source.worker, region, data)

        async with gate:
            try:
                await self._transport.pull(source, self.version, regions, sink=sink, checked=checked)
            except AsyncFlowError as error:
                self._faults[source.worker] += 1
                log.info("weights: %s: %s; its rest comes from elsewhere", self.version, error)

    def _take(self, worker: str, region: Region, data: memoryview) -> None:
        piece = next(piece for piece in self._pieces[region.tensor] if intersect(piece.box, region.box))
        self._arena.write(region.tensor, region.box, data)
        piece.left = [rest for box in piece.left for rest in subtract(box, [region.box])]
        piece.givers.add(worker)
        self._given[worker] += data.nbytes
        if not piece.left and piece.digest:
            task = asyncio.ensure_future(self._verify(piece))
            self._verifying.add(task)
            task.add_done_callback(self._verifying.discard)

    async def _verify(self, piece: _Piece) -> None:
        loop = asyncio.get_running_loop()
        if await loop.run_in_executor(self._executor, digest_of, piece.place) != piece.digest:
            log.warning("weights: %s: %s from %s is wrong", self.version, piece.tensor, ", ".join(piece.givers))
            self._faults.update(piece.givers)
            piece.left, piece.givers = [piece.box], set()


def _pieces(manifest: Manifest, arena: Arena) -> dict[str, list[_Piece]]:
    pieces: dict[str, list[_Piece]] = {}
    for entry in manifest.tensors:
        at = arena.boxes.get(entry.name)
        for published in entry.slices if at is not None else ():
            assert at is not None
            box = intersect(at, published.box)
            if box is None:
                continue
            piece = _Piece(
                tensor=entry.name,
                box=box,
                place=view(arena.arrays[entry.name], at, box),
                digest=published.digest if box == published.box else "",
                left=[box],
            )
            pieces.setdefault(entry.name, []).append(piece)
    return pieces


def _box(held: Mapping[str, Box] | None, piece: _Piece) -> Box | None:
    return piece.box if held is None else held.get(piece.tensor)
