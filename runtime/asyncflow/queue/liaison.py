"""A unit's conversation with the controller: hello, everything it holds, then puts one way and orders the other.

Puts that come while one call is under way go together with the next. When the controller is lost, or says that the
session is over, the unit begins anew with hello; the puts that were not decided are told again.

Invariants: the controller hears of a put until it has decided, in the order in which they were stored; after a session
began, it hears of everything that the unit holds before it may take a row for lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from itertools import islice

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, Fenced, PeerLost, from_wire
from asyncflow.identity import RowPlace
from asyncflow.net.rpc import RpcClient
from asyncflow.queue.holdings import Cell, Holdings, Put
from asyncflow.queue.unit_calls import (
    Admit,
    Admitted,
    Announce,
    Entry,
    Hello,
    Orders,
    Session,
    Strangers,
    Watch,
    Welcome,
)

log = logging.getLogger(__name__)

_CALL_S = 10.0
_AGAIN_S = 0.1
_ROWS = 2000
_PUTS = 500


class Liaison:
    """Keeps a unit and the controller in agreement, until the unit is replaced.

    epoch: that of the unit's rows, 0 before the first session; joined: set when the controller has taken the unit in.
    """

    def __init__(self, *, unit: int, incarnation: str, controller: RpcClient, holdings: Holdings) -> None:
        self.epoch = 0
        self.joined = asyncio.Event()
        self._unit = unit
        self._incarnation = incarnation
        self._controller = controller
        self._holdings = holdings
        self._rows = 0
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        """Begin to talk, in a task that only ends with an error."""
        self._task = asyncio.create_task(self._run(), name=f"liaison of unit {self._unit}")
        return self._task

    async def close(self) -> None:
        """Talk no longer."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def new_rows(self, count: int) -> list[int]:
        """Give row ids that were never used before."""
        first, self._rows = self._rows, self._rows + count
        return [RowPlace(self.epoch, self._unit, number).row for number in range(first, first + count)]

    def tell(self, entry: Entry, cells: dict[str, list[Cell]], *, outputs: Mapping[str, int] | None = None) -> Put:
        """Have the controller decide about stored cells; the verdict comes in the ``Put``."""
        put = self._holdings.propose(entry, cells, outputs=outputs or {})
        self._news.set()
        return put

    async def _run(self) -> None:
        while True:
            welcome = await self._greet()
            try:
                await self._session(welcome)
            except* (PeerLost, DeadlineExceeded, Fenced) as lost:
                log.info("unit %d begins anew: %s", self._unit, lost.exceptions[0])
            except* AsyncFlowError as refused:
                log.warning("unit %d begins anew: %s", self._unit, refused.exceptions[0])
            await asyncio.sleep(_AGAIN_S)

    async def _greet(self) -> Welcome:
        """Say hello until there is an answer. Raises Fenced when another incarnation has this unit's place."""
        hello = Hello(self._unit, self._incarnation, self._holdings.budget.limit)
        while True:
            try:
                return await self._controller.call("units.hello", hello, Welcome, timeout=_CALL_S)
            except Fenced:
                raise
            except AsyncFlowError as error:
                log.info("unit %d is not heard: %s", self._unit, error)
            await asyncio.sleep(_AGAIN_S)

    async def _session(self, welcome: Welcome) -> None:
        if welcome.epoch != self.epoch:
            await self._holdings.wipe()
            self.epoch, self._rows = welcome.epoch, 0
        session = Session(self._unit, welcome.controller, welcome.epoch)
        await self._tell_puts(session)
        await self._tell_all(session)
        self.joined.set()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_telling(session))
            group.create_task(self._obey(session, welcome.watch_s))

    async def _tell_all(self, session: Session) -> None:
        held = iter(list(self._holdings.held()))
        last = False
        while not last:
            chunk = list(islice(held, _ROWS))
            last = len(chunk) < _ROWS
            announce = Announce(session, chunk, last)
            strangers = await self._controller.call("units.announce", announce, Strangers, timeout=_CALL_S)
            await self._holdings.clear(strangers.rows)

    async def _keep_telling(self, session: Session) -> None:
        while True:
            await self._news.wait()
            await self._tell_puts(session)

    async def _tell_puts(self, session: Session) -> None:
        while puts := list(islice(self._holdings.puts, _PUTS)):
            admit = Admit(session, [put.entry for put in puts])
            admitted = await self._controller.call("units.admit", admit, Admitted, timeout=_CALL_S)
            for put, verdict in zip(puts, admitted.verdicts, strict=True):
                error = from_wire(verdict.error) if verdict.error is not None else None
                await self._holdings.decide(put, verdict, error)
        self._news.clear()

    async def _obey(self, session: Session, watch_s: float) -> None:
        done = 0
        while True:
            watch = Watch(session, done, self._holdings.budget.used, watch_s)
            orders = await self._controller.call("units.watch", watch, Orders, timeout=watch_s + _CALL_S)
            await self._holdings.clear(orders.rows)
            done = orders.number
