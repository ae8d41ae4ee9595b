"""The controller's process: the pure ``Table`` with a socket, a clock and a ledger.

A call changes the table at once and is answered when the ledger has what it changed; calls that come together share one
write. What cannot be answered yet is parked and tried again whenever its partition has changed: nothing polls.

Invariants: no answer leaves before the events behind it are as safe as ``sync`` says; a controller whose ledger cannot
be written stops serving (``failed``); the time that the process itself did not run is nobody's delay.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from asyncflow.errors import AsyncFlowError, Refused
from asyncflow.net.keys import Keys
from asyncflow.net.rpc import RpcServer
from asyncflow.queue.claims import Claim
from asyncflow.queue.compaction import dump
from asyncflow.queue.handlers import Handlers
from asyncflow.queue.ledger import Ledger, Sync
from asyncflow.queue.messages import LeasedRow, QueueStats
from asyncflow.queue.report import Storage, stats
from asyncflow.queue.sessions import Sessions
from asyncflow.queue.table import Table

log = logging.getLogger(__name__)

T = TypeVar("T")
_STOPPED_S = 1.0
_Try = Callable[[], object]


class Controller:
    """Serves one queue.

    ledger_dir: folder of the ledger, made if needed; sync: its durability class; host, port: where to listen (0: any);
    advertise: the host that others dial, where that is another; keys: the job's key; unit_lost_s: seconds of silence
    after which a storage unit's rows are made again elsewhere; compact_bytes: size from which on the ledger is
    compacted while serving.
    ``failed`` is done when the controller cannot go on; its exception says why.
    """

    def __init__(
        self,
        *,
        ledger_dir: Path,
        sync: Sync = "process",
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str = "",
        keys: Keys | None = None,
        unit_lost_s: float = 30.0,
        compact_bytes: int = 64 << 20,
    ) -> None:
        self.table = Table()
        self.server = RpcServer(name="controller", bind=f"tcp://{host}:{port or '*'}", keys=keys, advertise=advertise)
        self._ledger = Ledger(ledger_dir, sync=sync, compact=lambda: dump(self.table.books), limit=compact_bytes)
        self.sessions = Sessions(self.table, lost_s=unit_lost_s)
        self.ledger_dir = ledger_dir
        self._claims: dict[Claim, asyncio.Future[list[LeasedRow]]] = {}
        self._parked: dict[str, dict[_Try, None]] = {}
        self._alarm: asyncio.TimerHandle | None = None
        Handlers(self).route(self.server)

    async def start(self) -> str:
        """Read the ledger, begin to serve, and give the address. Raises LedgerCorrupt, Refused."""
        loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = loop.create_future()
        for event in self._ledger.recover():
            self.table.books.apply(event)
        self.table.start(loop.time())
        self.sessions.start(loop.time())
        self.table.books.outbox.clear()
        self._ledger.begin(dump(self.table.books))
        address = await self.server.start()
        self.settle()
        log.info("epoch %d serves at %s", self.table.controller, address)
        return address

    async def close(self) -> None:
        """Stop serving, and leave the ledger whole."""
        await self.server.close()
        if self._alarm is not None:
            self._alarm.cancel()
        if not self.failed.done():
            await self._ledger.close()

    def stats(self) -> QueueStats:
        """Give the counts of now."""
        sessions = self.sessions
        return stats(self.table, Storage(sessions.used, sessions.limit, len(sessions), self._ledger.bytes))

    def now(self) -> float:
        """The clock of leases and sessions."""
        return asyncio.get_running_loop().time()

    def settle(self) -> None:
        """Take what the last commands left: serve those who wait, write, free, and set the alarm."""
        books = self.table.books
        for grant in self.table.claims.serve(self.now()):
            if not (future := self._claims[grant.claim]).done():
                future.set_result(grant.rows)
        for partition in list(books.touched):
            for attempt in list(self._parked.get(partition, ())):
                attempt()
        books.touched.clear()
        self._ledger.append(books.outbox)
        books.outbox.clear()
        self.sessions.order(books.frees)
        books.frees.clear()
        self._set_alarm()

    async def safe(self, reply: T) -> T:
        """Settle, and give ``reply`` when the ledger has everything up to now."""
        self.settle()
        try:
            await self._ledger.flushed()
        except OSError as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            raise Refused(f"the ledger cannot be written: {error}", where="controller") from error
        return reply

    async def until(self, partition: str, attempt: Callable[[], T | None], wait_s: float) -> T | None:
        """Give what ``attempt`` gives, tried again whenever the partition changes; None after ``wait_s``."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def once() -> None:
            try:
                if not future.done() and (found := attempt()) is not None:
                    future.set_result(found)
            except AsyncFlowError as error:
                future.set_exception(error)

        await self._parking(partition, once, future, wait_s)
        return future.result() if future.done() else None

    async def claim(self, claim: Claim, ended: Callable[[], bool], wait_s: float) -> list[LeasedRow]:
        """Give what ``claim`` was granted; nothing after ``wait_s``, or as soon as ``ended()``."""
        future: asyncio.Future[list[LeasedRow]] = asyncio.get_running_loop().create_future()

        def once() -> None:
            if not future.done() and ended():
                future.set_result([])

        self.table.claims.park(claim)
        self._claims[claim] = future
        try:
            await self._parking(claim.partition, once, future, wait_s)
        finally:
            self.table.claims.withdraw(claim)
            del self._claims[claim]
        return future.result() if future.done() else []

    async def _parking(self, partition: str, once: _Try, future: asyncio.Future[T], wait_s: float) -> None:
        """Call ``once`` now and whenever the partition changes, until ``future`` is done or ``wait_s`` is over."""
        waiting = self._parked.setdefault(partition, {})
        waiting[once] = None
        self.table.books.touched.add(partition)
        try:
            self.settle()
            await asyncio.wait([future], timeout=wait_s)
        finally:
            del waiting[once]
            if not waiting:
                self._parked.pop(partition, None)

    def _set_alarm(self) -> None:
        times = [t for t in (self.table.claims.next_deadline, self.sessions.next_deadline) if t is not None]
        if not times or (self._alarm is not None and self._alarm.when() <= min(times)):
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = asyncio.get_running_loop().call_at(min(times), self._on_alarm, min(times))

    def _on_alarm(self, due: float) -> None:
        self._alarm, now = None, self.now()
        if now - due > _STOPPED_S:
            log.warning("this process did not run for %.1f s: leases are extended", now - due)
            self.table.claims.extend_all(now)
            self.sessions.excuse(now)
        if expired := self.table.claims.expire(now):
            log.info("leases of %d rows ended without an answer", expired)
        self.sessions.lose_silent(now)
        self.settle()
