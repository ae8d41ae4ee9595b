"""The controller's process: the pure ``Table`` with a socket, a clock and a ledger.

A call changes the table immediately when its request is read, and is answered when the ledger contains the change. A
call that cannot be answered yet is parked, and tried again whenever its partition has changed; nothing polls.

Invariants: no answer is sent before the events behind it are as safe as ``sync`` says. A controller that cannot write
its ledger stops serving (``failed``). Time in which the process did not run does not count as a delay of any peer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from asyncflow import clock
from asyncflow.errors import AsyncFlowError, Refused
from asyncflow.queue.controller.handlers import Address
from asyncflow.queue.controller.parking import Answers, MaybeAwaitable, Parking, deliver
from asyncflow.queue.controller.primary import Primary
from asyncflow.queue.controller.replica import Replica
from asyncflow.queue.controller.sessions import Sessions
from asyncflow.queue.ledger.events import Dated
from asyncflow.queue.ledger.log import Ledger, Sync
from asyncflow.queue.protocol.calls import Claimed, ClaimRows, Done
from asyncflow.queue.protocol.messages import QueueStats
from asyncflow.queue.table.report import stats
from asyncflow.queue.table.snapshot import snapshot
from asyncflow.queue.table.table import Table
from asyncflow.rpc.access import Access
from asyncflow.rpc.addresses import address_of
from asyncflow.rpc.server import RpcServer
from asyncflow.rpc.tls import Credentials

log = logging.getLogger(__name__)

T = TypeVar("T")
_DONE = Done()
_STOPPED_S = 1.0


class Controller:
    """Serves one queue.

    ledger_dir: folder of the ledger, created if needed; sync: its durability class; host, port: address to listen on
    (port 0: any); advertise: the host that peers connect to, if it differs; credentials: of this process; access:
    access rules; unit_lost_s: seconds of silence after which a storage unit's rows are created again elsewhere; units:
    number of units, if known, so that rows of other units are created again without that wait; compact_bytes: size
    above which the ledger is compacted while serving; index: index of this controller among all ``controllers``;
    address: returns the address of each. ``failed`` is done when the controller cannot continue; its exception is
    the reason.
    """

    def __init__(
        self,
        *,
        ledger_dir: Path,
        sync: Sync = "process",
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str = "",
        credentials: Credentials | None = None,
        access: Access | None = None,
        unit_lost_s: float = 30.0,
        units: int | None = None,
        compact_bytes: int = 64 << 20,
        index: int = 0,
        controllers: int = 1,
        address: Address = lambda _: None,
    ) -> None:
        self.table = Table(index=index, controllers=controllers)
        bind = address_of(host, port)
        self.server = RpcServer(
            name="controller", bind=bind, credentials=credentials, access=access, advertise=advertise
        )
        self.ledger = Ledger(ledger_dir, sync=sync, compact=partial(snapshot, self.table.state), limit=compact_bytes)
        self.sessions = Sessions(self.table, lost_s=unit_lost_s, units=units)
        self.parking = Parking(self.table, now=self.now, deliver=self.settle)
        self._alarm: asyncio.TimerHandle | None = None
        self._due, self._dated = math.inf, 0.0
        self.handlers: Primary | Replica
        if index:
            self.handlers = Replica(self, address=address, credentials=credentials)
        else:
            self.handlers = Primary(self, replicas=range(1, controllers), address=address, credentials=credentials)
        for method, (request, act) in self.handlers.routes().items():
            self.server.route(method, request, partial(self._answer, act))

    async def start(self) -> str:
        """Read the ledger, start to serve, and return the address. Raises LedgerCorrupt, Refused."""
        loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = loop.create_future()
        try:
            self.table.state.replay(self.ledger.recover())
            self.table.start(loop.time())
            self.sessions.start(loop.time())
            self.table.state.outbox.clear()
            self.begin_ledger()
        except BaseException:
            self.ledger.release()
            raise
        self.handlers.start()
        address = await self.server.start()
        self.settle()
        log.info("serves at %s, epoch %d", address, self.table.controller)
        return address

    async def close(self) -> None:
        """Stop serving, and close the ledger."""
        await self.handlers.close()
        await self.server.close()
        if self._alarm is not None:
            self._alarm.cancel()
        if self.failed.done():
            await self.ledger.abandon()
        else:
            await self.ledger.close()

    def stats(self) -> QueueStats:
        """Return the current counts."""
        units, synced = self.sessions.views(self.now()), len(self.sessions)
        return stats(self.table, units, synced=synced, ledger_bytes=self.ledger.bytes)

    async def synced(self) -> None:
        """Wait until everything recorded so far is on disk. Raises Refused if the ledger cannot be written."""
        self.settle()
        try:
            await asyncio.shield(self.ledger.synced())  # other calls wait for the same disk
        except OSError as error:
            raise self._broken(error) from error

    async def written(self) -> None:
        """Wait until the ledger contains everything recorded so far. Raises Refused if it cannot be written."""
        if (pending := self.settle()) is not None:
            await asyncio.shield(pending)

    def begin_ledger(self) -> None:
        """Write the current state as a new generation of the ledger. Raises Refused if it cannot be written."""
        try:
            self.ledger.begin(snapshot(self.table.state))
        except OSError as error:
            raise self._broken(error) from error

    def fail(self, error: BaseException) -> None:
        """Stop serving because this controller cannot continue."""
        if not self.failed.done():
            self.failed.set_exception(error)

    def now(self) -> float:
        """The clock of leases and sessions, which is also the clock of the event loop."""
        return time.monotonic()

    def settle(self, found: Answers | None = None) -> asyncio.Future[None] | None:
        """Process the effects of the last commands: answer parked calls, write, free rows, and set the alarm.

        found: calls whose answers are known already. Returns a future that is done when the ledger contains everything,
        None if it does already. Raises Refused if it cannot be written.
        """
        state = self.table.state
        answers = found or []
        if self.parking.waiters:
            answers += self.parking.take_found()
        state.changed.clear()
        to_free, state.to_free = state.to_free, []
        self._set_alarm()
        try:
            if state.outbox:
                if (now := clock.now()) - self._dated >= 1:
                    self.ledger.append([Dated(now)])
                    self._dated = now
                self.ledger.append(state.outbox)
                state.outbox.clear()
            pending = self.ledger.commit()
        except OSError as error:
            refused = self._broken(error)
            deliver([(future, refused) for future, _ in answers], None, broken=self._broken)
            raise refused from error
        if to_free:
            self.sessions.order(to_free, after=pending)
        if answers:
            deliver(answers, pending, broken=self._broken)
        return pending

    def safe(self, reply: T) -> MaybeAwaitable[T]:
        """Settle, and return ``reply``, or a future of it that is done once the ledger contains everything so far."""
        if (pending := self.settle()) is None:
            return reply
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        deliver([(future, reply)], pending, broken=self._broken)
        return future

    def until(self, partition: str, attempt: Callable[[], T | None], wait_s: float, otherwise: T) -> MaybeAwaitable[T]:
        """Return the result of ``attempt``, repeated when the partition changes; ``otherwise`` after ``wait_s``."""
        if (found := attempt()) is not None or wait_s <= 0:
            return otherwise if found is None else found
        return self.parking.park(partition, attempt, wait_s, otherwise)

    def claim(self, claim: ClaimRows) -> MaybeAwaitable[Claimed]:
        """Return the rows for ``claim``; none after ``wait_s``, or once no row can come."""

        def ended() -> Claimed | None:
            return Claimed(ended=True) if self.table.claims.ended(claim) else None

        if rows := self.table.claims.grant(claim, self.now()):
            return Claimed(rows)
        if (found := ended()) is not None or claim.wait_s <= 0:
            return found or Claimed()
        return self.parking.park(claim.partition, ended, claim.wait_s, Claimed(), claim)

    def _answer(self, act: Callable[[Any], Any], call: Struct, _frames: Sequence[memoryview]) -> Any:
        """Return the reply of ``act`` to a call, or an awaitable of it."""
        self.table.state.now = self.now()
        try:
            reply = act(call)
        except AsyncFlowError:
            self.settle()
            raise
        if isinstance(reply, Awaitable):
            self.settle()
            return reply
        return self.safe(_DONE if reply is None else reply)

    def _broken(self, error: OSError) -> Refused:
        """Stop serving: earlier answers are in the ledger, but no further change can be."""
        self.fail(error)
        hint = "Free some space and start the controller again: nothing that was answered is lost"
        return Refused(f"the ledger cannot be written: {error}", where="controller", hint=hint)

    def _set_alarm(self) -> None:
        """Set the alarm no later than the first deadline; it may fire too early."""
        if self._due <= (due := min(self.table.state.leases.next_deadline, self.sessions.next_deadline)):
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._due = due
        self._alarm = asyncio.get_running_loop().call_at(due, self._on_alarm, due)

    def _on_alarm(self, due: float) -> None:
        self._alarm, self._due, now = None, math.inf, self.now()
        if now - due > _STOPPED_S:
            log.warning("this process did not run for %.1f s: leases are extended", now - due)
            self.table.claims.extend_all(now)
            self.sessions.excuse(now)
        if expired := self.table.claims.expire(now):
            log.info("leases of %d rows expired", expired)
        self.sessions.lose_silent(now)
        self.settle()
