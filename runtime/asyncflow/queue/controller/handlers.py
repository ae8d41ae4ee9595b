"""What each call to the controller does: one line for a command, one method where there is more to it.

Invariant: a handler changes the table without waiting in between, and answers only what ``Controller`` calls safe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from asyncflow.errors import AsyncFlowError, ProtocolError
from asyncflow.flow.selection import Appetite
from asyncflow.queue.controller.open_handlers import OpenHandlers
from asyncflow.queue.controller.routes import Routes
from asyncflow.queue.controller.serving import Serving, Soon
from asyncflow.queue.ledger.audit import audit_ledger
from asyncflow.queue.protocol import calls, moving_calls, open_calls, unit_calls
from asyncflow.queue.protocol.messages import AuditReport, Wanted
from asyncflow.queue.protocol.runs import expand, shrink, shrink_equal
from asyncflow.queue.protocol.shard_calls import controller_of
from asyncflow.queue.table import open_table
from asyncflow.queue.table.claims import ANY, Claim
from asyncflow.queue.table.feed import NewsFeed
from asyncflow.queue.table.news import gained
from asyncflow.queue.table.replica import gain
from asyncflow.queue.table.report import snapshot
from asyncflow.queue.table.taking import take_over

Frames = Sequence[memoryview]
_DONE = calls.Done()
_PUTS = (unit_calls.NewRows, unit_calls.OpenRows)


class Handlers:
    """The calls that a controller answers. feed: told of what is admitted, where others follow."""

    def __init__(self, controller: Serving, *, feed: NewsFeed | None = None) -> None:
        self._feed = feed
        self._controller = controller
        self._table = controller.table
        self._sessions = controller.sessions

    def route(self, server: Routes) -> None:
        """Have ``server`` answer all of them."""
        table, training, now = self._table, self._table.training, self._controller.now

        def answer(method: str, request: type[Struct], act: Callable[[Any], Soon[Any]]) -> None:
            def handle(call: Any, _frames: Frames) -> Soon[Any]:
                table.books.now = now()
                try:
                    return act(call)
                except AsyncFlowError:
                    self._controller.settle()
                    raise

            server.route_now(method, request, handle)

        def command(method: str, request: type[Struct], act: Callable[[Any], Struct | None]) -> None:
            answer(method, request, lambda call: self._controller.safe(act(call) or _DONE))

        def freeing(method: str, request: type[Struct], act: Callable[[Any], Struct | None]) -> None:
            answer(method, request, lambda call: self._controller.freed(act(call) or _DONE))

        command("queue.declare", calls.Declare, lambda c: table.declare(c.specs))
        command("queue.acknowledge", calls.Acknowledge, lambda c: calls.Verdicts(table.claims.acknowledge(c.leases)))
        command("queue.renew", calls.Renew, lambda c: calls.Renewed(table.claims.renew(c.leases, now())))
        command("queue.end", calls.EndRows, self._end)
        command("queue.abandon", calls.Abandon, lambda c: table.claims.abandon(c.worker, c.ticket))
        command("queue.withdraw", calls.Withdraw, lambda c: self._controller.withdraw(c.worker, c.ticket))
        command("queue.expire", calls.Expire, lambda c: table.claims.expire_worker(c.worker))
        command("queue.open_step", calls.OpenStep, lambda c: training.open_step(*_fields(c)))
        command("queue.begin", calls.Begin, lambda c: training.begin(*_fields(c)))
        command("queue.step_done", calls.StepDone, lambda c: training.step_done(*_fields(c)))
        command("queue.commit", calls.Commit, lambda c: training.commit(*_fields(c)))
        command("queue.take_over", calls.TakeOver, lambda c: table.take_over(*_fields(c)))
        freeing("queue.clear", calls.Clear, lambda c: table.clear(*_fields(c)))
        command("queue.close", calls.Close, lambda c: table.close(c.partition, c.step))
        command("queue.stats", calls.Nothing, lambda _: self._controller.stats())
        command("queue.snapshot", calls.AskSnapshot, self._snapshot)
        command("units.hello", unit_calls.Hello, lambda c: self._sessions.greet(c, now()))
        command("units.announce", unit_calls.Announce, self._announce)
        answer("units.admit", unit_calls.Admit, self._admit)
        command("units.lost", unit_calls.LostRows, self._lost)
        command("queue.drain", moving_calls.Drain, self._sessions.drain)
        command("queue.where", moving_calls.AskWhere, self._where)
        command("queue.units", calls.Nothing, lambda _: self._sessions.views(now()))
        command("queue.shares", calls.Nothing, lambda _: self._sessions.shares())
        command("units.leg", moving_calls.AskLeg, self._leg)
        answer("units.watch", unit_calls.Watch, self._watch)
        answer("queue.claim", calls.ClaimRows, self._claim)
        answer("queue.slot", calls.AskSlot, self._slot)
        answer("queue.wanted", calls.AskWanted, self._wanted)
        server.route("queue.audit", calls.Nothing, self._audit)
        server.route("queue.sync", calls.Nothing, self._sync)
        OpenHandlers(self._controller).route(server, command, freeing=freeing)

    def _end(self, call: calls.EndRows) -> calls.Verdicts:
        if call.drop:
            return calls.Verdicts(self._table.claims.drop(call.lease, expand(call.rows), call.reason))
        return calls.Verdicts(self._table.give_back(call.lease, expand(call.rows), call.reason))

    def _snapshot(self, call: calls.AskSnapshot) -> calls.Snapshot:
        return calls.Snapshot(snapshot(self._table.books.partition(call.partition), step=call.step))

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
            appetite=Appetite(call.version, tuple(call.accept)) if call.version is not None else ANY,
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
                return calls.Slotted(slot.shrunk())
            return calls.Slotted(None, ended=True) if training.over(call.partition, call.step) else None

        return self._controller.until(call.partition, attempt, call.wait_s, lambda: calls.Slotted(None))

    def _wanted(self, call: calls.AskWanted) -> Soon[Wanted]:
        def changed() -> Wanted | None:
            wanted = self._table.wanted(call.partition)
            return wanted if wanted.revision != call.known else None

        return self._controller.until(call.partition, changed, call.wait_s, lambda: self._table.wanted(call.partition))

    async def _audit(self, _call: calls.Nothing, _frames: Frames) -> AuditReport:
        if (pending := self._controller.settle()) is not None:
            await pending
        return await asyncio.to_thread(audit_ledger, self._controller.ledger_dir)

    async def _sync(self, _call: calls.Nothing, _frames: Frames) -> calls.Done:
        await self._controller.synced()
        return _DONE

    def _where(self, call: moving_calls.AskWhere) -> moving_calls.Whereabouts:
        return moving_calls.Whereabouts(shrink_equal(self._table.moves.where(expand(call.rows))))

    def _leg(self, call: moving_calls.AskLeg) -> moving_calls.Leg:
        self._sessions.check(call.session, self._controller.now())
        return self._sessions.leg(call)

    def _announce(self, call: unit_calls.Announce) -> unit_calls.Strangers:
        self._sessions.check(call.session, self._controller.now())
        strangers = self._table.hold(call.session.home, call.held)
        if self._feed is not None:
            others = frozenset(strangers)
            self._feed.recalled([held for held in call.held if held.row not in others])
        if call.last:
            self._sessions.synced(call.session)
        return unit_calls.Strangers(strangers)

    def _admit(self, call: unit_calls.Admit) -> Soon[unit_calls.Admitted]:
        self._sessions.check(call.session, self._controller.now())
        verdicts = [self._verdict(entry, call.session) for entry in call.entries]
        if self._feed is not None:
            for entry, verdict in zip(call.entries, verdicts, strict=True):
                self._feed.admitted(entry, verdict.ok)
        return self._controller.safe(unit_calls.Admitted([verdict.short() for verdict in verdicts]))

    def _lost(self, call: unit_calls.LostRows) -> None:
        self._sessions.check(call.session, self._controller.now())
        rows = self._table.books.rows
        self._table.lose_rows(
            [number for number in call.rows if number in rows and rows[number].home == call.session.home]
        )

    def _verdict(self, entry: unit_calls.Entry, session: unit_calls.Session) -> unit_calls.Verdict:
        try:
            verdict = self._admitted(entry, session)
        except ValueError as wrong:
            return unit_calls.Verdict([], ProtocolError(str(wrong), where="controller").to_wire())
        except AsyncFlowError as error:
            return unit_calls.Verdict([], error.to_wire())
        if isinstance(entry, _PUTS):
            self._sessions.placed(session, sum(verdict.ok))
        return verdict

    def _admitted(self, entry: unit_calls.Entry, session: unit_calls.Session) -> unit_calls.Verdict:
        table, numbers = self._table, expand(entry.rows)
        if isinstance(entry, unit_calls.OpenRows):
            ok, rows = table.puts.put(
                entry.partition,
                client=entry.client,
                group=entry.group,
                size=entry.group_size,
                rows=numbers,
                cells=entry.cells,
                tags=entry.tags,
            )
            return unit_calls.Verdict(ok, rows=[] if all(ok) else shrink(rows))
        if isinstance(entry, unit_calls.MovedRows):
            ok = take_over(table, session.home, numbers, entry)
        elif isinstance(entry, unit_calls.NewRows):
            ok = table.create(entry.metas, numbers, entry.group_size, entry.cells, attempt=entry.attempt)
        elif controller_of(entry.lease):
            gain(table.books, gained(entry, ok := [True] * len(numbers)))
        elif entry.lease.startswith(open_calls.WRITE):
            ok = open_table.write(table.books, numbers, entry.cells, entry.tags)
        elif entry.reason:
            ok = table.give_back(entry.lease, numbers, entry.reason, entry.cells)
        else:
            ok = table.complete(entry.lease, numbers, entry.cells, entry.tags)
        return unit_calls.Verdict(ok)

    def _watch(self, call: unit_calls.Watch) -> Soon[unit_calls.Orders]:
        self._sessions.check(call.session, self._controller.now())
        return self._sessions.orders(call)


def _fields(call: Struct) -> list[Any]:
    return [getattr(call, name) for name in call.__struct_fields__]
