"""Interface of a transport of weights: serve boxes of versions, and pull boxes from one peer.

A transport may need versions in its own kind of memory, which peers reach without a socket; ``allocate`` returns such
memory. The receiver reports wrong bytes by ``doubt``, after which the transport may use another path.

Invariants: ``pull`` passes every region at most once to the sink. If it raises, the regions already passed remain
valid, and the caller requests only the rest from another peer. A slow peer is waited for; a peer without progress is
not. The sink always receives all bytes of a region, even if fewer travelled. Only trainers, publishers, rollouts and
followers of the job are accepted as sources.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from asyncflow.api.names import FOLLOWER, PUBLISHER
from asyncflow.identity import Version
from asyncflow.plugins import load_plugin
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.server import RpcServer
from asyncflow.rpc.tls import Credentials
from asyncflow.weights.manifest import digest_of
from asyncflow.weights.slices import Allocate, Box, anonymous

GROUP = "asyncflow.transports"
"""Entry-point group under which transports are registered."""

LONGEST_WAIT_S = 10.0
"""Longest time, in seconds, that a holder lets a peer wait for data that it does not have yet."""
_PEERS = ("trainer", "rollout", PUBLISHER, FOLLOWER)

Read = Callable[[Version, str, Box], memoryview]
"""Returns the bytes of a box of a tensor of a version, in C order. Raises StaleHandle if it is not held."""

Until = Callable[[Version, Sequence["Region"]], Awaitable[None]]
"""Waits while a version is arriving and the first of the regions is missing; returns immediately for any other."""


class Sink(Protocol):
    """Receiver of the bytes of a region, in C order. The bytes are valid only during the call."""

    def __call__(self, region: Region, data: memoryview, /, *, sent: int | None = None) -> None:
        """Accept ``data``. sent: number of bytes that travelled for it, None if equal to its size."""


async def at_once(version: Version, regions: Sequence[Region]) -> None:
    """Return immediately: the ``Until`` of a worker that serves only complete versions."""


def digests_of(frames: Iterable[memoryview]) -> tuple[str, ...]:
    """Return the digest of each frame's bytes."""
    return tuple(digest_of(np.frombuffer(frame, np.uint8)) for frame in frames)


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """A box of a tensor whose elements have ``itemsize`` bytes."""

    tensor: str
    box: Box
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of the region."""
        return self.box.volume * self.itemsize


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A peer to pull from: its worker id and the address that its transport returned from ``start``."""

    worker: str
    address: str


class Pull(NamedTuple):
    """Regions of a version to pull from a source.

    checked: the receiver has no published digest for these bytes, so the source sends the digest of each chunk and the
    transport compares it. base: a version of which this worker holds the same regions, readable by ``Read``; a source
    that also holds it may send differences instead.
    """

    source: Source
    version: Version
    regions: Sequence[Region]
    checked: bool
    base: Version | None = None


class Transport(ABC):
    """Moves weights between the host memories of workers. One object serves a worker's versions and pulls from peers.

    allocate: returns the memory for versions; may be called after ``start``, in any thread. fallbacks: number of pulls
    that used another path than the intended one, because the intended one failed.
    """

    allocate: Allocate = staticmethod(anonymous)
    fallbacks = 0

    @classmethod
    def of(cls, *, device: str, collective: str, **options: Any) -> Transport:
        """Create the transport of a worker. For the parameters see ``open_transport``."""
        del device, collective
        return cls(**options)

    @classmethod  # noqa: B027 - most transports need nothing
    def check(cls) -> None:
        """Raise ManifestError if this machine lacks a requirement of the transport. Does not import torch."""

    def doubt(self, worker: str) -> None:  # noqa: B027 - most transports have one path only
        """Record that bytes received from ``worker`` did not match their published digest."""

    @abstractmethod
    async def start(self, read: Read, *, until: Until = at_once) -> str:
        """Serve the data that ``read`` returns, in the running event loop; return the address for ``pull``.

        A transport that can let a peer wait awaits ``until`` before it reads. Other transports refuse missing data.
        """

    @abstractmethod
    async def pull(self, pull: Pull, *, sink: Sink) -> None:
        """Pull regions in chunks that tile them, and pass each chunk to ``sink``.

        Raises PeerLost if the source has ended, DeadlineExceeded if it makes no progress, StaleHandle if it does not
        hold the data, ProtocolError if it sends anything else.
        """

    @abstractmethod
    async def close(self) -> None:
        """Stop serving; pulls in progress raise PeerLost."""


class CallTransport(Transport):
    """Base of transports that serve calls at an address of their own.

    name: the name of this worker in logs and errors; bind, advertise, credentials: as in ``RpcServer``.
    """

    def __init__(
        self,
        *,
        name: str,
        bind: str = "tcp://127.0.0.1:*",
        advertise: str = "",
        credentials: Credentials | None = None,
    ) -> None:
        self.name = name
        self._credentials = credentials
        self._clients: set[RpcClient] = set()
        self._server = RpcServer(name=f"{name} weights", bind=bind, credentials=credentials, advertise=advertise)
        self._read: Read | None = None
        self._until: Until = at_once

    async def start(self, read: Read, *, until: Until = at_once) -> str:
        """Serve the data that ``read`` returns; return the address."""
        self._read = read
        self._until = until
        return await self._server.start()

    async def close(self) -> None:
        """Close the server and every pull."""
        for client in list(self._clients):
            await client.close()
        await self._server.close()

    @contextlib.asynccontextmanager
    async def _client(self, pull: Pull) -> AsyncIterator[RpcClient]:
        """Open a client to the source of a pull; it is closed at the end of the context."""
        client = RpcClient(
            name=f"{self.name} pulls {pull.version}",
            resolve=pull.source.address,
            credentials=self._credentials,
            expects=_PEERS,
        )
        self._clients.add(client)
        try:
            yield client
        finally:
            self._clients.discard(client)
            await client.close()


def find_transport(kind: str) -> type[Transport]:
    """Return the class registered as ``kind``. Raises ManifestError if there is none."""
    return load_plugin(GROUP, kind, kind=Transport, where="spec.weightSync.transport")


def open_transport(kind: str, /, *, device: str = "cpu", collective: str = "gloo", **options: Any) -> Transport:
    """Create the transport registered as ``kind``. Raises ManifestError if there is none.

    device: torch's name of this worker's device; collective: the torch.distributed backend for this device; options:
    ``name``, ``bind`` and ``credentials`` of the transport's server, as in ``RpcServer``.
    """
    return find_transport(kind).of(device=device, collective=collective, **options)
