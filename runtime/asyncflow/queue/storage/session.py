"""A unit's session with the controller, and its calls to the replica controllers that granted the leases of its puts.

A session starts with a hello and a report of everything that the unit holds. Then the unit reports, one call at a time:
lost rows, rows that changed because replicas have decided about them, and puts. Puts that come meanwhile are sent
together in the next call. In parallel, the unit polls for orders. If the controller is lost or ends the session, the
unit starts again with a hello, and reports undecided puts again. A put under a lease of a replica is decided by that
replica. Each replica is called independently, and again until it answers, so a stopped replica delays only writes under
its own leases.

To drain, the unit moves its rows to the units that the controller names, one move at a time. The rows of a move are
frozen, copied in batches of bounded size, and freed here when the controller has recorded their new location. After a
failure the unit requests a new move, which voids the one in progress; only then may the remaining rows be written to.

Invariants: at the start of a session, the controller learns of everything that the unit holds before it may take a row
for lost. A put is reported until its controller has decided or the unit has given it up, and puts are reported in the
order in which they were stored. A lost row is reported until the controller has answered, because a report of its put
makes the controller take the row for held. Rows that replicas have admitted are reported to the controller after that
and before they move, because only this unit can report them. A drain frees a row only when it is on another unit or no
longer needed, and makes one move at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from itertools import compress, islice

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, Fenced, PeerLost
from asyncflow.identity import RowPlace, location_at
from asyncflow.queue.peers import pack_rows
from asyncflow.queue.protocol.calls import NOWHERE, Done, Drain, controller_of
from asyncflow.queue.protocol.unit_calls import (
    Admit,
    AdmitCells,
    Announce,
    AskMove,
    Entry,
    EntryResult,
    Hello,
    LostRows,
    MoveOrder,
    NewCells,
    Orders,
    Session,
    TakeRows,
    Watch,
    Welcome,
    results_on,
)
from asyncflow.queue.storage.drain import MovingRows
from asyncflow.queue.storage.holdings import Blob, Holdings, PendingPut
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.retry import delays
from asyncflow.rpc.tls import Credentials

log = logging.getLogger(__name__)

_CALL_S = 10.0
_ROWS = 2000
_PUTS = 500
_MOVE_ROWS = 512
_MOVE_BYTES = 4 << 20
_ROOM_S = 2.0
_UNREACHABLE_S = 10.0
_RETRY_S = 0.05
_NO_UNIT_S = 1.0


class UnitSession:
    """Keeps a unit and its controllers consistent, until the unit is replaced.

    epoch: epoch of the unit's rows, 0 before the first session; ids_used: number of row ids used in it; session:
    current session with the controller, if any; joined: set when the controller has accepted the unit; leaving: set
    when it orders the unit to drain; moved_rows: rows moved to other units; address: returns the unit's address; find:
    returns the address of process i of a role.
    """

    def __init__(
        self,
        *,
        unit: int,
        incarnation: str,
        controller: RpcClient,
        holdings: Holdings,
        address: Callable[[], str] = lambda: "",
        find: Callable[[str, int], str | None] = lambda _role, _index: None,
        credentials: Credentials | None = None,
    ) -> None:
        self.epoch = self.ids_used = 0
        self.session: Session | None = None
        self.joined = asyncio.Event()
        self.leaving = asyncio.Event()
        self.moved_rows = 0
        self.moving = MovingRows(holdings, location=lambda: location_at(self.epoch, unit), where=f"storage unit {unit}")
        self._unit = unit
        self._incarnation = incarnation
        self._controller = controller
        self._holdings = holdings
        self._address = address
        self._find = find
        self._credentials = credentials
        self._clients: dict[tuple[str, int], RpcClient] = {}
        self._replicas: dict[int, asyncio.Task[None]] = {}
        self._controllers = 1
        self._lost: dict[int, None] = {}
        self._changed: dict[int, None] = {}
        self._changes_reported = asyncio.Event()
        self._more: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self._waits = delays()
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._drained_epoch = 0
        self._failed = NOWHERE

    def start(self) -> asyncio.Task[None]:
        """Start the first session, in a task that ends only with an error."""
        self._task = asyncio.create_task(self._run(), name=f"session of unit {self._unit}")
        return self._task

    async def close(self) -> None:
        """End the session."""
        self._closing = True  # if a task group fails meanwhile, it does not propagate a cancellation
        tasks = [*self._replicas.values(), *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for client in self._clients.values():
            await client.close()

    def knows(self, lease: str) -> bool:
        """Return whether ``lease`` can have been granted by one of the controllers."""
        return controller_of(lease) < self._controllers

    def new_rows(self, count: int) -> range:
        """Return row ids that were never used before."""
        first = RowPlace(self.epoch, self._unit, self.ids_used).row
        self.ids_used += count
        return range(first, first + count)

    def submit(self, entry: Entry, blob: Blob) -> PendingPut:
        """Queue a stored put for the decision of its controller, and return it."""
        put = self._holdings.propose(entry, blob)
        index = put.blob.controller
        if index and index not in self._replicas:
            self._replicas[index] = asyncio.create_task(self._call_replica(index), name=f"replica controller {index}")
        self._more[index].set()
        return put

    def _client(self, role: str, index: int) -> RpcClient:
        if (role, index) not in self._clients:
            name, find = f"storage unit {self._unit} to {role} {index}", partial(self._find, role, index)
            client = RpcClient(name=name, resolve=find, credentials=self._credentials, expects=(role,))
            self._clients[role, index] = client
        return self._clients[role, index]

    def lose(self, rows: Iterable[int]) -> None:
        """Report that the bytes of ``rows``, which the holdings have dropped, are lost."""
        self._lost.update(dict.fromkeys(rows))
        self._more[0].set()

    async def report(self, session: Session) -> None:
        """Report all changes, forever."""
        more = self._more[0]
        more.set()
        while True:
            await more.wait()
            more.clear()
            if lost := list(islice(self._lost, _ROWS)):
                await self._controller.call("units.lost", LostRows(session, lost), Done, timeout=_CALL_S)
                for row in lost:
                    self._lost.pop(row, None)
            if self._changed:
                await self._announce(session, self._changed, last=False)
            if await self._report_puts(session) or self._lost:
                more.set()

    async def _report_puts(self, session: Session) -> bool:
        """Report puts that the primary decides; return False if these were all."""
        if puts := self._first_puts(0):
            admit = Admit(session, [put.entry for put in puts])
            results = await self._controller.call("units.admit", admit, list[EntryResult], timeout=_CALL_S)
            self._decide(puts, results_on(puts, results))
        return len(puts) == _PUTS

    def _first_puts(self, controller: int) -> list[PendingPut]:
        """Return the first puts that await the decision of a controller."""
        return list(islice((put for put in self._holdings.puts if put.blob.controller == controller), _PUTS))

    def _decide(self, puts: Iterable[PendingPut], results: Iterable[EntryResult]) -> list[int]:
        """Apply the decisions of a controller; return the admitted rows."""
        admitted: list[int] = []
        for put, result in zip(puts, results, strict=True):
            if put in self._holdings.puts:
                self._holdings.decide(put, result)
                admitted += compress(put.rows, result.ok)
        return admitted

    async def _run(self) -> None:
        """Hold one session after another. Raises Fenced if another incarnation has replaced this unit."""
        limit, address = self._holdings.budget.limit, self._address()
        while not self._closing:
            hello = Hello(self._unit, self._incarnation, limit, address, self.epoch)
            try:
                welcome = await self._controller.call("units.hello", hello, Welcome, timeout=_CALL_S)
            except Fenced:
                raise
            except AsyncFlowError as error:
                log.info("unit %d cannot reach the controller: %s", self._unit, error)
            else:
                try:
                    await self._hold_session(welcome)
                except* (PeerLost, DeadlineExceeded, Fenced) as lost:
                    log.info("unit %d restarts its session: %s", self._unit, lost.exceptions[0])
                except* AsyncFlowError as refused:
                    log.warning("unit %d restarts its session: %s", self._unit, refused.exceptions[0])
            await asyncio.sleep(next(self._waits))

    async def _hold_session(self, welcome: Welcome) -> None:
        if welcome.epoch != self.epoch:
            self._holdings.wipe()
            self.epoch, self.ids_used = welcome.epoch, 0
            self._lost.clear()
        self._controllers = welcome.controllers
        session = Session(self._unit, welcome.controller, welcome.epoch)
        while await self._report_puts(session):  # their results are part of what the unit holds
            pass
        await self._announce(session, self._holdings.rows, last=True)
        self.session = session
        self.joined.set()
        self._waits = delays()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.report(session))
                group.create_task(self._follow_orders(session, welcome.watch_s))
        finally:
            self.session = None

    async def _announce(self, session: Session, rows: Iterable[int], *, last: bool) -> None:
        """Announce ``rows`` to the controller and free unknown ones. last: these are all remaining rows."""
        held = self._holdings.held(rows)
        self._changed.clear()
        for first in range(0, len(held) + 1, _ROWS):
            announce = Announce(session, held[first : first + _ROWS], last=last and first + _ROWS > len(held))
            self._holdings.clear(await self._controller.call("units.announce", announce, list[int], timeout=_CALL_S))
        if not self._changed:
            self._changes_reported.set()

    async def _follow_orders(self, session: Session, watch_s: float) -> None:
        done = 0
        while True:
            watch = Watch(session, done, self._holdings.budget.used, watch_s, len(self._holdings))
            orders = await self._controller.call("units.watch", watch, Orders, timeout=watch_s + _CALL_S)
            self._holdings.clear(orders.rows)
            await asyncio.sleep(0)  # rows that need no wait are then freed, and no longer counted as used
            done = orders.number
            if orders.leave:
                self.leaving.set()

    async def _call_replica(self, index: int) -> None:
        """Request a replica's decisions about the puts under its leases; repeat each call until it answers.

        An error that the replica returns is its decision about each put of the call.
        """
        client, waits = self._client("controller", index), delays()
        while True:
            self._more[index].clear()
            puts = self._first_puts(index)
            if not puts:
                await self._more[index].wait()
                continue
            ask = AdmitCells(self._unit, [put.entry for put in puts if isinstance(put.entry, NewCells)])
            try:
                results = await client.call("replicas.admit", ask, list[EntryResult], timeout=_CALL_S)
                results_on(puts, results)
            except (PeerLost, DeadlineExceeded):
                await asyncio.sleep(next(waits))
                continue
            except AsyncFlowError as error:
                results = [EntryResult([], error.to_wire())] * len(puts)
            waits = delays()
            if admitted := self._decide(puts, results):
                self._changed.update(dict.fromkeys(admitted))
                self._changes_reported.clear()
                self._more[0].set()

    async def drain(self, *, patient: bool) -> bool:
        """Drain the unit, and return True when no row is left.

        patient: wait for other units and the controller; otherwise return False if there is no other unit, or the
        controller was unreachable for ``_UNREACHABLE_S`` seconds.
        """
        now = asyncio.get_running_loop().time
        last_answer, waits, failed = now(), delays(), False
        self.moving.draining = True
        while True:
            try:
                move = await self._next_move()
                last_answer = now()
                if move.over or (move.alone and not patient):
                    return move.over
                if failed:
                    await asyncio.sleep(next(waits))
                await self._carry_out(move)
                waits, failed = delays(), False
            except AsyncFlowError as error:
                log.info("unit %d continues to drain: %s", self._unit, error)
                if now() - last_answer > _UNREACHABLE_S and not patient:
                    return False
                failed = True

    async def _next_move(self) -> MoveOrder:
        """Request the next move; from then on all other rows may be written to."""
        session = self.session
        if session is None:
            await asyncio.sleep(_RETRY_S)
            raise PeerLost("there is no session with the controller", where=f"storage unit {self._unit}")
        if session.epoch != self._drained_epoch:
            await self._controller.call("queue.drain", Drain(self._unit, self._incarnation), Done, timeout=_CALL_S)
            self._drained_epoch = session.epoch
        if not self._holdings:
            await self._holdings.decided()
            await self._changes_reported.wait()
        rows, nbytes = self.moving.first(most=_MOVE_ROWS, most_bytes=_MOVE_BYTES)
        ask = AskMove(session, rows, len(self._holdings), nbytes, self._failed)
        move = await self._controller.call("units.move", ask, MoveOrder, timeout=_CALL_S)
        self._failed = NOWHERE
        self.moving.frozen = frozenset()
        self._holdings.clear(move.gone)
        return move

    async def _carry_out(self, move: MoveOrder) -> None:
        if move.unit == NOWHERE:
            await asyncio.sleep(_NO_UNIT_S)
        rows = move.rows
        self.moving.frozen = frozenset(rows)
        await self._holdings.decided(rows)
        await self._changes_reported.wait()
        self._failed = move.unit
        for batch in self.moving.batches(rows, most_bytes=_MOVE_BYTES):
            await self._send(move, batch)
        self._failed = NOWHERE

    async def _send(self, move: MoveOrder, rows: list[int]) -> None:
        """Make a unit take over rows of one form; free the rows that it has taken."""
        session = self.session
        if session is None:
            raise Fenced("the session ended during the move", where=f"storage unit {self._unit}")
        held = {number: row for number in rows if (row := self._holdings.rows.get(number)) is not None}
        if not held:
            return
        rows, first = list(held), next(iter(held.values()))
        columns = await self._holdings.fetch(rows, sorted(first.cells)) if first.cells else {}
        header, frames = pack_rows(columns, range(len(rows)), rows=len(rows))
        request = TakeRows(
            source=session.location,
            ticket=move.ticket,
            rows=rows,
            header=header,
            partial=[name for name in columns if not first.has(name)],
            tokens=[row.tokens for row in held.values()],
            tags=[row.tags for row in held.values()],
            outputs=dict(first.outputs),
            wait_s=_ROOM_S,
        )
        client = self._client("storage", move.unit)
        taken = await client.call("unit.take", request, list[bool], timeout=_CALL_S + _ROOM_S, frames=frames)
        moved = [row for row, ok in zip(rows, taken, strict=True) if ok]
        self.moved_rows += len(moved)
        self._holdings.clear(moved)
