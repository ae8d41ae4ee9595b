"""Base of transports by which peers read weights in place, in memory that this process shares or has registered.

A peer requests the location of regions and receives a *lease*: the memory stays unchanged until the peer reports that
it has read it, at most for ``LEASE_S`` seconds. Regions whose bytes are not contiguous (columns of a matrix) are copied
into contiguous memory for the peer.

Invariants: all memory is created by ``Pool``, which keeps it until the transport is closed and reuses it for newer
versions. A peer that reads too late therefore reads other bytes, which digests detect, never unmapped memory. Only a
peer whose certificate belongs to the job learns the location of memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from mmap import mmap
from typing import Any, NamedTuple

import msgspec
import numpy as np

from asyncflow.errors import AsyncFlowError, ProtocolError
from asyncflow.identity import Version
from asyncflow.rpc.client import RpcClient
from asyncflow.weights.fast_transport import END_S, Chunk, FastTransport, Line
from asyncflow.weights.transport import Region, digests_of

LEASE_S = 60.0
_LEAST = 1 << 20
_WASTE = 2
_CALL_S = 600.0


class Block(NamedTuple):
    """Memory of a pool. address: its start in this process, its name for peers; file: its file descriptor, or -1."""

    mapping: mmap
    address: int
    nbytes: int
    file: int = -1


class Pool:
    """Memory blocks that are reused when no view of them is left. make: creates a block, in any thread."""

    def __init__(self, make: Callable[[int], Block]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._free: list[Block] = []
        self._returned: deque[Block] = deque()
        self.blocks: dict[int, Block] = {}

    def take(self, nbytes: int) -> memoryview:
        """Return ``nbytes`` of memory with arbitrary content. It returns to the pool when its last view is deleted."""
        with self._lock:
            while self._returned:
                self._free.append(self._returned.popleft())
            fitting = [block for block in self._free if nbytes <= block.nbytes <= max(_LEAST, _WASTE * nbytes)]
            if fitting:
                block = min(fitting, key=lambda block: block.nbytes)
                self._free.remove(block)
            else:
                block = self._make(max(nbytes, 1))
                self.blocks[block.address] = block
        array = np.frombuffer(block.mapping, np.uint8, nbytes)
        weakref.finalize(array, self._returned.append, block).atexit = False
        return array.data

    def find(self, data: memoryview) -> Pointer | None:
        """Return the location of bytes, or None if they are not in this pool."""
        address = address_of(data)
        for block in list(self.blocks.values()):
            if block.address <= address and address + data.nbytes <= block.address + block.nbytes:
                return Pointer(block.address, address - block.address)
        return None


def address_of(data: memoryview) -> int:
    """Return the address in this process of the first byte of ``data``, which has at least one."""
    return int(np.frombuffer(data, np.uint8).ctypes.data)


class Pointer(msgspec.Struct, frozen=True, array_like=True):
    """Location of bytes: the block that starts at address ``block`` of its process, and the offset in it."""

    block: int
    offset: int


class PlaceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request of ``weights.place``: the location of regions of a packed version.

    checked: whether the reply must contain the digest of each region; wait_s: how long the holder may wait for data
    that it does not have yet; done: leases that are no longer needed.
    """

    version: int
    regions: tuple[Region, ...]
    checked: bool
    wait_s: float = 0.0
    done: tuple[int, ...] = ()


