"""Fast transports: regions are requested by calls over TLS; their bytes take a faster path without encryption.

``FastTransport`` is the common part: a pull with a few chunks in flight. A subclass provides a ``Line``, which
transfers the bytes of one chunk. ``WithHost`` adds the host network as a fallback: regions that the fast path does not
deliver correctly and in time are pulled over the host network.

Invariants: the receiver is authenticated by its certificate, and digests travel by calls, never by the fast path. Every
chunk has a deadline, and a holder that itself waits for a region replies before that deadline. A failed pull leaves no
operation that runs longer than the deadline. A failure of the fast path never loses a version, and every pull that had
to leave the fast path is counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from asyncflow import clock
from asyncflow.errors import AsyncFlowError, DeadlineExceeded, ManifestError, ProtocolError, StaleHandle
from asyncflow.identity import Version
from asyncflow.rpc.client import RpcClient
from asyncflow.weights.host_transport import HostTransport
from asyncflow.weights.slices import Box, split, subtract
from asyncflow.weights.transport import (
    LONGEST_WAIT_S,
    CallTransport,
    Pull,
    Read,
    Region,
    Sink,
    Transport,
    Until,
    at_once,
    digests_of,
)

log = logging.getLogger(__name__)

CHUNK_BYTES = 8 << 20
DEADLINE_S = 10.0
END_S = 1.0
"""Timeout in seconds for reporting the end of a pull to the peer; without the report, the peer detects it itself."""
SMALL = 128 << 10
"""Pulls of at most this many bytes use the host network."""
MOST_REGIONS = 256
"""Maximum number of regions of one chunk. Mooncake stops permanently with more than about 2,000 to one peer."""
_MOST_BYTES = 64 << 20
_WINDOW = 2
_DOUBT_S = 60.0
_SEPARATOR = " "


class Chunk(NamedTuple):
    """Bytes of the regions of one chunk, in order, and their digests from the source if the pull is checked.

    lease: number that identifies the chunk for ``Line.release``, 0 if it needs no release.
    """

    frames: Sequence[memoryview]
    digests: Sequence[str]
    lease: int = 0


class Line(ABC):
    """The path of the bytes of one pull from its source."""

    @abstractmethod
    async def open(self) -> None:
        """Connect to the source."""

    @abstractmethod
    async def bring(self, regions: Sequence[Region]) -> Chunk:
        """Transfer the bytes of regions. They stay valid until ``release``."""

    def release(self, chunk: Chunk) -> None:  # noqa: B027 - only leased memory has to be released
        """Release the memory that ``bring`` returned."""

    @abstractmethod
    async def end(self) -> None:
        """Disconnect from the source, which may have ended. Raises nothing."""


class FastTransport(CallTransport):
    """Base of fast transports.

    chunk_bytes: largest chunk; deadline_s: seconds within which each chunk must arrive; options: as in
    ``CallTransport``; sends: whether bytes travel.
    """

    sends = True

    def __init__(self, *, chunk_bytes: int = CHUNK_BYTES, deadline_s: float = DEADLINE_S, **options: Any) -> None:
        super().__init__(**options)
        self.chunk_bytes = chunk_bytes
        self.deadline_s = deadline_s

    @classmethod
    def of(cls, *, device: str, collective: str, **options: Any) -> Transport:
        """Create the transport with the host network as its fallback, which gets all ``options``."""
        common = {name: options[name] for name in ("name", "bind", "advertise", "credentials") if name in options}
        return WithHost(cls(**cls.device_options(device, collective), **common), HostTransport(**options))

    @classmethod
    def device_options(cls, device: str, collective: str) -> dict[str, Any]:
        """Return the further constructor options that depend on the device."""
        del device, collective
        return {}

    async def start(self, read: Read, *, until: Until = at_once) -> str:
        """Prepare the fast path, then serve the data that ``read`` returns; return the address of the calls."""
        await self.prepare()
        return await super().start(read, until=until)

    async def pull(self, pull: Pull, *, sink: Sink) -> None:
        """Pull all bytes with a few chunks in flight; see ``Transport.pull``."""
        chunks = chunks_of(pull.regions, most=self.chunk_bytes)
        in_flight: deque[tuple[list[Region], asyncio.Task[Chunk]]] = deque()
        async with self._client(pull) as client:
            line = self.line(client, pull.version, checked=pull.checked)
            try:
                async with self._deadline(pull):
                    await line.open()
                while True:
                    while len(in_flight) < _WINDOW and (regions := next(chunks, None)) is not None:
                        in_flight.append((regions, asyncio.create_task(line.bring(regions))))
                    if not in_flight:
                        return
                    regions, bringing = in_flight[0]
                    async with self._deadline(pull):
                        chunk = await bringing
                    if pull.checked and await asyncio.to_thread(digests_of, chunk.frames) != tuple(chunk.digests):
                        raise ProtocolError(f"{pull.version}: bytes changed during transfer", where=pull.source.address)
                    for region, frame in zip(regions, chunk.frames, strict=True):
                        sink(region, frame, sent=frame.nbytes if self.sends else 0)
                    line.release(chunk)
                    in_flight.popleft()
            finally:
                for _, bringing in in_flight:
                    bringing.cancel()
                await asyncio.gather(*(bringing for _, bringing in in_flight), return_exceptions=True)
                await line.end()

    @abstractmethod
    async def prepare(self) -> None:
        """Prepare the fast path. Raises ManifestError if a requirement is not installed."""

    @abstractmethod
    def line(self, client: RpcClient, version: Version, *, checked: bool) -> Line:
        """Return the line of a pull, whose calls use ``client``."""

    async def read(self, packed: int, regions: Sequence[Region], *, wait_s: float) -> list[memoryview]:
        """Return the bytes of the regions of a packed version, once they have arrived here.

        Raises StaleHandle if they are not held or do not arrive within ``wait_s`` seconds; ProtocolError for an invalid
        request.
        """
        sizes = [region.nbytes for region in regions]
        if len(sizes) > MOST_REGIONS or min(sizes, default=1) < 1 or sum(sizes) > _MOST_BYTES:
            what = f"a request may have up to {MOST_REGIONS} regions, none empty, of {_MOST_BYTES} bytes together"
            raise ProtocolError(what, where=self.name)
        assert self._read is not None
        version = Version.unpack(packed)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(max(wait_s, 0.0), LONGEST_WAIT_S)):
                for region in regions:
                    await self._until(version, [region])
        data = [self._read(version, region.tensor, region.box) for region in regions]
        if [part.nbytes for part in data] != sizes:
            raise ProtocolError(f"{version}: the request has another element size", where=self.name)
        return data

    @property
    def wait_s(self) -> float:
        """Seconds that a holder may wait for data that it does not have yet."""
        return self.deadline_s / 2

    @contextlib.asynccontextmanager
    async def _deadline(self, pull: Pull) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self.deadline_s):
                yield
        except TimeoutError:
            what = f"{pull.source.worker} sent nothing of {pull.version} for {self.deadline_s:g} s"
            raise DeadlineExceeded(what, where=pull.source.address) from None


def chunks_of(regions: Iterable[Region], *, most: int) -> Iterator[list[Region]]:
    """Split regions into chunks of at most ``most`` bytes (but at least one element) and ``MOST_REGIONS`` regions."""
    chunk: list[Region] = []
    room = most
    for region in regions:
        for box in split(region.box, max(1, most // region.itemsize)):
            part = msgspec.structs.replace(region, box=box)
            if chunk and (part.nbytes > room or len(chunk) == MOST_REGIONS):
                yield chunk
                chunk, room = [], most
            chunk.append(part)
            room -= part.nbytes
    if chunk:
        yield chunk


class WithHost(Transport):
    """A fast transport with the host network as its fallback.

    After a failure of the fast path, or wrong bytes, a source is pulled from over the host network for a minute. Pulls
    of at most ``SMALL`` bytes always use the host network, because setting up a fast path takes longer than they do.
    """

    def __init__(self, fast: FastTransport, host: HostTransport) -> None:
        self.fallbacks = 0
        self.allocate = fast.allocate
        self._fast = fast
        self._host = host
        self._doubted: dict[str, float] = {}

    async def start(self, read: Read, *, until: Until = at_once) -> str:
        """Serve the data that ``read`` returns over both paths; return both addresses, or one if the fast path failed.

        Raises ManifestError if a requirement of the fast path is missing.
        """
        address = await self._host.start(read, until=until)
        try:
            return address + _SEPARATOR + await self._fast.start(read, until=until)
        except ManifestError:
            raise
        except (AsyncFlowError, OSError) as error:
            log.warning("weights: served over the host network only: %s", error)
            self.allocate = self._host.allocate
            return address

    async def pull(self, pull: Pull, *, sink: Sink) -> None:
        """Pull by the fast path, and pull the rest over the host network if that fails."""
        host, _, fast = pull.source.address.partition(_SEPARATOR)
        if sum(region.nbytes for region in pull.regions) > SMALL:
            if fast and self._doubted.get(pull.source.worker, 0.0) <= clock.now():
                left = await self._fast_first(_at(fast, pull), sink=sink)
                if not left:
                    return
                pull = pull._replace(regions=left)
            self.fallbacks += 1
        await self._host.pull(_at(host, pull), sink=sink)

    async def _fast_first(self, pull: Pull, *, sink: Sink) -> list[Region]:
        """Pull by the fast path; return the regions that it did not deliver. Raises StaleHandle."""
        delivered: dict[str, list[Box]] = defaultdict(list)

        def counting_sink(region: Region, data: memoryview, /, *, sent: int | None = None) -> None:
            sink(region, data, sent=sent)
            delivered[region.tensor].append(region.box)

        try:
            await self._fast.pull(pull, sink=counting_sink)
        except StaleHandle:
            raise
        except (AsyncFlowError, OSError) as error:
            self.doubt(pull.source.worker)
            what = f"{pull.version} from {pull.source.worker}"
            log.warning("weights: %s continues over the host network: %s", what, error)
        else:
            return []
        return [
            msgspec.structs.replace(region, box=box)
            for region in pull.regions
            for box in subtract(region.box, delivered[region.tensor])
        ]

    def doubt(self, worker: str) -> None:
        """Pull from ``worker`` over the host network for ``_DOUBT_S`` seconds."""
        now = clock.now()
        self._doubted = {name: until for name, until in self._doubted.items() if until > now}
        self._doubted[worker] = now + _DOUBT_S

    async def close(self) -> None:
        """Stop serving over both paths; pulls in progress raise PeerLost."""
        await self._fast.close()
        await self._host.close()


def _at(address: str, pull: Pull) -> Pull:
    """Return the same pull with another address of its source."""
    return pull._replace(source=msgspec.structs.replace(pull.source, address=address))
