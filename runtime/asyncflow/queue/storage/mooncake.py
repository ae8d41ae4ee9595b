"""Mooncake Store as a backend: a connection that avoids its pitfalls, and samples as its values.

The pitfalls (``docs/guide/queue-backends.md``): ``get`` hides every error. A put over an existing key keeps the old
value and reports success. Empty values are not stored. A client that is not set up, or was closed, ends the process
with SIGSEGV. A client whose queue to a peer has overflowed fails forever. A read that names a key twice fills one place
and reports both as filled. While a client is set up or closed, the library holds the interpreter's lock, so the rest of
the process stops: for 90 s if the master dies meanwhile, and forever if it hangs. So a master must first prove that it
is alive, and a setup is tried once.

All calls block, possibly forever, so the backend runs them in threads. No call waits for room or for a lease; the
unit's event loop does that.

Invariants: a client is closed only after it was replaced and no call refers to it. One thread sets up a new client, and
all other threads wait for it. Values are written under new keys, hard pinned. Buffers stay registered as long as a
transfer may use them. A call has at most ``MOST_KEYS`` keys; each key has a return code, and nothing counts as done
without it. A removal is never forced. The keys of a unit begin with its owner, index and incarnation, and no other
living process writes or removes them; a unit first removes the values of its earlier incarnations.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, Final, Self, TypeVar

import numpy as np

from asyncflow.errors import AsyncFlowError, PeerLost
from asyncflow.mooncake import load_mooncake
from asyncflow.queue.storage.backend import Outcome, Site, Store, answer_of
from asyncflow.queue.storage.packed import PackedBackend
from asyncflow.queue.storage.servers import LEASE_MS, find_program
from asyncflow.rpc.columns import Array, batches

log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_CALLS: Final = 4
_THREADS: Final = 64
"""Threads for calls in progress, and for calls that hang after their callers' deadlines."""
MOST_KEYS: Final = Store.most_keys

NO_ROOM: Final = -200
_LEASED: Final = frozenset((-703, -706))
"""The value is being written, or read."""
_OUTCOMES: Final = {NO_ROOM: Outcome.FULL, -704: Outcome.LOST, -900: Outcome.AWAY, -901: Outcome.AWAY}
"""By code: there is no room, no such key, no master, no answer of the master for 30 s."""
_REPLACE_AFTER: Final = 2
"""Consecutive calls with a failed transfer after which the client is replaced."""
_REPLACE_EVERY_S: Final = 5.0
_REACH_S: Final = 1.0
_NO_REQUEST: Final = b"\0"


def load() -> ModuleType:
    """Import Mooncake's Store. Raises ManifestError if it is not installed."""
    return load_mooncake("mooncake.store", where="spec.transferQueue.backend", log_level=2)


class MooncakeClient:
    """A client of one master. troubled: consecutive calls with failed transfers; buffers: the registered ones."""

    def __init__(self, store: Any, master: str) -> None:
        self.store = store
        self.master = master
        self.troubled = 0
        self.made = time.monotonic()
        self.buffers: dict[int, Array] = {}

    def __del__(self) -> None:
        self.store.close()

    def transfer(
        self, call: str, keys: Sequence[str], sizes: Sequence[int], buffer: Array, *more: object
    ) -> list[Outcome]:
        """Transfer values from or into a buffer; count failed transfers.

        After a failed transfer the buffer stays registered and is not used again, because its bytes may still arrive.
        """
        address = buffer.ctypes.data
        if (code := self.store.register_buffer(address, buffer.size)) != 0:
            raise AsyncFlowError(f"a buffer of {buffer.size} bytes cannot be registered: {code}", where="Mooncake")
        self.buffers[address] = buffer
        pointers = (address + np.cumsum([0, *sizes[:-1]])).tolist()
        codes = [int(code) for code in getattr(self.store, call)(list(keys), pointers, list(sizes), *more)]
        if len(codes) != len(keys):
            raise AsyncFlowError(f"{len(codes)} answers came for {len(keys)} keys", where="Mooncake")
        outcomes = list(map(_outcome, codes))
        if stuck := {code for code in codes if _outcome(code) is Outcome.FAILED and code not in _LEASED}:
            self.troubled += 1
            log.info("some of %d values could not be transferred: %s", len(keys), sorted(stuck))
            return outcomes
        if Outcome.DONE in outcomes:
            self.troubled = 0
        self.store.unregister_buffer(address)
        del self.buffers[address]
        return outcomes


