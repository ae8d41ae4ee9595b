"""Fast transports: regions are asked for by calls over TLS, and their bytes come by a faster way, which knows no keys.

``FastTransport`` is what they have in common, a pull with a few chunks on their way; a subclass says with its ``Line``
how the bytes of one chunk come. ``WithHost`` puts the host network behind one: what the fast way does not bring, in
time and right, is pulled over the other.

Invariants: who asks is known by its certificate, and a digest that a peer sends comes by a call, never by the fast way;
every chunk has a deadline, and a holder that waits for a region itself says so before; a pull that failed leaves
nothing that goes on for longer than that; a version is never lost because a fast way is broken, and each pull that had
to leave it is counted.
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
"""Seconds that a peer has to hear that a pull is over; it finds out by itself where it does not."""
SMALL = 128 << 10
"""Bytes of a pull up to which it goes over the host network."""
MOST_REGIONS = 256
"""Regions of one chunk: Mooncake has room for some 2,000 on their way to one peer, and stops for good beyond."""
_MOST_BYTES = 64 << 20
_WINDOW = 2
_DOUBT_S = 60.0
_BESIDE = " "


class Chunk(NamedTuple):
    """Bytes of the regions of one chunk, in their order, and their digests by the source, where the pull is checked.

    lease: by which the line knows it, 0 where it need not.
    """

    frames: Sequence[memoryview]
    digests: Sequence[str]
    lease: int = 0


class Line(ABC):
    """The way that the bytes of one pull come from its source."""

    @abstractmethod
    async def open(self) -> None:
        """Reach the source."""

    @abstractmethod
    async def bring(self, regions: Sequence[Region]) -> Chunk:
        """Bring the bytes of regions; they are used until ``release``."""

    def release(self, chunk: Chunk) -> None:  # noqa: B027 - only memory that is lent has to be given back
        """Take back what ``bring`` gave."""

    @abstractmethod
    async def end(self) -> None:
        """Let go of the source, which may be gone. Raises nothing."""


class FastTransport(CallTransport):
    """Base of fast transports.

    chunk_bytes: most bytes that travel together; deadline_s: seconds within which each chunk has to come; options: as
    in ``CallTransport``. sends: whether bytes travel.
    """

    sends = True

    def __init__(self, *, chunk_bytes: int = CHUNK_BYTES, deadline_s: float = DEADLINE_S, **options: Any) -> None:
        super().__init__(**options)
        self.chunk_bytes = chunk_bytes
        self.deadline_s = deadline_s

    @classmethod
    def of(cls, *, device: str, collective: str, **options: Any) -> Transport:
        """Make the transport with the host network behind it, which has all the ``options``."""
        common = {name: options[name] for name in ("name", "bind", "advertise", "credentials") if name in options}
        return WithHost(cls(**cls.device_options(device, collective), **common), HostTransport(**options))

    @classmethod
    def device_options(cls, device: str, collective: str) -> dict[str, Any]:
        """Return the further options that follow from what ``open_transport`` says of the device."""
        del device, collective
        return {}

    async def start(self, read: Read, *, until: Until = at_once) -> str:
        """Get the fast way ready, then serve what ``read`` gives; return the address of the calls."""
        await self.prepare()
        return await super().start(read, until=until)

    async def pull(self, pull: Pull, *, sink: Sink) -> None:
        """Pull with a few chunks on their way, all bytes of them; see ``Transport.pull``."""
        chunks = chunks_of(pull.regions, most=self.chunk_bytes)
        flying: deque[tuple[list[Region], asyncio.Task[Chunk]]] = deque()
        async with self._client(pull) as client:
            line = self.line(client, pull.version, checked=pull.checked)
            try:
                async with self._deadline(pull):
                    await line.open()
                while True:
                    while len(flying) < _WINDOW and (asked := next(chunks, None)) is not None:
                        flying.append((asked, asyncio.create_task(line.bring(asked))))
                    if not flying:
                        return
                    asked, bringing = flying[0]
                    async with self._deadline(pull):
                        chunk = await bringing
                    if pull.checked and await asyncio.to_thread(digests_of, chunk.frames) != tuple(chunk.digests):
                        raise ProtocolError(f"{pull.version}: bytes changed on the way", where=pull.source.address)
                    for region, frame in zip(asked, chunk.frames, strict=True):
                        sink(region, frame, sent=frame.nbytes if self.sends else 0)
                    line.release(chunk)
                    flying.popleft()
            finally:
                for _, bringing in flying:
                    bringing.cancel()
                await asyncio.gather(*(bringing for _, bringing in flying), return_exceptions=True)
                await line.end()

    @abstractmethod
    async def prepare(self) -> None:
        """Get the fast way ready. Raises ManifestError where what it needs is not installed."""

    @abstractmethod
    def line(self, client: RpcClient, version: Version, *, checked: bool) -> Line:
        """Return the line of a pull, whose calls go by ``client``."""

    async def read(self, packed: int, regions: Sequence[Region], *, wait_s: float) -> list[memoryview]:
        """Return the bytes of the regions of a packed version, when they are here.

        Raises StaleHandle where they are not held, or have not come within ``wait_s`` seconds; ProtocolError.
        """
        sizes = [region.nbytes for region in regions]
        if len(sizes) > MOST_REGIONS or min(sizes, default=1) < 1 or sum(sizes) > _MOST_BYTES:
            what = f"at once up to {MOST_REGIONS} regions can be had, none empty, of {_MOST_BYTES} bytes together"
            raise ProtocolError(what, where=self.name)
        assert self._read is not None
        version = Version.unpack(packed)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(max(wait_s, 0.0), LONGEST_WAIT_S)):
                for region in regions:
                    await self._until(version, [region])
        data = [self._read(version, region.tensor, region.box) for region in regions]
        if [part.nbytes for part in data] != sizes:
            raise ProtocolError(f"{version}: elements of another size are asked for", where=self.name)
        return data

    @property
    def wait_s(self) -> float:
        """Seconds that a holder may wait for what it has not got yet itself."""
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
    """Cut regions into chunks of at most ``most`` bytes, or one element, and ``MOST_REGIONS`` regions."""
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
    """A fast transport, and the host network for what that does not bring.

    A source with which the fast way failed, or whose bytes were wrong, is asked over the host network for a minute. So
    is anyone for up to ``SMALL`` bytes, which a fast way takes longer to begin than to bring.
    """

    def __init__(self, fast: FastTransport, host: HostTransport) -> None:
        self.fallbacks = 0
        self.allocate = fast.allocate
        self._fast = fast
        self._host = host
        self._doubted: dict[str, float] = {}

    async def start(self, read: Read, *, until: Until = at_once) -> str:
        """Serve what ``read`` gives in both ways; return both addresses, or the one where the fast way is broken.

        Raises ManifestError where the fast way lacks what it needs.
        """
        address = await self._host.start(read, until=until)
        try:
            return address + _BESIDE + await self._fast.start(read, until=until)
        except ManifestError:
            raise
        except (AsyncFlowError, OSError) as error:
            log.warning("weights: served over the host network only: %s", error)
            self.allocate = self._host.allocate
            return address

    async def pull(self, pull: Pull, *, sink: Sink) -> None:
        """Pull by the fast way, and over the host network what is left when that fails."""
        host, _, fast = pull.source.address.partition(_BESIDE)
        if sum(region.nbytes for region in pull.regions) > SMALL:
            if fast and self._doubted.get(pull.source.worker, 0.0) <= clock.now():
                left = await self._fast_first(_at(fast, pull), sink=sink)
                if not left:
                    return
                pull = pull._replace(regions=left)
            self.fallbacks += 1
        await self._host.pull(_at(host, pull), sink=sink)

    async def _fast_first(self, pull: Pull, *, sink: Sink) -> list[Region]:
        """Pull by the fast way; return what it has not brought. Raises StaleHandle."""
        given: dict[str, list[Box]] = defaultdict(list)

        def taken(region: Region, data: memoryview, /, *, sent: int | None = None) -> None:
            sink(region, data, sent=sent)
            given[region.tensor].append(region.box)

        try:
            await self._fast.pull(pull, sink=taken)
        except StaleHandle:
            raise
        except (AsyncFlowError, OSError) as error:
            self.doubt(pull.source.worker)
            what = f"{pull.version} from {pull.source.worker}"
            log.warning("weights: %s goes on over the host network: %s", what, error)
        else:
            return []
        return [
            msgspec.structs.replace(region, box=box)
            for region in pull.regions
            for box in subtract(region.box, given[region.tensor])
        ]

    def doubt(self, worker: str) -> None:
        """Ask ``worker`` over the host network for a while."""
        now = clock.now()
        self._doubted = {name: until for name, until in self._doubted.items() if until > now}
        self._doubted[worker] = now + _DOUBT_S

    async def close(self) -> None:
        """Serve no longer, in neither way; pulls in flight raise PeerLost."""
        await self._fast.close()
        await self._host.close()


def _at(address: str, pull: Pull) -> Pull:
    """Return a pull from the same source at one of its addresses."""
    return pull._replace(source=msgspec.structs.replace(pull.source, address=address))
