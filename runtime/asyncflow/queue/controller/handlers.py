"""What each call to the controller does: one line for a command, one method where there is more to it.

Invariants: a handler changes the table without waiting in between, and answers only what ``Controller`` calls safe; a
question that looks at every row lets others be served in between, so it may miss rows that are put or cleared
meanwhile, and tells nothing that was not so at some time since it was asked; what is not in ``Handlers.routes`` is
refused by the server as a method that is not there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from msgspec import Struct

from asyncflow.errors import AsyncFlowError
from asyncflow.flow.selection import VersionFilter
from asyncflow.queue.controller.parking import Soon
from asyncflow.queue.ledger.audit import audit_ledger
from asyncflow.queue.protocol import calls, unit_calls
from asyncflow.queue.protocol.calls import controller_of
from asyncflow.queue.protocol.messages import (
    AuditReport,
    Found,
    Listing,
    PartitionSnapshot,
    PartitionView,
    PeekedRows,
    Progress,
    Wanted,
)
from asyncflow.queue.table.leases import ANY, Claim
from asyncflow.queue.table.partition import Partition
from asyncflow.queue.table.replication import ChangeFeed
from asyncflow.queue.table.report import consumed, find, has_columns, listing, peek, produced, snapshot, view
from asyncflow.queue.table.rows import expect, list_rows, live_rows, reset, write
from asyncflow.queue.table.state import Row
from asyncflow.rpc.columns import batches
from asyncflow.rpc.server import Handler, Reply, RpcServer

if TYPE_CHECKING:
    from asyncflow.queue.controller.controller import Controller

Frames: TypeAlias = Sequence[memoryview]
Address: TypeAlias = Callable[[int], str | None]
"""Returns the address of the controller with this number, None while it has none."""
Awaiting: TypeAlias = Callable[[Any, Frames], Awaitable[Reply]]
"""A handler whose reply is always awaited."""
_DONE = calls.Done()
_CHUNK = 2000


class Route(NamedTuple):
    """How calls of a method are answered."""

    request: type[Struct]
    handler: Handler

    def wrapped(self, wrap: Callable[[Awaiting], Awaiting]) -> Route:
        """Return the route whose handler ``wrap`` makes of this one."""

        async def awaiting(call: Any, frames: Frames) -> Reply:
            reply = self.handler(call, frames)
            return await reply if isinstance(reply, Awaitable) else reply

        return Route(self.request, wrap(awaiting))


class Standalone:
    """What part a controller has in its queue: here that of the only one; ``Primary`` and ``Replica`` are for several.

    Invariant: where there is one controller, nothing is told to others, and nothing is waited for.
    """

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._table = controller.table

    def routes(self) -> dict[str, Route]:
        """Return what this controller answers, by method."""
        return Handlers(self._controller).routes()

    def route(self, server: RpcServer) -> None:
        """Have ``server`` answer ``routes``."""
        for method, (request, handler) in self.routes().items():
            server.route(method, request, handler)

    def start(self) -> None:
        """Begin, when the ledger was read and calls are answered."""

    async def close(self) -> None:
        """Talk to other controllers no longer."""

    def ready(self) -> tuple[bool, str]:
        """Tell whether leases can be granted, and what is waited for."""
        return True, "ready"

    def silences(self) -> dict[int, float]:
        """Return the seconds for which each controller that follows this one has not asked what happened."""
        return {}

    def expire(self, worker: str) -> None:
        """End all leases and claims of a worker that is known to be dead."""
        self._table.claims.expire_worker(worker)
        self._controller.settle()


class Handlers:
    """The calls that a controller answers. feed: told of what is admitted, where others follow."""

    def __init__(self, controller: Controller, *, feed: ChangeFeed | None = None) -> None:
        self._feed = feed
        self._controller = controller
        self._table = controller.table
        self._state = controller.table.state
        self._sessions = controller.sessions

    def routes(self) -> dict[str, Route]:
        """Return the handler of each method."""
        table, training, now = self._table, self._table.training, self._controller.now
        routes: dict[str, Route] = {}

        def answer(method: str, request: type[Struct], act: Callable[[Any], Soon[Any]]) -> None:
            def handle(call: Any, _frames: Frames) -> Soon[Any]:
                table.state.now = now()
                try:
                    return act(call)
                except AsyncFlowError:
                    self._controller.settle()
                    raise

            routes[method] = Route(request, handle)

        def command(method: str, request: type[Struct], act: Callable[[Any], Any]) -> None:
            answer(method, request, lambda call: self._controller.safe(_or_done(act(call))))

        def freeing(method: str, request: type[Struct], act: Callable[[Any], Any]) -> None:
            answer(method, request, lambda call: self._controller.freed(_or_done(act(call))))

        command("queue.declare", calls.Declare, lambda c: table.declare(c.specs))
        command("queue.acknowledge", calls.Leases, lambda c: table.claims.acknowledge(c.leases))
        command("queue.renew", calls.Leases, lambda c: table.claims.renew(c.leases, now()))
        command("queue.end", calls.EndRows, self._end)
        command("queue.abandon", calls.ClaimTicket, lambda c: table.claims.abandon(c.worker, c.ticket))
        command("queue.withdraw", calls.ClaimTicket, lambda c: self._controller.withdraw(c.worker, c.ticket))
        command("queue.expire", calls.Expire, lambda c: table.claims.expire_worker(c.worker))
        command("queue.open_step", calls.OpenStep, lambda c: training.open_step(*_fields(c)))
        command("queue.begin", calls.Begin, lambda c: training.begin(*_fields(c)))
        command("queue.step_done", calls.StepDone, lambda c: training.step_done(*_fields(c)))
        command("queue.commit", calls.Commit, lambda c: training.commit(*_fields(c)))
        command("queue.take_over", calls.CreatorAttempt, lambda c: table.take_over(*_fields(c)))
        freeing("queue.clear", calls.CreatorAttempt, lambda c: table.clear(*_fields(c)))
        command("queue.close", calls.Close, lambda c: table.close(c.partition, c.step))
        command("queue.stats", calls.Nothing, lambda _: self._controller.stats())
        command("queue.snapshot", calls.AskSnapshot, self._snapshot)
        command("units.hello", unit_calls.Hello, lambda c: self._sessions.greet(c, now()))
        command("units.announce", unit_calls.Announce, self._announce)
        answer("units.admit", unit_calls.Admit, self._admit)
        command("units.lost", unit_calls.LostRows, self._lost)
        command("queue.drain", calls.Drain, self._sessions.drain)
        command("queue.where", calls.AskWhere, self._where)
        command("queue.units", calls.Nothing, lambda _: self._sessions.views(now()))
        command("queue.shares", calls.Nothing, lambda _: self._sessions.shares())
        command("units.move", unit_calls.AskMove, self._next_order)
        answer("units.watch", unit_calls.Watch, self._watch)
        answer("queue.claim", calls.ClaimRows, self._claim)
        answer("queue.slot", calls.AskSlot, self._slot)
        answer("queue.wanted", calls.AskWanted, self._wanted)
        command("queue.show", calls.InPartition, self._show)
        command("open.find", calls.FindRows, self._find)
        command("open.peek", calls.Peek, self._peek)
        command("open.reset", calls.Reset, self._reset)
        command("open.expect", calls.Expect, self._expect)
        freeing("open.clear", calls.ClearRows, self._clear)
        command("open.partitions", calls.Nothing, self._partitions)
        routes["open.list"] = Route(calls.InPartition, self._list)
        routes["open.progress"] = Route(calls.AskProgress, self._progress)
        routes["queue.audit"] = Route(calls.Nothing, self._audit)
        routes["queue.sync"] = Route(calls.Nothing, self._sync)
        return routes

    def _end(self, call: calls.EndRows) -> list[bool]:
        if call.drop:
            return self._table.claims.drop(call.lease, call.rows, call.reason)
        return self._table.give_back(call.lease, call.rows, call.reason)

    def _snapshot(self, call: calls.AskSnapshot) -> PartitionSnapshot:
        return snapshot(self._table.state.partition(call.partition), step=call.step)

    def _claim(self, call: calls.ClaimRows) -> Soon[calls.Claimed]:
        late: list[str] = []
        if call.done:
            ok = self._table.claims.acknowledge(call.done)
            late = [lease for lease, done in zip(call.done, ok, strict=True) if not done]
        claim = Claim(
            partition=call.partition,
            task=call.task,
            worker=call.worker,
            ticket=call.ticket,
            version_filter=VersionFilter(call.version, tuple(call.accept)) if call.version is not None else ANY,
            max_rows=call.max_rows,
            max_groups=call.max_groups,
            min_rows=call.min_rows,
            max_tokens=call.max_tokens,
            until_done=call.until_done,
        )
        return self._controller.claim(claim, call.wait_s, late)

    def _slot(self, call: calls.AskSlot) -> Soon[calls.Slotted]:
        training = self._table.training

        def attempt() -> calls.Slotted | None:
            slot = training.slot(
                call.partition,
                attempt=call.attempt,
                step=call.step,
                slot=call.slot,
                rank=call.rank,
                tokens=call.tokens,
            )
            if slot is not None:
                return calls.Slotted(slot)
            return calls.Slotted(None, ended=True) if training.over(call.partition, call.step) else None

        return self._controller.until(call.partition, attempt, call.wait_s, lambda: calls.Slotted(None))

    def _wanted(self, call: calls.AskWanted) -> Soon[Wanted]:
        def changed() -> Wanted | None:
            wanted = self._table.wanted(call.partition)
            return wanted if wanted.revision != call.known else None

        return self._controller.until(call.partition, changed, call.wait_s, lambda: self._table.wanted(call.partition))

    async def _audit(self, _call: calls.Nothing, _frames: Frames) -> AuditReport:
        if (pending := self._controller.settle()) is not None:
            await asyncio.shield(pending)
        return await asyncio.to_thread(audit_ledger, self._controller.ledger_dir)

    async def _sync(self, _call: calls.Nothing, _frames: Frames) -> calls.Done:
        await self._controller.synced()
        return _DONE

    def _where(self, call: calls.AskWhere) -> list[int]:
        return self._table.moves.where(call.rows)

    def _next_order(self, call: unit_calls.AskMove) -> unit_calls.MoveOrder:
        self._sessions.check(call.session, self._controller.now())
        return self._sessions.next_order(call)

    def _announce(self, call: unit_calls.Announce) -> list[int]:
        self._sessions.check(call.session, self._controller.now())
        unknown = self._table.hold(call.session.location, call.held)
        if self._feed is not None:
            self._feed.held([held.row for held in call.held])
        if call.last:
            self._sessions.synced(call.session)
        return unknown

    def _admit(self, call: unit_calls.Admit) -> Soon[list[unit_calls.EntryResult]]:
        self._sessions.check(call.session, self._controller.now())
        verdicts = [self._verdict(entry, call.session) for entry in call.entries]
        if self._feed is not None:
            for entry, verdict in zip(call.entries, verdicts, strict=True):
                self._feed.held([row for row, ok in zip(entry.rows, verdict.ok, strict=False) if ok])
        return self._controller.safe(verdicts)

    def _lost(self, call: unit_calls.LostRows) -> None:
        self._sessions.check(call.session, self._controller.now())
        rows = self._table.state.rows
        self._table.lose_rows(
            [number for number in call.rows if number in rows and rows[number].location == call.session.location]
        )

    def _verdict(self, entry: unit_calls.Entry, session: unit_calls.Session) -> unit_calls.EntryResult:
        try:
            verdict = self._admitted(entry, session)
        except AsyncFlowError as error:
            return unit_calls.EntryResult([], error.to_wire())
        if isinstance(entry, unit_calls.NewRows):
            self._sessions.placed(session, sum(verdict.ok))
        return verdict

    def _admitted(self, entry: unit_calls.Entry, session: unit_calls.Session) -> unit_calls.EntryResult:
        table, numbers = self._table, entry.rows
        if isinstance(entry, unit_calls.NewRows):
            ok, rows = table.puts.put(entry)
            return unit_calls.EntryResult(ok, rows=[] if all(ok) else list(rows))
        if isinstance(entry, unit_calls.MovedRows):
            ok = table.move_in(session.location, numbers, entry)
        elif controller_of(entry.lease):
            table.add_written(entry)
            ok = [True] * len(numbers)
        elif entry.lease.startswith(calls.WRITE):
            ok = write(table.state, numbers, entry.cells, entry.tags)
        elif entry.reason:
            ok = table.give_back(entry.lease, numbers, entry.reason, entry.cells)
        else:
            ok = table.complete(entry.lease, numbers, entry.cells, entry.tags)
        return unit_calls.EntryResult(ok)

    def _watch(self, call: unit_calls.Watch) -> Soon[unit_calls.Orders]:
        self._sessions.check(call.session, self._controller.now())
        return self._sessions.orders(call)

    def _asked(self, name: str) -> Partition:
        """Return the partition for a question: one that nobody made stays unmade."""
        return self._state.partitions.get(name) or Partition(name)

    def _find(self, call: calls.FindRows) -> Found:
        return find(self._asked(call.partition), call.keys)

    def _peek(self, call: calls.Peek) -> PeekedRows:
        partition = self._asked(call.partition)
        if call.rows:
            rows = live_rows(self._state, call.rows, of=call.partition)
        else:
            rows = list(islice(list_rows(partition), call.most))
        return peek(self._state, partition, call.task, rows)

    def _reset(self, call: calls.Reset) -> int:
        return reset(self._state, self._state.partition(call.partition), call.task)

    def _expect(self, call: calls.Expect) -> None:
        expect(self._state, self._state.partition(call.partition), call.total)

    def _clear(self, call: calls.ClearRows) -> int:
        return sum(self._table.clear_rows(call.partition, call.rows))

    def _show(self, call: calls.InPartition) -> PartitionView:
        return view(self._table, call.partition, self._controller.now())

    def _partitions(self, _call: calls.Nothing) -> dict[str, int]:
        held = self._state.partitions
        return {name: held[name].counts.total() for name in sorted(held)}

    async def _list(self, call: calls.InPartition, _frames: Frames) -> Listing:
        made = Listing([], [], [])
        async for chunk in _chunks(list_rows(self._asked(call.partition))):
            part = listing(chunk)
            made.rows.extend(part.rows)
            made.keys.extend(part.keys)
            made.tags.extend(part.tags)
        return made

    async def _progress(self, call: calls.AskProgress, _frames: Frames) -> Progress:
        partition, done = self._asked(call.partition), 0
        if call.task:
            return consumed(partition, call.task)
        test = has_columns(call.columns)
        async for chunk in _chunks(list_rows(partition)):
            done += sum(map(test, chunk))
        return produced(partition, done=done)


def _or_done(reply: Any) -> Any:
    return _DONE if reply is None else reply


def _fields(call: Struct) -> list[Any]:
    return [getattr(call, name) for name in call.__struct_fields__]


async def _chunks(rows: Iterable[Row]) -> AsyncIterator[list[Row]]:
    for chunk in batches(rows, _CHUNK):
        yield chunk
        await asyncio.sleep(0)
