"""Mooncake Store as a back end: a connection to it, which avoids its traps, and samples as its values.

The traps (``docs/guide/queue-backends.md``): ``get`` hides every error, a put over an existing key keeps the old value
and says that it went well, empty values are not stored, a client that is not set up or was closed ends the process with
SIGSEGV, one whose queue to a peer ran over fails for ever, and a read that names a key twice fills one place and says
that it filled both. The library keeps the interpreter's lock while a client is set up or closed, so nothing else of
the process runs: for 90 s where the master dies meanwhile, and for ever where it hangs. So a master must show that it
lives first, and a setup is tried once.

All calls block, and may for ever, so the back end runs them in threads; no call waits for room or for a lease, which is
what the unit's event loop does.

Invariants: a client is closed when it was replaced and no call refers to it any more, never before; a new one is set up
by one thread, and all others wait for it. Values are written under keys that are new, hard pinned; buffers stay
registered as long as a transfer may use them; no call has more than ``MOST_KEYS`` keys; each key has a return code, and
nothing is taken for done without it; a removal is never forced. The keys of a unit begin with its owner, index and
incarnation, and no other living process writes or removes them; a unit first removes what earlier incarnations of it
have left.
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

_AT_ONCE: Final = 4
_THREADS: Final = 64
"""Those of calls under way, and of calls that hang after their callers' deadlines."""
MOST_KEYS: Final = Store.most_keys

NO_ROOM: Final = -200
_LEASED: Final = frozenset((-703, -706))
"""It is being written, or read."""
_OUTCOMES: Final = {NO_ROOM: Outcome.FULL, -704: Outcome.LOST, -900: Outcome.AWAY, -901: Outcome.AWAY}
"""By code: there is no room, no such key, no master, no answer of the master for 30 s."""
_REPLACE_AFTER: Final = 2
"""Calls in a row in which something could not be moved, after which the client is replaced."""
_REPLACE_EVERY_S: Final = 5.0
_REACH_S: Final = 1.0
_NO_REQUEST: Final = b"\0"


def load() -> ModuleType:
    """Import Mooncake's Store. Raises ManifestError where it is not installed."""
    return load_mooncake("mooncake.store", where="spec.transferQueue.backend", log_level=2)