def _check_alive(master: str) -> None:
    """Send a byte that is no request, on which a living master closes the connection. Raises PeerLost."""
    host, _, port = master.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_REACH_S) as line:
            line.sendall(_NO_REQUEST)
            line.recv(1)
    except ConnectionResetError:
        return
    except OSError as error:
        raise PeerLost(f"Mooncake's master does not answer: {error}", where=master) from error


class MooncakeConnection:
    """A process's connection to the store, for any thread.

    host: the address of this process; master: returns the address of the master, None if there is none; segment_bytes:
    memory that this process offers to the store, 0 for a process that only uses it.
    """

    def __init__(self, *, host: str, master: Callable[[], str | None], segment_bytes: int = 0) -> None:
        self.library = load()
        self._host = host
        self._find = master
        self._segment_bytes = segment_bytes
        self._opening = threading.Lock()
        self._client: MooncakeClient | None = None
        self._closed = False

    @property
    def master(self) -> str | None:
        """The master of the current client, None if there is no client."""
        client = self._client
        return client.master if client is not None else None

    def client(self) -> MooncakeClient:
        """Return the client, or a new one if it must be replaced. Raises PeerLost if none can be set up.

        A replaced client is closed when the last call releases it.
        """
        with self._opening:
            address, client = self._find(), self._client
            master = address.removeprefix("tcp://") if address is not None else None
            self._check_open()
            if client is not None:
                stuck = client.troubled >= _REPLACE_AFTER and time.monotonic() - client.made > _REPLACE_EVERY_S
                if not stuck and master in (None, client.master):
                    return client
                log.info("the Mooncake client is replaced after %d failed calls, master %s", client.troubled, master)
            if master is None:
                raise PeerLost("there is no master yet", where="Mooncake")
            self._client = client = None  # the last call closes it
            client = self._set_up(master)
            self._check_open()
            self._client = client
            return client

    def close(self) -> None:
        """Stop using the store; a client in use is closed by its last user."""
        self._closed = True
        self._client = None

    def _check_open(self) -> None:
        if self._closed:
            raise PeerLost("the store was closed", where="Mooncake")

    def _set_up(self, master: str) -> MooncakeClient:
        """Set up a client with a living master; if it dies meanwhile, the process stops for 5 s."""
        _check_alive(master)
        store = self.library.MooncakeDistributedStore()
        code = store.setup(self._host, "P2PHANDSHAKE", self._segment_bytes, 0, "tcp", "", master)
        if code != 0:
            raise PeerLost(f"Mooncake's client cannot be set up: error {code}", where=master)
        return MooncakeClient(store, master)


