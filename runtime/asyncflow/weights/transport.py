"""Interface of a transport of weights: serve boxes of versions, and pull boxes from one peer.

A transport may want versions in memory of its own kind, that peers reach by another way than a socket: ``allocate``
gives it. One that has found wrong bytes is told so by ``doubt``, and may go another way from then on.

Invariant: ``pull`` gives every region at most once to the sink, and those it gave stay given when it raises: the caller
asks another peer only for the rest. A peer that is slow is waited for; one that makes no progress is not. What the sink
gets is always the whole bytes of a region, whatever travelled for them. Only trainers, publishers, rollouts and
followers of the job are pulled from.
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
"""Seconds that a holder lets a peer wait at most for what it has not got yet itself."""
_PEERS = ("trainer", "rollout", PUBLISHER, FOLLOWER)

Read = Callable[[Version, str, Box], memoryview]
"""Returns the bytes of a box of a tensor of a version, in C order. Raises StaleHandle where it is not held."""

Until = Callable[[Version, Sequence["Region"]], Awaitable[None]]
"""Waits while a version arrives here and the first of the regions is still to come; returns at once for any other."""


class Sink(Protocol):
    """Taker of the bytes of a region, in C order; they are only valid during the call."""

    def __call__(self, region: Region, data: memoryview, /, *, sent: int | None = None) -> None:
        """Take ``data``; sent: the bytes that travelled for it, None where these were as many."""


async def at_once(version: Version, regions: Sequence[Region]) -> None:
    """Wait for nothing: the ``Until`` of a worker that serves only what it has whole."""


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
    """A peer to pull from: its worker id and the address that its transport gave."""

    worker: str
    address: str


class Pull(NamedTuple):
    """Regions of a version to pull from a source.

    checked: the receiver can check none of these bytes itself, so the source sends the digest of each chunk and the
    transport compares. base: a version of which this worker holds the same regions, so that ``Read`` gives them: a
    source that holds it too may send what differs instead.
    """

    source: Source
    version: Version
    regions: Sequence[Region]
    checked: bool
    base: Version | None = None


class Transport(ABC):
    """Moves weights between host memories. One object serves this worker's versions and pulls from peers.

    allocate: gives the memory that versions are to lie in, from ``start`` on and in any thread; fallbacks: pulls that
    went another way than this transport is meant to go, because that one failed.
    """

    allocate: Allocate = staticmethod(anonymous)
    fallbacks = 0

    @classmethod
    def of(cls, *, device: str, collective: str, **options: Any) -> Transport:
        """Make the transport of a worker. ``open_transport`` says what of."""
        del device, collective
        return cls(**options)

    @classmethod  # noqa: B027 - most transports need nothing
    def check(cls) -> None:
        """Raise ManifestError where this machine lacks what the transport needs; imports no torch."""

    def doubt(self, worker: str) -> None:  # noqa: B027 - most transports have one way only
        """Note that bytes which came from ``worker`` were not those that it had published."""

    @abstractmethod
    async def start(self, read: Read, *, until: Until = at_once) -> str:
        """Serve what ``read`` gives, from the running loop; give the address that peers ``pull`` from.

        A transport that can let a peer wait awaits ``until`` before it reads; another refuses what has not come.
        """

    @abstractmethod
    async def pull(self, pull: Pull, *, sink: Sink) -> None:
        """Pull regions in chunks, which tile them, and give each to ``sink``.

        Raises PeerLost or DeadlineExceeded when the source is gone or makes no progress, StaleHandle when it does not
        hold the version any more, ProtocolError when it sends anything else.
        """

    @abstractmethod
    async def close(self) -> None:
        """Serve no longer; pulls in flight raise PeerLost."""


class CallTransport(Transport):
    """Base of transports that serve calls at an address of their own.

    name: this worker, in logs and errors; bind, advertise, credentials: as in ``RpcServer``.
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
        """Serve what ``read`` gives; return the address."""
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
        """Open a client to the source of a pull, which is closed with the context."""
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
    """Return the class that is registered as ``kind``. Raises ManifestError where there is none."""
    return load_plugin(GROUP, kind, kind=Transport, where="spec.weightSync.transport")


def open_transport(kind: str, /, *, device: str = "cpu", collective: str = "gloo", **options: Any) -> Transport:
    """Make the transport that is registered as ``kind``. Raises ManifestError where there is none.

    device: torch's name of this worker's device; collective: the torch.distributed back end for such devices; options:
    ``name``, ``bind`` and ``credentials`` of what the transport listens with, as in ``RpcServer``.
    """
    return find_transport(kind).of(device=device, collective=collective, **options)