class MooncakeClient:
    """A client of one master. troubled: calls in a row that could not move something; buffers: those registered."""

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
        """Move values from or into a buffer; note whether bytes can still be moved.

        One in which something is stuck stays registered and is not used again, because it may still come.
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
            log.info("some of %d values could not be moved: %s", len(keys), sorted(stuck))
            return outcomes
        if Outcome.DONE in outcomes:
            self.troubled = 0
        self.store.unregister_buffer(address)
        del self.buffers[address]
        return outcomes


def _check_alive(master: str) -> None:
    """Send a byte that is no request, on which a master that lives hangs up. Raises PeerLost."""
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

    host: the address of this process; master: returns that of the master, None while there is none; segment_bytes: what
    this process offers to the store, 0 for a process that only uses it.
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
        """The master with which a client is set up now, None while there is none."""
        client = self._client
        return client.master if client is not None else None

    def client(self) -> MooncakeClient:
        """Return the client, a new one where it must be replaced. Raises PeerLost where none can be set up.

        It is closed when it was replaced and the last call has let go of it.
        """
        with self._opening:
            address, client = self._find(), self._client
            master = address.removeprefix("tcp://") if address is not None else None
            self._check_open()
            if client is not None:
                stuck = client.troubled >= _REPLACE_AFTER and time.monotonic() - client.made > _REPLACE_EVERY_S
                if not stuck and master in (None, client.master):
                    return client
                log.info("the client of Mooncake is replaced: %d calls in trouble, master %s", client.troubled, master)
            if master is None:
                raise PeerLost("there is no master yet", where="Mooncake")
            self._client = client = None  # the last call closes it
            client = self._set_up(master)
            self._check_open()
            self._client = client
            return client

    def close(self) -> None:
        """Use the store no longer; a client that is in use is closed by its last user."""
        self._closed = True
        self._client = None

    def _check_open(self) -> None:
        if self._closed:
            raise PeerLost("the store was closed", where="Mooncake")

    def _set_up(self, master: str) -> MooncakeClient:
        """Set up a client with a master that lives now; where it dies meanwhile, the process stands still for 5 s."""
        _check_alive(master)
        store = self.library.MooncakeDistributedStore()
        code = store.setup(self._host, "P2PHANDSHAKE", self._segment_bytes, 0, "tcp", "", master)
        if code != 0:
            raise PeerLost(f"Mooncake's client cannot be set up: error {code}", where=master)
        return MooncakeClient(store, master)


class MooncakeStore(Store):
    """Calls by ``connection`` in threads. stale: a regular expression of the keys that other incarnations have left."""

    def __init__(self, connection: MooncakeConnection, *, stale: str) -> None:
        self._connection = connection
        self._stale = stale
        self._sweeping: asyncio.Task[None] | None = None
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="mooncake")
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._pinned = connection.library.ReplicateConfig()
        self._pinned.replica_num = 1
        self._pinned.with_hard_pin = True

    async def open(self) -> None:
        """Wait for the master, and remove what is left; once more when leases on it have ended."""
        await answer_of(self._sweep)
        self._sweeping = asyncio.create_task(self._sweep_later())

    async def write(self, keys: Sequence[str], sizes: Sequence[int], values: Array) -> Sequence[Outcome]:
        """Put all."""
        return await self._transfer("batch_put_from", keys, sizes, values, self._pinned)

    async def read(self, keys: Sequence[str], sizes: Sequence[int], values: Array) -> Sequence[Outcome]:
        """Get all."""
        return await self._transfer("batch_get_into", keys, sizes, values)

    async def gone(self, unmoved: Sequence[str], others: Sequence[str]) -> list[str]:
        """Ask the master where they lie, which it believes for a while of a holder that is dead."""
        segments: dict[str, str] = {}
        for part in batches([*unmoved, *others], MOST_KEYS):
            known = await self._run(lambda client, part=part: client.store.batch_get_replica_desc(part))  # type: ignore[misc]
            segments |= {key: _segment(known.get(key)) for key in part} if known is not None else {}
        dead = {"", *(segments.get(key, "") for key in unmoved)}
        return [key for key in others if segments.get(key, "?") in dead]

    async def remove(self, keys: Sequence[str]) -> Sequence[Outcome]:
        """Remove values, which the store refuses while somebody reads them."""
        codes = await self._run(lambda client: client.store.batch_remove(list(keys)))
        return [Outcome.AWAY] * len(keys) if codes is None else [_outcome(int(code)) for code in codes]

    async def close(self) -> None:
        """Close the client; calls that hang are left to their threads."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._connection.close)

    async def _sweep(self) -> int | None:
        """Remove what earlier incarnations have left and nobody reads; None where the store does not answer."""
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
        """Run ``call`` in a thread; None where the store does not answer. It may outlive its caller's wait."""
        async with self._turns:
            loop = asyncio.get_running_loop()
            try:
                return await loop.run_in_executor(self._threads, lambda: call(self._connection.client()))
            except PeerLost as lost:
                log.info("Mooncake is away: %s", lost)
                return None


class MooncakeBackend(PackedBackend):
    """Samples as values in Mooncake Store."""

    @classmethod
    def check(cls, *, servers: bool) -> None:  # noqa: ARG003
        """See that Mooncake is installed, whose package has client and master, and what of the system it needs."""
        find_program("mooncake_master")
        load()

    @classmethod
    def made(cls, site: Site) -> Self:
        """Make one that finds the master by the role of that name."""
        connection = MooncakeConnection(host=site.host, master=lambda: site.find("master", 0))
        stale = f"^{re.escape(site.unit_prefix)}(?!{site.incarnation}-)"
        return cls(MooncakeStore(connection, stale=stale), prefix=site.prefix, lasting=site.lasting)


def _segment(replicas: Sequence[Any] | None) -> str:
    """Return the segment in which a value lies, "" for one that the master does not know."""
    memory = [replica for replica in replicas or () if replica.is_memory_replica()]
    return str(memory[0].get_memory_descriptor().buffer_descriptor.transport_endpoint) if memory else ""


def _outcome(code: int) -> Outcome:
    """Return what a code of Mooncake means: 0 or a size where it went well."""
    return Outcome.DONE if code >= 0 else _OUTCOMES.get(code, Outcome.FAILED)