class Pointers(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to ``weights.place``. door: address at which the memory of that process can be reached."""

    lease: int
    door: str
    pointers: tuple[Pointer, ...]
    digests: tuple[str, ...]


class _Lease(NamedTuple):
    """A lease. views: keep the memory allocated; expiry: timer that ends the lease."""

    views: list[memoryview]
    expiry: asyncio.TimerHandle


class PlacedTransport(FastTransport):
    """Base of transports by which peers read memory in place. door: see ``Pointers``; set by ``prepare``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.door = ""
        self.pool = Pool(self.make)
        self.allocate = self.pool.take
        self._leases: dict[int, _Lease] = {}
        self._numbers = itertools.count(1)
        self._server.route("weights.place", PlaceRequest, self._place)

    async def close(self) -> None:
        """Stop serving, and end every lease."""
        await super().close()
        for lease in list(self._leases):
            self._end(lease)

    @abstractmethod
    def make(self, nbytes: int) -> Block:
        """Create at least ``nbytes`` of memory for peers to reach; in any thread. Raises AsyncFlowError or OSError."""

    @abstractmethod
    async def reach(
        self, door: str, pointers: Sequence[Pointer], sizes: Sequence[int], line: PlacedLine
    ) -> list[memoryview]:
        """Return the bytes at the pointers of a peer with that door: copies or views. Raises PeerLost."""

    def line(self, client: RpcClient, version: Version, *, checked: bool) -> PlacedLine:
        """Return the line of a pull."""
        return PlacedLine(self, client, version, checked=checked)

    async def _place(self, request: PlaceRequest, _frames: Sequence[memoryview]) -> Pointers:
        for lease in request.done:
            self._end(lease)
        data = await self.read(request.version, request.regions, wait_s=request.wait_s)
        pointers, views, digests = await asyncio.to_thread(self._located, data, request.checked)
        lease = next(self._numbers)
        if views:
            loop = asyncio.get_running_loop()
            self._leases[lease] = _Lease(views, loop.call_later(LEASE_S, self._end, lease))
        return Pointers(lease=lease, door=self.door, pointers=pointers, digests=digests)

    def _located(
        self, data: list[memoryview], checked: bool
    ) -> tuple[tuple[Pointer, ...], list[memoryview], tuple[str, ...]]:
        """Return the pool locations of data, views that keep it, and digests; data outside the pool is copied in."""
        found = [self.pool.find(part) for part in data]
        loose = [part for part, pointer in zip(data, found, strict=True) if pointer is None]
        views = [part for part, pointer in zip(data, found, strict=True) if pointer is not None]
        if loose:
            size = sum(part.nbytes for part in loose)
            packed = self.pool.take(1 << max(size - 1, _LEAST - 1).bit_length())
            views.append(packed)
            start = self.pool.find(packed)
            assert start is not None
            np.concatenate([np.frombuffer(part, np.uint8) for part in loose], out=np.frombuffer(packed, np.uint8, size))
            starts = itertools.accumulate((part.nbytes for part in loose), initial=start.offset)
            found = [Pointer(start.block, next(starts)) if pointer is None else pointer for pointer in found]
        return tuple(pointer for pointer in found if pointer is not None), views, digests_of(data) if checked else ()

    def _end(self, number: int) -> None:
        lease = self._leases.pop(number, None)
        if lease is not None:
            lease.expiry.cancel()


class PlacedLine(Line):
    """Reads regions at the locations that the source returns. seen: memory that ``reach`` keeps for the pull."""

    def __init__(self, transport: PlacedTransport, client: RpcClient, version: Version, *, checked: bool) -> None:
        self.seen: dict[int, memoryview] = {}
        self._transport = transport
        self._client = client
        self._version = version
        self._checked = checked
        self._leases: set[int] = set()
        self._ended: list[int] = []

    async def open(self) -> None:
        """Do nothing: the first call connects to the source."""

    async def bring(self, regions: Sequence[Region]) -> Chunk:
        """Request the location of regions, and read them there."""
        found = await self._ask(regions, timeout=_CALL_S)
        self._leases.add(found.lease)
        if len(found.pointers) != len(regions):
            raise ProtocolError(f"{self._version}: the reply does not match the request", where=self._client.name)
        sizes = [region.nbytes for region in regions]
        frames = await self._transport.reach(found.door, found.pointers, sizes, self)
        return Chunk(frames, found.digests, found.lease)

    def release(self, chunk: Chunk) -> None:
        """End the lease of a chunk with the next call."""
        self._leases.discard(chunk.lease)
        self._ended.append(chunk.lease)

    async def end(self) -> None:
        """End the remaining leases."""
        self.seen.clear()
        self._ended += self._leases
        if self._ended:
            with contextlib.suppress(AsyncFlowError):
                await self._ask((), timeout=END_S)

    async def _ask(self, regions: Sequence[Region], *, timeout: float) -> Pointers:
        done, self._ended = self._ended, []
        request = PlaceRequest(
            version=self._version.packed,
            regions=tuple(regions),
            checked=self._checked,
            wait_s=self._transport.wait_s,
            done=tuple(done),
        )
        return await self._client.call("weights.place", request, Pointers, timeout=timeout)
