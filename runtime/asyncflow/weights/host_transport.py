"""Weights over the host network: chunks of versions as frames of calls, a few in flight at a time.

``Pace`` says how much to ask for at once and how long to wait, from the rate so far.

Invariants: at most ``window`` chunks of ``chunk_bytes`` are in flight per pull, whatever the size of the version; the
holder sends from its arena without a copy where a box is contiguous; a call answers only what its caller asked for.
Patience grows with the time that what is in flight should take, so a link that is slow, however slow, is not taken for
a dead peer once a first chunk has come; chunks never exceed ``most`` bytes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from asyncflow.errors import DeadlineExceeded, ProtocolError
from asyncflow.identity import Version
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.server import RpcServer
from asyncflow.rpc.tls import Credentials
from asyncflow.weights.manifest import digest_of
from asyncflow.weights.slices import split, subtract
from asyncflow.weights.transport import Read, Region, Sink, Source, Transport

_FIRST_CHUNK = 64 * 1024
_CHUNK_S = 0.25
_SLACK = 8.0
_SMOOTHING = 0.3

_MOST_REGIONS = 1024
_MOST_ELEMENTS = 64 << 20
_CALL_S = 3600.0


class Pace:
    """The pace of one pull: ``window`` requests in flight of at most ``most`` bytes each, begun at time ``now``.

    patience_s: the least patience, that of a pull of which nothing has come yet.
    """

    def __init__(self, *, most: int, window: int, patience_s: float, now: float) -> None:
        self._most = most
        self._window = window
        self._patience_s = patience_s
        self._last = now
        self._seconds_per_byte: float | None = None
        self.chunk = min(_FIRST_CHUNK, most)

    def arrived(self, nbytes: int, *, now: float) -> None:
        """Note that an answer of ``nbytes`` came; the next chunk is at most twice as large as the last."""
        measured = max(now - self._last, 1e-6) / max(nbytes, 1)
        self._last = now
        if self._seconds_per_byte is None:
            self._seconds_per_byte = measured
        else:
            self._seconds_per_byte += _SMOOTHING * (measured - self._seconds_per_byte)
        wanted = int(_CHUNK_S / self._seconds_per_byte)
        self.chunk = max(min(wanted, 2 * self.chunk, self._most), min(_FIRST_CHUNK, self._most))

    @property
    def patience(self) -> float:
        """Seconds without any arrival after which the peer counts as stalled."""
        expected = (self._seconds_per_byte or 0.0) * self._window * self.chunk
        return max(self._patience_s, _SLACK * expected)


class ChunkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request of ``weights.fetch``; the answer has a frame for each region. checked: and the digest of each."""

    version: int
    regions: tuple[Region, ...]
    checked: bool


class ChunkReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to ``weights.fetch``."""

    digests: tuple[str, ...]


class HostTransport(Transport):
    """Weights over TCP, by calls to an ``RpcServer`` of its own.

    name: this worker, in logs and errors; bind, advertise, credentials: as in ``RpcServer``; chunk_bytes: most bytes of
    one answer; window: answers in flight per pull; patience_s: a peer that sends nothing for so long (longer on a link
    that was measured to be slow) counts as stalled.
    """

    def __init__(
        self,
        *,
        name: str,
        bind: str = "tcp://127.0.0.1:*",
        advertise: str = "",
        credentials: Credentials | None = None,
        chunk_bytes: int = 1 << 20,
        window: int = 4,
        patience_s: float = 5.0,
    ) -> None:
        self._name = name
        self._credentials = credentials
        self._chunk_bytes = chunk_bytes
        self._window = window
        self._patience_s = patience_s
        self._clients: set[RpcClient] = set()
        self._server = RpcServer(name=f"{name} weights", bind=bind, credentials=credentials, advertise=advertise)
        self._server.route("weights.fetch", ChunkRequest, self._fetch)
        self._read: Read | None = None

    async def start(self, read: Read) -> str:
        """Serve what ``read`` gives; give the address."""
        self._read = read
        return await self._server.start()

    async def close(self) -> None:
        """Close the server and every pull."""
        for client in list(self._clients):
            await client.close()
        await self._server.close()

    async def pull(
        self, source: Source, version: Version, regions: Iterable[Region], *, sink: Sink, checked: bool
    ) -> None:
        """Pull with ``window`` chunk requests in flight; see ``Transport.pull``."""
        loop = asyncio.get_running_loop()
        pace = Pace(most=self._chunk_bytes, window=self._window, patience_s=self._patience_s, now=loop.time())
        left = deque(regions)
        client = RpcClient(
            name=f"{self._name} pulls {version}",
            resolve=source.address,
            credentials=self._credentials,
            expects=("trainer", "rollout"),
        )
        self._clients.add(client)
        flying: set[asyncio.Task[tuple[list[Region], list[memoryview]]]] = set()
        try:
            while left or flying:
                while left and len(flying) < self._window:
                    flying.add(loop.create_task(_ask(client, version, _next_chunk(left, pace.chunk), checked)))
                patience = pace.patience
                done, _ = await asyncio.wait(flying, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    what = f"{source.worker} sent nothing of {version} for {patience:.3g} s"
                    raise DeadlineExceeded(what, where=source.address)
                pace.arrived(sum(_deliver(answer.result(), sink) for answer in done), now=loop.time())
                flying -= done
        finally:
            for task in flying:
                task.cancel()
            await asyncio.gather(*flying, return_exceptions=True)
            self._clients.discard(client)
            await client.close()

    async def _fetch(self, request: ChunkRequest, _frames: Sequence[memoryview]) -> tuple[ChunkReply, list[memoryview]]:
        if (
            len(request.regions) > _MOST_REGIONS
            or sum(region.box.volume for region in request.regions) > _MOST_ELEMENTS
        ):
            what = f"more than {_MOST_REGIONS} regions or {_MOST_ELEMENTS} elements at once"
            raise ProtocolError(what, where=self._name)
        assert self._read is not None
        version = Version.unpack(request.version)
        data = [self._read(version, region.tensor, region.box) for region in request.regions]
        digests = await asyncio.to_thread(_digests, data) if request.checked else ()
        return ChunkReply(digests=digests), data


def _deliver(answer: tuple[list[Region], list[memoryview]], sink: Sink) -> int:
    """Return the regions of an answer to ``sink``; return their bytes."""
    for region, frame in zip(*answer, strict=True):
        sink(region, frame)
    return sum(frame.nbytes for frame in answer[1])


def _digests(frames: Sequence[memoryview]) -> tuple[str, ...]:
    return tuple(digest_of(np.frombuffer(frame, np.uint8)) for frame in frames)


def _next_chunk(left: deque[Region], most: int) -> list[Region]:
    """Take regions of at most ``most`` bytes together off ``left``, cutting the last; at least one element."""
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


async def _ask(
    client: RpcClient, version: Version, regions: list[Region], checked: bool
) -> tuple[list[Region], list[memoryview]]:
    request = ChunkRequest(version=version.packed, regions=tuple(regions), checked=checked)
    reply, frames = await client.call_frames("weights.fetch", request, ChunkReply, timeout=_CALL_S)
    if [frame.nbytes for frame in frames] != [region.nbytes for region in regions]:
        raise ProtocolError(f"{version}: the frames are not of the sizes asked for", where=client.name)
    if checked and await asyncio.to_thread(_digests, frames) != reply.digests:
        raise ProtocolError(f"{version}: bytes changed on the way", where=client.name)
    return regions, frames