class MooncakeStore(Store):
    """Calls by ``connection`` in threads. stale: a regular expression for the keys of the unit's other incarnations."""

    def __init__(self, connection: MooncakeConnection, *, stale: str) -> None:
        self._connection = connection
        self._stale = stale
        self._sweeping: asyncio.Task[None] | None = None
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="mooncake")
        self._turns = asyncio.Semaphore(_MAX_CALLS)
        self._pinned = connection.library.ReplicateConfig()
        self._pinned.replica_num = 1
        self._pinned.with_hard_pin = True

    async def open(self) -> None:
        """Wait for the master, and remove stale values; repeat that when leases on them have ended."""
        await answer_of(self._sweep)
        self._sweeping = asyncio.create_task(self._sweep_later())

    async def write(self, keys: Sequence[str], sizes: Sequence[int], values: Array) -> Sequence[Outcome]:
        """Put all values."""
        return await self._transfer("batch_put_from", keys, sizes, values, self._pinned)

    async def read(self, keys: Sequence[str], sizes: Sequence[int], values: Array) -> Sequence[Outcome]:
        """Get all values."""
        return await self._transfer("batch_get_into", keys, sizes, values)

    async def find_lost(self, unmoved: Sequence[str], others: Sequence[str]) -> list[str]:
        """Query the master for the segments of values, which for a while may include a dead holder."""
        segments: dict[str, str] = {}
        for part in batches([*unmoved, *others], MOST_KEYS):
            known = await self._run(lambda client, part=part: client.store.batch_get_replica_desc(part))  # type: ignore[misc]
            segments |= {key: _segment(known.get(key)) for key in part} if known is not None else {}
        dead = {"", *(segments.get(key, "") for key in unmoved)}
        return [key for key in others if segments.get(key, "?") in dead]

    async def remove(self, keys: Sequence[str]) -> Sequence[Outcome]:
        """Remove values; the store refuses this while they are read."""
        codes = await self._run(lambda client: client.store.batch_remove(list(keys)))
        return [Outcome.AWAY] * len(keys) if codes is None else [_outcome(int(code)) for code in codes]

    async def close(self) -> None:
        """Close the client; hanging calls are left to their threads."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._connection.close)

    async def _sweep(self) -> int | None:
        """Remove unread values of earlier incarnations; return None if the store does not answer."""
        if removed := await self._run(lambda client: int(client.store.remove_by_regex(self._stale))):
            log.info("%d values of an earlier incarnation were removed", removed)
        return removed

    async def _sweep_later(self) -> None:
        await asyncio.sleep(1.5 * LEASE_MS / 1000)
        await answer_of(self._sweep)

    async def _transfer(
        self, call: str, keys: Sequence[str], sizes: Sequence[int], buffer: Array, *more: object
    ) -> list[Outcome]:
        if not 0 < len(keys) == len(set(keys)) <= MOST_KEYS or len(sizes) != len(keys) or 0 in sizes or "" in keys:
            raise ValueError(f"a call takes 1 to {MOST_KEYS} different keys, each with a value of at least a byte")
        outcomes = await self._run(lambda client: client.transfer(call, keys, sizes, buffer, *more))
        return outcomes or [Outcome.AWAY] * len(keys)

    async def _run(self, call: Callable[[MooncakeClient], T]) -> T | None:
        """Run ``call`` in a thread; None if the store does not answer. It may outlive its caller's wait."""
        async with self._turns:
            loop = asyncio.get_running_loop()
            try:
                return await loop.run_in_executor(self._threads, lambda: call(self._connection.client()))
            except PeerLost as lost:
                log.info("Mooncake is unreachable: %s", lost)
                return None


class MooncakeBackend(PackedBackend):
    """Samples as values in Mooncake Store."""

    @classmethod
    def check(cls, *, servers: bool) -> None:  # noqa: ARG003
        """Check that Mooncake, with client and master, and the system libraries that it needs are installed."""
        find_program("mooncake_master")
        load()

    @classmethod
    def create(cls, site: Site) -> Self:
        """Return a backend that finds the master by the role ``master``."""
        connection = MooncakeConnection(host=site.host, master=lambda: site.find("master", 0))
        stale = f"^{re.escape(site.unit_prefix)}(?!{site.incarnation}-)"
        return cls(MooncakeStore(connection, stale=stale), prefix=site.prefix, lasting=site.lasting)


def _segment(replicas: Sequence[Any] | None) -> str:
    """Return the segment that holds a value, "" if the master does not know the value."""
    memory = [replica for replica in replicas or () if replica.is_memory_replica()]
    return str(memory[0].get_memory_descriptor().buffer_descriptor.transport_endpoint) if memory else ""


def _outcome(code: int) -> Outcome:
    """Return the meaning of a code of Mooncake: 0 or a size is success."""
    return Outcome.DONE if code >= 0 else _OUTCOMES.get(code, Outcome.FAILED)
