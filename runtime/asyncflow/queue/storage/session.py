"""A unit's session with the controller, and its calls to the replica controllers whose leases its puts name.

A session begins with a hello and everything that the unit holds. From then on the unit reports, one call at a time:
rows that were lost, what replicas have admitted, and puts; those that come meanwhile go together with the next call.
Beside that it polls for orders. When the controller is lost, or says that the session is over, the unit begins anew
with hello, and reports again what was not decided. A put under a lease of a replica is that replica's to decide: each
is asked on its own, and again until it answers, so one that is stopped holds up only writes under its own leases.

Invariants: after a session began, the controller hears of everything that the unit holds before it may take a row for
lost; a controller hears of a put until it has decided, or the unit has given the put up, and of puts in the order in
which they were stored; it hears of a lost row until it has answered, because it takes a row for held of which a put
has told it; it hears of what replicas have admitted after that was admitted, and the unit keeps no more than
``_CHANGES`` of it before it begins anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, Fenced, PeerLost
from asyncflow.identity import RowPlace, home
from asyncflow.queue.protocol.calls import Done, controller_of
from asyncflow.queue.protocol.unit_calls import (
    Admit,
    AdmitCells,
    Admitted,
    Announce,
    Entry,
    Hello,
    LostRows,
    NewCells,
    Orders,
    Session,
    Strangers,
    Verdict,
    Watch,
    Welcome,
    chosen,
)
from asyncflow.queue.storage.holdings import Blob, Holdings, PendingPut
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.retry import delays
from asyncflow.rpc.tls import Credentials

log = logging.getLogger(__name__)

_CALL_S = 10.0
_ROWS = 2000
_PUTS = 500
_CHANGES = 10_000


class UnitSession:
    """Keeps a unit and its controllers in agreement, until the unit is replaced.

    epoch: that of the unit's rows, 0 before the first session; session: with the controller, while there is one;
    joined: set when the controller has taken the unit in; drain: set when it orders the unit to drain; address: returns
    the unit's own; replica: returns that of a replica controller.
    """

    def __init__(
        self,
        *,
        unit: int,
        incarnation: str,
        controller: RpcClient,
        holdings: Holdings,
        address: Callable[[], str] = lambda: "",
        replica: Callable[[int], str | None] = lambda _: None,
        credentials: Credentials | None = None,
    ) -> None:
        self.epoch = 0
        self.session: Session | None = None
        self.joined = asyncio.Event()
        self.drain = asyncio.Event()
        self._unit = unit
        self._incarnation = incarnation
        self._controller = controller
        self._holdings = holdings
        self._address = address
        self._replica = replica
        self._credentials = credentials
        self._replicas: dict[int, _Replica] = {}
        self._controllers = 1
        self._rows = 0
        self._lost: dict[int, None] = {}
        self._changes: list[NewCells] = []
        self._dropped = False
        self._more = asyncio.Event()
        self._waits = delays()
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def unreported(self) -> bool:
        """Return whether replicas have admitted what the controller has not heard yet."""
        return bool(self._changes)

    @property
    def location(self) -> int:
        """The location of the unit's own rows."""
        return home(self.epoch, self._unit)

    def start(self) -> asyncio.Task[None]:
        """Begin the first session, in a task that only ends with an error."""
        self._task = asyncio.create_task(self._run(), name=f"session of unit {self._unit}")
        return self._task

    async def close(self) -> None:
        """End the session."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for replica in self._replicas.values():
            await replica.close()

    def knows(self, lease: str) -> bool:
        """Return whether there is a controller that can have granted ``lease``."""
        return controller_of(lease) < self._controllers

    def new_rows(self, count: int) -> range:
        """Return row ids that were never used before."""
        first = RowPlace(self.epoch, self._unit, self._rows).row
        self._rows += count
        return range(first, first + count)

    def submit(self, entry: Entry, blob: Blob, *, outputs: Mapping[str, int] | None = None) -> PendingPut:
        """Have a controller decide about what was stored, and return the put that is decided then."""
        put = self._holdings.propose(entry, blob, outputs=outputs or {})
        index = put.controller
        if not index:
            self._more.set()
            return put
        if index not in self._replicas:
            name = f"storage unit {self._unit} to {index}"
            client = RpcClient(
                name=name,
                resolve=lambda: self._replica(index),
                credentials=self._credentials,
                expects=("controller",),
            )
            self._replicas[index] = _Replica(client, unit=self._unit, decided=self._decide)
        self._replicas[index].submit(put)
        return put

    def lose(self, rows: Iterable[int]) -> None:
        """Report that the bytes of ``rows``, which the holdings have dropped, are gone."""
        self._lost.update(dict.fromkeys(rows))
        self._more.set()

    async def report(self, session: Session) -> None:
        """Report all that comes, for ever. Raises PeerLost where the session must begin anew."""
        while True:
            self._more.clear()
            if self._dropped:
                raise PeerLost("more was admitted than could be kept", where="controller")
            if lost := list(islice(self._lost, _ROWS)):
                await self._controller.call("units.lost", LostRows(session, lost), Done, timeout=_CALL_S)
                for row in lost:
                    self._lost.pop(row, None)
            elif not await self._report_puts(session):
                await self._more.wait()

    async def _report_puts(self, session: Session) -> bool:
        """Report what replicas have admitted, then puts; return False where there is nothing."""
        puts = list(islice((put for put in self._holdings.puts if not put.controller), _PUTS))
        changes = self._changes[:_PUTS]
        if not changes and not puts:
            return False
        entries = [*changes, *[put.entry for put in puts]]
        admitted = await self._controller.call("units.admit", Admit(session, entries), Admitted, timeout=_CALL_S)
        results = admitted.on(entries)
        del self._changes[: len(changes)]
        for put, result in zip(puts, results[len(changes) :], strict=True):
            self._holdings.decide(put, result)
        return True

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
            self._lost.clear()
        self._controllers = welcome.controllers
        session = Session(self._unit, welcome.controller, welcome.epoch)
        self._dropped = False
        while await self._report_puts(session):  # what they changed is part of what the unit holds
            pass
        await self._announce(session)
        self.session = session
        self.joined.set()
        self._waits = delays()
        work = self.report(session), self._obey(session, welcome.watch_s)
        tasks = [asyncio.create_task(part, name=f"session of unit {self._unit}") for part in work]
        try:
            await asyncio.gather(*tasks)
        finally:
            self.session = None
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _announce(self, session: Session) -> None:
        """Tell the controller of all rows that the unit holds, and free those that it does not know."""
        held = iter(list(self._holdings.held()))
        last = False
        while not last:
            chunk = list(islice(held, _ROWS))
            last = len(chunk) < _ROWS
            announce = Announce(session, chunk, last)
            unknown = await self._controller.call("units.announce", announce, Strangers, timeout=_CALL_S)
            self._holdings.clear(unknown.rows)

    async def _obey(self, session: Session, watch_s: float) -> None:
        done = 0
        while True:
            watch = Watch(session, done, self._holdings.budget.used, watch_s, len(self._holdings))
            orders = await self._controller.call("units.watch", watch, Orders, timeout=watch_s + _CALL_S)
            self._holdings.clear(orders.rows)
            await asyncio.sleep(0)  # what needs no wait is freed then, and no longer counted as used
            done = orders.number
            if orders.leave:
                self.drain.set()

    def _decide(self, put: PendingPut, result: Verdict) -> None:
        """Take the decision of a replica, and have the primary know which cells there are now."""
        if put not in self._holdings.puts:
            return
        self._holdings.decide(put, result)
        entry = put.entry
        admitted = [index for index, ok in enumerate(result.each(len(put.rows))) if ok]
        if not admitted or not isinstance(entry, NewCells) or not (entry.cells.sizes or entry.tags):
            return
        cells = chosen(entry.cells, len(put.rows), admitted)
        rows, tags = [put.rows[i] for i in admitted], [entry.tags[i] for i in admitted] if entry.tags else []
        self._changes.append(NewCells(lease=entry.lease, rows=rows, cells=cells, tags=tags, reason=entry.reason))
        if len(self._changes) > _CHANGES:
            self._changes.clear()
            self._dropped = True
        self._more.set()


class _Replica:
    """A replica controller, and the puts of ``unit`` that it has not decided. decided: called with each decision."""

    def __init__(self, client: RpcClient, *, unit: int, decided: Callable[[PendingPut, Verdict], None]) -> None:
        self._waiting: dict[PendingPut, None] = {}
        self._unit = unit
        self._client = client
        self._decided = decided
        self._more = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=client.name)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._client.close()

    def submit(self, put: PendingPut) -> None:
        self._waiting[put] = None
        self._more.set()

    async def _run(self) -> None:
        waits = delays()
        while True:
            for put in [put for put in islice(self._waiting, _PUTS) if put.result.done()]:
                del self._waiting[put]
            puts = list(islice(self._waiting, _PUTS))
            if not puts:
                self._more.clear()
                await self._more.wait()
                continue
            try:
                results = await self._ask(puts)
            except (PeerLost, DeadlineExceeded):
                await asyncio.sleep(next(waits))
                continue
            waits = delays()
            for put, result in zip(puts, results, strict=True):
                self._waiting.pop(put, None)
                self._decided(put, result)

    async def _ask(self, puts: Sequence[PendingPut]) -> Sequence[Verdict]:
        """Return what the replica decides about ``puts``: an error of its own is its decision about each."""
        ask = AdmitCells(self._unit, [put.entry for put in puts if isinstance(put.entry, NewCells)])
        try:
            admitted = await self._client.call("shards.admit", ask, Admitted, timeout=_CALL_S)
            return admitted.on(puts)
        except (PeerLost, DeadlineExceeded):
            raise
        except AsyncFlowError as error:
            return [Verdict([], error.to_wire())] * len(puts)
