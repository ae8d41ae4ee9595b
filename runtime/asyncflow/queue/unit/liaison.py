"""A unit's conversation with the controller: hello, everything it holds, then what it has to tell one way (``telling``)
and orders the other.

When the controller is lost, or says that the session is over, the unit begins anew with hello; the puts that were not
decided are told again.

Invariant: after a session began, the controller hears of everything that the unit holds before it may take a row for
lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from itertools import islice

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, Fenced, PeerLost
from asyncflow.identity import RowPlace, home
from asyncflow.net.keys import Keys
from asyncflow.net.retry import delays
from asyncflow.net.rpc import RpcClient
from asyncflow.queue.protocol.runs import shrink
from asyncflow.queue.protocol.shard_calls import chosen, controller_of
from asyncflow.queue.protocol.unit_calls import (
    Announce,
    Entry,
    Hello,
    NewCells,
    Orders,
    Session,
    Strangers,
    Verdict,
    Watch,
    Welcome,
)
from asyncflow.queue.unit.holdings import Holdings
from asyncflow.queue.unit.pieces import Parcel, Put
from asyncflow.queue.unit.shards import Shards
from asyncflow.queue.unit.telling import Telling

log = logging.getLogger(__name__)

_CALL_S = 10.0
_ROWS = 2000


class Liaison:
    """Keeps a unit and the controller in agreement, until the unit is replaced.

    epoch: that of the unit's rows, 0 before the first session; joined: set when the controller has taken the unit in;
    leave: set when it wants the unit to leave; address: gives the unit's own; shard: gives that of a shard.
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
    ) -> None:
        self.epoch = 0
        self.joined = asyncio.Event()
        self._waits = delays()
        self.leave = asyncio.Event()
        self._unit = unit
        self._incarnation = incarnation
        self._controller = controller
        self._holdings = holdings
        self._address = address
        self._telling = Telling(controller=controller, holdings=holdings)
        self._rows = 0
        self._controllers = 1
        self._shards = Shards(name=f"storage unit {unit}", address=shard, keys=keys, decided=self._ruled)
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def session(self) -> Session | None:
        """The session with the controller, while there is one."""
        return self._telling.session

    @property
    def has_news(self) -> bool:
        """Whether shards have admitted what the controller has not heard yet."""
        return self._telling.has_news

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
        """Return row ids that were never used before."""
        first = RowPlace(self.epoch, self._unit, self._rows).row
        self._rows += count
        return range(first, first + count)

    def tell(self, entry: Entry, parcel: Parcel, *, outputs: Mapping[str, int] | None = None) -> Put:
        """Have the controller decide about what was stored; the verdict comes in the ``Put``."""
        put = self._holdings.propose(entry, parcel, outputs=outputs or {})
        if put.shard:
            self._shards.ask(put)
        else:
            self._telling.tell_on()
        return put

    def lose(self, rows: Iterable[int]) -> None:
        """Have the controller know that the bytes of ``rows``, which the holdings have forgotten, are gone."""
        self._telling.lose(rows)

    async def _run(self) -> None:
        while not self._closing:
            welcome = await self._greet()
            try:
                await self._hold_session(welcome)
            except (PeerLost, DeadlineExceeded, Fenced) as lost:
                log.info("unit %d begins anew: %s", self._unit, lost)
            except AsyncFlowError as refused:
                log.warning("unit %d begins anew: %s", self._unit, refused)
            await asyncio.sleep(next(self._waits))

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
            await asyncio.sleep(next(self._waits))

    async def _hold_session(self, welcome: Welcome) -> None:
        if welcome.epoch != self.epoch:
            self._holdings.wipe()
            self.epoch, self._rows = welcome.epoch, 0
            self._telling.forget_lost()
        self._controllers = welcome.controllers
        session = Session(self._unit, welcome.controller, welcome.epoch)
        await self._telling.prepare(session)
        await self._tell_all(session)
        broken = self._telling.begin(session)
        self.joined.set()
        self._waits = delays()
        obeying = asyncio.create_task(self._obey(session, welcome.watch_s))
        try:
            done, _ = await asyncio.wait([obeying, broken], return_when=asyncio.FIRST_COMPLETED)
            errors = [error for ended in done if (error := ended.exception()) is not None]
            raise errors[0]
        finally:
            self._telling.end()
            obeying.cancel()

    async def _tell_all(self, session: Session) -> None:
        held = iter(list(self._holdings.held()))
        last = False
        while not last:
            chunk = list(islice(held, _ROWS))
            last = len(chunk) < _ROWS
            announce = Announce(session, chunk, last)
            strangers = await self._controller.call("units.announce", announce, Strangers, timeout=_CALL_S)
            self._holdings.clear(strangers.rows)

    def _ruled(self, put: Put, verdict: Verdict) -> None:
        """Take the verdict of a shard, and have the home know which cells there are now."""
        if put not in self._holdings.puts:
            return
        self._holdings.decide(put, verdict)
        entry = put.entry
        mine = [index for index, ok in enumerate(verdict.each(len(put.rows))) if ok]
        if not mine or not isinstance(entry, NewCells) or not (entry.cells.sizes or entry.tags):
            return
        cells = chosen(entry.cells, len(put.rows), mine)
        rows, tags = shrink([put.rows[i] for i in mine]), [entry.tags[i] for i in mine] if entry.tags else []
        self._telling.bring(NewCells(lease=entry.lease, rows=rows, cells=cells, tags=tags, reason=entry.reason))

    async def _obey(self, session: Session, watch_s: float) -> None:
        done = 0
        while True:
            watch = Watch(session, done, self._holdings.budget.used, watch_s, len(self._holdings))
            orders = await self._controller.call("units.watch", watch, Orders, timeout=watch_s + _CALL_S)
            self._holdings.clear(orders.rows)
            done = orders.number
            if orders.leave:
                self.leave.set()
