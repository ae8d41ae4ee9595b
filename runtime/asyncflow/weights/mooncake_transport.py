"""Weights by Mooncake's Transfer Engine: a peer reads registered memory one-sided, over TCP, RDMA or Ascend links.

The environment configures it, by Mooncake's own variables: ``MOONCAKE_PROTOCOL`` (``tcp`` by default; ``rdma``,
``ascend``) and ``MOONCAKE_DEVICE`` (its network devices, all by default). Known limitations of the library: a failed
read returns only -1; too many regions in flight to one peer make every following read return -1; for a hanging peer the
library itself waits, 5 s without progress over TCP; its ports listen on all interfaces and are not authenticated.

Invariants: a read goes into memory of the pool, which is reused only after the library call has returned. No call of
the library runs on the event loop. Memory that cannot be registered still holds versions, which then travel over the
host network.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

from asyncflow.errors import AsyncFlowError, PeerLost
from asyncflow.mooncake import load_mooncake
from asyncflow.rpc.addresses import host_and_port
from asyncflow.weights.placed_transport import Block, PlacedLine, PlacedTransport, Pointer, address_of

log = logging.getLogger(__name__)

PROTOCOL_ENV = "MOONCAKE_PROTOCOL"
DEVICE_ENV = "MOONCAKE_DEVICE"
_THREADS = 8


class MooncakeTransport(PlacedTransport):
    """Weights by one-sided reads. Options as in ``FastTransport``; Mooncake opens its ports on the host of ``bind``."""

    def __init__(self, *, bind: str = "tcp://127.0.0.1:*", **options: Any) -> None:
        super().__init__(bind=bind, **options)
        self._host = host_and_port(bind)[0]
        self._engine: Any = None
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="weights-mooncake")

    @classmethod
    def check(cls) -> None:
        """Check that Mooncake and the system libraries that it needs are installed."""
        _library()

    async def prepare(self) -> None:
        """Start the engine."""
        self._engine = await asyncio.to_thread(_engine, self._host)
        self.door = f"{self._host}:{self._engine.get_rpc_port()}"

    async def close(self) -> None:
        """Stop serving, and unregister all memory, so that late reads of peers are refused."""
        await super().close()
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        if self._engine is not None:
            await asyncio.to_thread(self._engine.batch_unregister_memory, list(self.pool.blocks))

    def make(self, nbytes: int) -> Block:
        """Allocate memory and register it."""
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block = Block(mapping, address_of(memoryview(mapping)), nbytes)
        if (code := self._engine.register_memory(block.address, nbytes)) != 0:
            log.warning("Mooncake did not register %d bytes (%d): they go over the host network", nbytes, code)
        return block

    async def reach(
        self, door: str, pointers: Sequence[Pointer], sizes: Sequence[int], line: PlacedLine
    ) -> list[memoryview]:
        """Read into memory of the pool. Raises PeerLost if the library reports a failure."""
        del line
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._read_there, door, pointers, sizes)

    def _read_there(self, door: str, pointers: Sequence[Pointer], sizes: Sequence[int]) -> list[memoryview]:
        buffer = self.pool.take(max(sum(sizes), self.chunk_bytes))
        starts = list(itertools.accumulate(sizes[:-1], initial=0))
        local = [address_of(buffer) + start for start in starts]
        remote = [pointer.block + pointer.offset for pointer in pointers]
        if (code := self._engine.batch_transfer_sync_read(door, local, remote, list(sizes))) != 0:
            raise PeerLost(f"Mooncake could not read {sum(sizes)} bytes: {code}", where=door)
        return [buffer[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def _library() -> ModuleType:
    """Import Mooncake's Transfer Engine. Raises ManifestError if it is not installed."""
    return load_mooncake("mooncake.engine", where="spec.weightSync.transport", log_level=3)


def _engine(host: str) -> Any:
    """Start an engine that peers reach at ``host``. Raises ManifestError if the library is not installed."""
    engine = _library().TransferEngine()
    protocol, device = os.environ.get(PROTOCOL_ENV, "tcp"), os.environ.get(DEVICE_ENV, "")
    if (code := engine.initialize(host, "P2PHANDSHAKE", protocol, device)) != 0:
        raise AsyncFlowError(f"Mooncake's engine failed to start with {protocol!r} and {device!r}: {code}", where=host)
    return engine
