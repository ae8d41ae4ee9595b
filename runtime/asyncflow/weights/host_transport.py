"""Weights over the host network: chunks of versions as frames of calls, a few in flight at a time.

``Pace`` computes the chunk size and the patience from the rate measured so far.

Invariants:
* At most ``window`` chunks of ``chunk_bytes`` are in flight per pull, whatever the size of the version.
* A holder sends contiguous boxes from its arena without a copy. A reply contains only requested regions.
* Patience grows with the expected time of the chunks in flight. After the first chunk, no slow link is mistaken for a
  dead peer. A holder that is itself waiting for a region replies so in time.
* Chunks never exceed ``most`` bytes.
* A holder sends at most ``bandwidth`` bytes a second, differences included, to all peers together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from asyncflow.errors import DeadlineExceeded, ManifestError, ProtocolError, StaleHandle
from asyncflow.identity import Version
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.columns import Buffer
from asyncflow.weights.deltas import difference, restored
from asyncflow.weights.slices import split, subtract
from asyncflow.weights.transport import (
    LONGEST_WAIT_S,
    CallTransport,
    Pull,
    Region,
    Sink,
    digests_of,
)

LEAST_BANDWIDTH = 1 << 20
"""Bytes a second at which the first chunks of several peers arrive well within the usual patience."""

_FIRST_CHUNK = 64 * 1024
_CHUNK_S = 0.25
_SLACK = 8.0
_SMOOTHING = 0.3

_MOST_REGIONS = 1024
_MOST_ELEMENTS = 64 << 20
_CALL_S = 3600.0
_NO_WAIT_S = 0.001
_STARVED = 4.0
"""A puller waits this multiple of its patience for a peer that replies but has not received any data itself."""


class Pace:
    """The pace of one pull, with ``window`` requests in flight of at most ``most`` bytes each, started at time ``now``.

    patience_s: the minimum patience, used until the first data has arrived.
    """

    def __init__(self, *, most: int, window: int, patience_s: float, now: float) -> None:
        self._most = most
        self._window = window
        self._patience_s = patience_s
        self._last = now
        self._seconds_per_byte: float | None = None
        self.chunk = min(_FIRST_CHUNK, most)

    def arrived(self, nbytes: int, *, sent: int, now: float) -> None:
        """Record the arrival of a reply with ``nbytes`` of data, for which ``sent`` bytes travelled.

        The next chunk is at most twice as large as the last one. The next chunk may travel in full even if this one was
        sent as a small difference, so the measured rate is limited to ``_SLACK`` times the rate of the sent bytes.
        """
        measured = max(now - self._last, 1e-6) / max(sent, nbytes / _SLACK, 1)
        self._last = now
        if self._seconds_per_byte is None:
            self._seconds_per_byte = measured
        else:
            self._seconds_per_byte += _SMOOTHING * (measured - self._seconds_per_byte)
        wanted = int(_CHUNK_S / self._seconds_per_byte)
        self.chunk = max(min(wanted, 2 * self.chunk, self._most), min(_FIRST_CHUNK, self._most))

    def waited(self, *, now: float) -> None:
        """Record a reply for which the peer itself had to wait: it does not measure the link."""
        self._last = now

    @property
    def patience(self) -> float:
        """Seconds without any arrival after which the peer counts as stalled."""
        expected = (self._seconds_per_byte or 0.0) * self._window * self.chunk
        return max(self._patience_s, _SLACK * expected)


class Bucket:
    """Limits the sending rate to ``rate`` bytes a second over all callers. None: no limit."""

    def __init__(self, rate: int | None) -> None:
        self._rate = rate
        self._free_at = 0.0

    async def take(self, nbytes: int) -> None:
        """Wait until all earlier bytes and these have had their time at the rate.

        A cancelled caller sends nothing, so its bytes delay no caller that arrives after it.
        """
        if self._rate is not None:
            now, duration = asyncio.get_running_loop().time(), nbytes / self._rate
            self._free_at = max(now, self._free_at) + duration
            try:
                await asyncio.sleep(self._free_at - now)
            except asyncio.CancelledError:
                self._free_at -= duration
                raise


class ChunkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request of ``weights.fetch``. The reply has a frame for each region.

    checked: whether the reply must contain the digest of each frame; base: the packed version to which differences may
    refer, None to allow no differences; wait_s: how long the holder may wait for the first region if it is missing.
    """

    version: int
    regions: tuple[Region, ...]
    checked: bool
    base: int | None = None
    wait_s: float = 0.0


class ChunkReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to ``weights.fetch``: the frames of the first regions, up to one that the holder does not have yet.

    deltas: indices of the frames that are differences from the base; waited: whether the holder had to wait.
    """

    digests: tuple[str, ...]
    deltas: tuple[int, ...] = ()
    waited: bool = False


class _Chunk(NamedTuple):
    """Reply to a request: regions, the bytes of each, the number of bytes sent for each, and the regions left out."""

    regions: Sequence[Region]
    data: Sequence[memoryview]
    sent: Sequence[int]
    rest: Sequence[Region]
    waited: bool


class HostTransport(CallTransport):
    """Weights over TCP, by calls to an ``RpcServer`` of its own.

    chunk_bytes: largest reply; window: replies in flight per pull.
    patience_s: a peer that sends nothing for this time (longer on a link measured to be slow) counts as stalled.
    delta: whether to send and request differences from a version that both sides hold, if these are shorter.
    bandwidth: maximum bytes a second sent to all peers together; options: as in ``CallTransport``.
    Raises ManifestError if the bandwidth is so small that peers would consider this worker stalled.
    """

    def __init__(
        self,
        *,
        chunk_bytes: int = 1 << 20,
        window: int = 4,
        patience_s: float = 5.0,
        delta: bool = True,
        bandwidth: int | None = None,
        **options: Any,
    ) -> None:
        if bandwidth is not None and bandwidth < LEAST_BANDWIDTH:
            what = f"{bandwidth} bytes a second are fewer than {LEAST_BANDWIDTH}"
            raise ManifestError(what, where="bandwidth", hint="Set more: a receiver would consider its source dead")
        super().__init__(**options)
        self._chunk_bytes = chunk_bytes
        self._window = window
        self._patience_s = patience_s
        self._delta = delta
        self._bucket = Bucket(bandwidth)
        self._server.route("weights.fetch", ChunkRequest, self._fetch)

    async def pull(self, pull: Pull, *, sink: Sink) -> None:
        """Pull with ``window`` chunk requests in flight; see ``Transport.pull``."""
        loop = asyncio.get_running_loop()
        pace = Pace(most=self._chunk_bytes, window=self._window, patience_s=self._patience_s, now=loop.time())
        worker, version, left, arrived = pull.source.worker, pull.version, deque(pull.regions), loop.time()
        in_flight: set[asyncio.Task[_Chunk]] = set()
        request = ChunkRequest(
            version=version.packed,
            regions=(),
            checked=pull.checked,
            base=pull.base.packed if pull.base is not None and self._delta and self._read is not None else None,
            wait_s=self._patience_s / _STARVED,
        )
        async with self._client(pull) as client:
            try:
                while left or in_flight:
                    while left and len(in_flight) < self._window:
                        chunk_request = msgspec.structs.replace(request, regions=tuple(_next_chunk(left, pace.chunk)))
                        in_flight.add(loop.create_task(self._ask(client, chunk_request)))
                    patience = pace.patience
                    done, in_flight = await asyncio.wait(
                        in_flight, timeout=patience, return_when=asyncio.FIRST_COMPLETED
                    )
                    if not done:
                        what = f"{worker} sent nothing of {version} for {patience:.3g} s"
                        raise DeadlineExceeded(what, where=pull.source.address)
                    failed = [error for answer in done if (error := answer.exception()) is not None]
                    for chunk in [answer.result() for answer in done if answer.exception() is None]:
                        for region, data, sent in zip(chunk.regions, chunk.data, chunk.sent, strict=True):
                            sink(region, data, sent=sent)
                        left.extendleft(reversed(chunk.rest))
                        if chunk.waited:
                            pace.waited(now=loop.time())
                        else:
                            nbytes = sum(data.nbytes for data in chunk.data)
                            pace.arrived(nbytes, sent=sum(chunk.sent), now=loop.time())
                        arrived = loop.time() if chunk.data else arrived
                    if failed:
                        raise failed[0]
                    if loop.time() - arrived > _STARVED * self._patience_s:
                        what = f"{worker} itself has received nothing of {version} for {loop.time() - arrived:.3g} s"
                        raise DeadlineExceeded(what, where=pull.source.address)
            finally:
                for task in in_flight:
                    task.cancel()
                await asyncio.gather(*in_flight, return_exceptions=True)

    async def _ask(self, client: RpcClient, request: ChunkRequest) -> _Chunk:
        version, regions = Version.unpack(request.version), request.regions
        reply, frames = await client.call_frames("weights.fetch", request, ChunkReply, timeout=_CALL_S)
        regions, rest = regions[: len(frames)], regions[len(frames) :]
        deltas = set(reply.deltas)
        if len(frames) != len(regions) or not deltas <= set(range(len(frames)) if request.base is not None else ()):
            raise ProtocolError(f"{version}: the frames do not match the request", where=client.name)
        data = list(frames)
        if deltas:
            assert self._read is not None
            assert request.base is not None
            base = Version.unpack(request.base)
            held = {at: self._read(base, regions[at].tensor, regions[at].box) for at in deltas}
            try:
                data = await asyncio.to_thread(_restore, regions, data, held)
            except ValueError as error:
                raise ProtocolError(f"{version}: a difference is invalid: {error}", where=client.name) from error
        if [each.nbytes for each in data] != [region.nbytes for region in regions]:
            raise ProtocolError(f"{version}: the frames do not have the requested sizes", where=client.name)
        if request.checked and await asyncio.to_thread(digests_of, data) != reply.digests:
            raise ProtocolError(f"{version}: bytes changed during transfer", where=client.name)
        return _Chunk(regions, data, [frame.nbytes for frame in frames], rest, reply.waited)

    async def _fetch(self, request: ChunkRequest, _frames: Sequence[memoryview]) -> tuple[ChunkReply, list[Buffer]]:
        if (
            not 0 < len(request.regions) <= _MOST_REGIONS
            or sum(region.box.volume for region in request.regions) > _MOST_ELEMENTS
        ):
            what = f"no region, or more than {_MOST_REGIONS} regions or {_MOST_ELEMENTS} elements in one request"
            raise ProtocolError(what, where=self.name)
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(min(max(request.wait_s, 0.0), LONGEST_WAIT_S)):
                await self._until(Version.unpack(request.version), request.regions)
        except TimeoutError:
            return ChunkReply(digests=(), waited=True), []
        waited = loop.time() - started > _NO_WAIT_S
        data = self._available(request)
        digests = await asyncio.to_thread(digests_of, data) if request.checked else ()
        frames: list[Buffer] = list(data)
        deltas = await self._differences(request, data) if request.base is not None and self._delta else {}
        for at, delta in deltas.items():
            frames[at] = delta
        await self._bucket.take(sum(memoryview(frame).nbytes for frame in frames))
        return ChunkReply(digests=digests, deltas=tuple(deltas), waited=waited), frames

    def _available(self, request: ChunkRequest) -> list[memoryview]:
        """Return the bytes of the regions before the first missing one. Raises StaleHandle if the first is missing."""
        assert self._read is not None
        version, data = Version.unpack(request.version), []
        for region in request.regions:
            try:
                data.append(self._read(version, region.tensor, region.box))
            except StaleHandle:
                if not data:
                    raise
                break
        return data

    async def _differences(self, request: ChunkRequest, data: list[memoryview]) -> dict[int, bytes]:
        """Return the differences of regions from their base, by index, if the base is held and they are shorter."""
        assert self._read is not None
        assert request.base is not None
        pairs = list(zip(request.regions, data, strict=False))
        try:
            base = [self._read(Version.unpack(request.base), each.tensor, each.box) for each, _ in pairs]
        except StaleHandle:
            return {}
        itemsizes = [new.nbytes // max(1, each.box.volume) for each, new in pairs]
        return await asyncio.to_thread(_compare, base, data, itemsizes)


def _compare(base: Sequence[memoryview], data: Sequence[memoryview], itemsizes: Sequence[int]) -> dict[int, bytes]:
    """Return the differences that are shorter than the new bytes, by index."""
    deltas = {}
    for at, (old, new, itemsize) in enumerate(zip(base, data, itemsizes, strict=True)):
        if old.nbytes == new.nbytes and (delta := difference(old, new, itemsize=itemsize)) is not None:
            deltas[at] = delta
    return deltas


def _restore(
    regions: Sequence[Region], frames: Sequence[memoryview], held: Mapping[int, memoryview]
) -> list[memoryview]:
    """Return the bytes of regions, with differences applied to ``held``. Raises ValueError for an invalid one."""
    return [
        restored(held[at], frame, itemsize=region.itemsize) if at in held else frame
        for at, (region, frame) in enumerate(zip(regions, frames, strict=True))
    ]


def _next_chunk(left: deque[Region], most: int) -> list[Region]:
    """Remove regions of at most ``most`` bytes together from ``left``, splitting the last; at least one element."""
    chunk: list[Region] = []
    room = most
    while left and room > 0 and len(chunk) < _MOST_REGIONS:
        region = left.popleft()
        if region.nbytes > room:
            if chunk and room < most // 2:
                left.appendleft(region)
                break
            first = next(split(region.box, max(1, room // region.itemsize)))
            left.extendleft(msgspec.structs.replace(region, box=box) for box in subtract(region.box, [first]))
            region = msgspec.structs.replace(region, box=first)
        chunk.append(region)
        room -= region.nbytes
    return chunk
