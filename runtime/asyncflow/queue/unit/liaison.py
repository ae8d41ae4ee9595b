"""A unit's conversation with the controller: hello, everything it holds, then puts one way and orders the other.

Puts that come while one call is under way go together with the next. When the controller is lost, or says that the
session is over, the unit begins anew with hello; the puts that were not decided are told again.

Invariants: the controller hears of a put until it has decided, in the order in which they were stored; after a session
began, it hears of everything that the unit holds before it may take a row for lost; it hears of every row that was lost
until it has answered, because it takes a row for held of which a put has told it; it hears of what shards have admitted
after that was admitted, and the unit keeps no more than ``_NEWS`` of it before it tells everything anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import TypeVar

from msgspec import Struct

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, Fenced, PeerLost
from asyncflow.identity import RowPlace, home
from asyncflow.net.keys import Keys
from asyncflow.net.rpc import RpcClient
from asyncflow.queue.protocol.calls import Done
from asyncflow.queue.protocol.runs import shrink
from asyncflow.queue.protocol.shard_calls import chosen, controller_of
from asyncflow.queue.protocol.unit_calls import (
    Admit,
    Admitted,
    Announce,
    Entry,
    Hello,
    LostRows,
    NewCells,
    Orders,
    SendAhead,
    Session,
    Strangers,
    Verdict,
    Watch,
    Welcome,
)
from asyncflow.queue.unit.holdings import Holdings
from asyncflow.queue.unit.pieces import Parcel, Put
from asyncflow.queue.unit.shards import Shards

log = logging.getLogger(__name__)
R = TypeVar("R", bound=Struct)

_CALL_S = 10.0
_AGAIN_S = 0.1
_ROWS = 2000
_PUTS = 500
_NEWS = 10_000


class Liaison:
    """Keeps a unit and the controller in agreement, until the unit is replaced.

    epoch: that of the unit's rows, 0 before the first session; joined: set when the controller has taken the unit in;
    leave: set when it wants the unit to leave; address: gives the unit's own; shard: gives that of a shard; ahead:
    carries out an order, and never raises.
    """

    def __init__(
        self,
        *,
        unit: int,
        incarnation: str,
        controller: RpcClient,
        holdings: Holdings,
        address: Callable[[], str] = lambda: "",
        shard: Callable[[int], str | None] = lambda _: None,
        keys: Keys | None = None,
        ahead: Callable[[SendAhead], None] = lambda _: None,
    ) -> None:
        self.epoch = 0
        self.joined = asyncio.Event()
        self.leave = asyncio.Event()
        self._unit = unit
        self._incarnation = incarnation
        self._controller = controller
        self._holdings = holdings
        self._address = address
        self._ahead = ahead
        self._rows = 0
        self._controllers = 1
        self._shards = Shards(name=f"storage unit {unit}", address=shard, keys=keys, decided=self._ruled)
        self._news: list[NewCells] = []
        self._forgot = False
        self._lost: dict[int, None] = {}
        self._session: Session | None = None
        self._broken: asyncio.Future[None] | None = None
        self._telling = False
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def session(self) -> Session | None:
        """The session with the controller, while there is one."""
        return self._session

    @property
    def has_news(self) -> bool:
        """Whether shards have admitted what the controller has not heard yet."""
        return bool(self._news)

    @property
    def home(self) -> int:
        """Where the unit's own rows lie."""
        return home(self.epoch, self._unit)

    def start(self) -> asyncio.Task[None]:
        """Begin to talk, in a task that only ends with an error."""
        self._task = asyncio.create_task(self._run(), name=f"liaison of unit {self._unit}")
        return self._task

    async def close(self) -> None:
        """Talk no longer."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._shards.close()

    def gave(self, lease: str) -> bool:
        """Tell whether there is a controller that can have given ``lease``."""
        return controller_of(lease) < self._controllers

    def new_rows(self, count: int) -> range:
        """Give row ids that were never used before."""
        first = RowPlace(self.epoch, self._unit, self._rows).row
        self._rows += count
        return range(first, first + count)

    def tell(self, entry: Entry, parcel: Parcel, *, outputs: Mapping[str, int] | None = None) -> Put:
        """Have the controller decide about what was stored; the verdict comes in the ``Put``."""
        put = self._holdings.propose(entry, parcel, outputs=outputs or {})
        if put.shard:
            self._shards.ask(put)
        else:
            self._tell_on()
        return put

    def lose(self, rows: Iterable[int]) -> None:
        """Have the controller know that the bytes of ``rows``, which the holdings have forgotten, are gone."""
        self._lost.update(dict.fromkeys(rows))
        self._tell_on()

    async def _run(self) -> None:
        while not self._closing:
            welcome = await self._greet()
            try:
                await self._hold_session(welcome)
            except (PeerLost, DeadlineExceeded, Fenced) as lost:
                log.info("unit %d begins anew: %s", self._unit, lost)
            except AsyncFlowError as refused:
                log.warning("unit %d begins anew: %s", self._unit, refused)
            await asyncio.sleep(_AGAIN_S)

    async def _greet(self) -> Welcome:
        """Say hello until there is an answer. Raises Fenced when another incarnation has this unit's place."""
        hello = Hello(self._unit, self._incarnation, self._holdings.budget.limit, self._address())
        while True:
            try:
                return await self._controller.call("units.hello", hello, Welcome, timeout=_CALL_S)
            except Fenced:
                raise
            except AsyncFlowError as error:
                log.info("unit %d is not heard: %s", self._unit, error)
            await asyncio.sleep(_AGAIN_S)

    async def _hold_session(self, welcome: Welcome) -> None:
        if welcome.epoch != self.epoch:
            self._holdings.wipe()
            self.epoch, self._rows = welcome.epoch, 0
            self._lost.clear()
        self._controllers = welcome.controllers
        session = Session(self._unit, welcome.controller, welcome.epoch)
        self._forgot = False
        await self._tell_puts(session)
        await self._tell_all(session)
        if self._forgot:
            raise PeerLost("more was admitted than could be kept", where="controller")
        self.joined.set()
        self._broken = asyncio.get_running_loop().create_future()
        self._session, self._telling = session, False
        obeying = asyncio.create_task(self._obey(session, welcome.watch_s))
        try:
            self._tell_on()
            done, _ = await asyncio.wait([obeying, self._broken], return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
        finally:
            self._session = None
            obeying.cancel()

    async def _tell_puts(self, session: Session) -> None:
        """Tell of what was put before the session: what it changed is part of what the unit holds."""
        while told := self._untold(session):
            admit, puts = told
            self._decide(admit, puts, await self._controller.call("units.admit", admit, Admitted, timeout=_CALL_S))

    def _untold(self, session: Session) -> tuple[Admit, list[Put]] | None:
        """Give what is to be told next: what shards have admitted, then puts; None where there is nothing."""
        if not self._holdings.puts and not self._news:
            return None
        puts = list(islice((put for put in self._holdings.puts if not put.shard), _PUTS))
        news = self._news[:_PUTS]
        return (Admit(session, [*news, *[put.entry for put in puts]]), puts) if news or puts else None

    async def _tell_all(self, session: Session) -> None:
        held = iter(list(self._holdings.held()))
        last = False
        while not last:
            chunk = list(islice(held, _ROWS))
            last = len(chunk) < _ROWS
            announce = Announce(session, chunk, last)
            strangers = await self._controller.call("units.announce", announce, Strangers, timeout=_CALL_S)
            self._holdings.clear(strangers.rows)

    def _tell_on(self) -> None:
        """Tell of what is not decided yet, unless the answer to an earlier call will do so."""
        session = self._session
        if session is None or self._telling:
            return
        if lost := list(islice(self._lost, _ROWS)):
            self._telling = True
            self._ask("units.lost", LostRows(session, lost), Done, lambda _: self._forget(lost))
        elif told := self._untold(session):
            self._telling = True
            admit, puts = told
            self._ask("units.admit", admit, Admitted, lambda admitted: self._decide(admit, puts, admitted))

    def _ask(self, method: str, request: Struct, reply: type[R], answered: Callable[[R], None]) -> None:
        session = self._session

        def done(answer: R | AsyncFlowError) -> None:
            if self._session is not session:
                return
            self._telling = False
            if isinstance(answer, AsyncFlowError):
                if self._broken is not None and not self._broken.done():
                    self._broken.set_exception(answer)
                return
            answered(answer)
            self._tell_on()

        self._controller.ask(method, request, reply, timeout=_CALL_S, done=done)

    def _forget(self, lost: Iterable[int]) -> None:
        for row in lost:
            self._lost.pop(row, None)

    def _decide(self, admit: Admit, puts: Sequence[Put], admitted: Admitted) -> None:
        news = len(admit.entries) - len(puts)
        del self._news[:news]
        decided = list(zip(puts, admitted.verdicts[news:], strict=True))
        if not admitted.ahead:
            for put, verdict in decided:
                self._holdings.decide(put, verdict)
            return
        try:
            for put, verdict in decided:
                self._holdings.enter(put, verdict)
            for order in admitted.ahead:
                self._ahead(order)
        finally:
            for put, verdict in decided:
                put.tell(verdict)

    def _ruled(self, put: Put, verdict: Verdict, error: AsyncFlowError | None) -> None:
        """Take the verdict of a shard, and have the home know which cells there are now."""
        if put not in self._holdings.puts:
            return
        self._holdings.decide(put, verdict, error)
        entry = put.entry
        mine = [index for index, ok in enumerate(verdict.each(len(put.rows))) if ok]
        if not mine or not isinstance(entry, NewCells) or not (entry.cells.sizes or entry.tags):
            return
        cells = chosen(entry.cells, len(put.rows), mine)
        rows, tags = shrink([put.rows[i] for i in mine]), [entry.tags[i] for i in mine] if entry.tags else []
        self._news.append(NewCells(lease=entry.lease, rows=rows, cells=cells, tags=tags, reason=entry.reason))
        if len(self._news) > _NEWS:
            self._news.clear()
            self._forgot = True
            if self._broken is not None and not self._broken.done():
                self._broken.set_exception(PeerLost("more was admitted than could be kept", where="controller"))
        self._tell_on()

    async def _obey(self, session: Session, watch_s: float) -> None:
        done = 0
        while True:
            watch = Watch(session, done, self._holdings.budget.used, watch_s, len(self._holdings))
            orders = await self._controller.call("units.watch", watch, Orders, timeout=watch_s + _CALL_S)
            self._holdings.clear(orders.rows)
            done = orders.number
            if orders.leave:
                self.leave.set()
