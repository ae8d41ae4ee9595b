"""Weights by Mooncake's Transfer Engine: a peer reads registered memory one-sided, over TCP, RDMA or Ascend's links.

The environment says how, by Mooncake's own names: ``MOONCAKE_PROTOCOL`` (``tcp`` by default; ``rdma``, ``ascend``) and
``MOONCAKE_DEVICE`` (its network devices, all by default). The traps: a read that fails says nothing but -1; too many
regions on their way to one peer end in -1 for ever; a peer that hangs is waited for by the library itself, 5 s without
progress over TCP; its ports listen on all interfaces and know no keys.

Invariants: a read is into memory of the pool, which is used again only when the library has returned; no call of the
library runs on the event loop; memory that cannot be registered holds versions all the same, which then go over the
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
    """Weights by one-sided reads. Options as in ``FastTransport``; Mooncake uses the host of ``bind`` for its ports."""

    def __init__(self, *, bind: str = "tcp://127.0.0.1:*", **options: Any) -> None:
        super().__init__(bind=bind, **options)
        self._host = host_and_port(bind)[0]
        self._engine: Any = None
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="weights-mooncake")

    @classmethod
    def check(cls) -> None:
        """See that Mooncake is installed, and what of the system it needs."""
        _library()

    async def prepare(self) -> None:
        """Start the engine."""
        self._engine = await asyncio.to_thread(_engine, self._host)
        self.door = f"{self._host}:{self._engine.get_rpc_port()}"

    async def close(self) -> None:
        """Serve no longer: peers that read later are refused, so the memory may go when its last view is gone."""
        await super().close()
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        if self._engine is not None:
            await asyncio.to_thread(self._engine.batch_unregister_memory, list(self.pool.blocks))

    def make(self, nbytes: int) -> Block:
        """Make memory and register it."""
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block = Block(mapping, address_of(memoryview(mapping)), nbytes)
        if (code := self._engine.register_memory(block.address, nbytes)) != 0:
            log.warning("Mooncake did not register %d bytes (%d): they go over the host network", nbytes, code)
        return block

    async def reach(
        self, door: str, pointers: Sequence[Pointer], sizes: Sequence[int], line: PlacedLine
    ) -> list[memoryview]:
        """Read into memory of the pool. Raises PeerLost where the library says that it could not."""
        del line
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._read_there, door, pointers, sizes)

    def _read_there(self, door: str, pointers: Sequence[Pointer], sizes: Sequence[int]) -> list[memoryview]:
        buffer = self.pool.take(max(sum(sizes), self.chunk_bytes))
        starts = list(itertools.accumulate(sizes[:-1], initial=0))
        here = [address_of(buffer) + start for start in starts]
        there = [pointer.block + pointer.offset for pointer in pointers]
        if (code := self._engine.batch_transfer_sync_read(door, here, there, list(sizes))) != 0:
            raise PeerLost(f"Mooncake could not read {sum(sizes)} bytes: {code}", where=door)
        return [buffer[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def _library() -> ModuleType:
    """Import Mooncake's Transfer Engine. Raises ManifestError where it is not installed."""
    return load_mooncake("mooncake.engine", where="spec.weightSync.transport", log_level=3)


def _engine(host: str) -> Any:
    """Start an engine that others reach at ``host``. Raises ManifestError where the library is not installed."""
    engine = _library().TransferEngine()
    protocol, device = os.environ.get(PROTOCOL_ENV, "tcp"), os.environ.get(DEVICE_ENV, "")
    if (code := engine.initialize(host, "P2PHANDSHAKE", protocol, device)) != 0:
        raise AsyncFlowError(f"Mooncake's engine does not start with {protocol!r} and {device!r}: {code}", where=host)
    return engine
