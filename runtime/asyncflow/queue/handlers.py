"""What each call to the controller does: one line for a command, one method where there is more to it.

Invariant: a handler changes the table without waiting in between, and answers only through ``Controller.safe``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from asyncflow.errors import Refused
from asyncflow.flow.selection import Appetite
from asyncflow.net.rpc import RpcServer
from asyncflow.queue import calls, unit_calls
from asyncflow.queue.audit import audit_ledger
from asyncflow.queue.claims import Claim
from asyncflow.queue.messages import AuditReport, Wanted
from asyncflow.queue.report import snapshot
from asyncflow.queue.state import State

if TYPE_CHECKING:
    from asyncflow.queue.controller import Controller

Frames = Sequence[memoryview]


class Handlers:
    """The calls that a controller answers."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._table = controller.table
        self._sessions = controller.sessions

    def route(self, server: RpcServer) -> None:
        """Have ``server`` answer all of them."""
        table, training, now = self._table, self._table.training, self._controller.now

        def command(method: str, request: type[Struct], act: Callable[[Any], Struct | None]) -> None:
            async def handle(call: Any, _frames: Frames) -> Struct:
                return await self._controller.safe(act(call) or calls.Done())

            server.route(method, request, handle)

        command("queue.declare", calls.Declare, lambda c: table.declare(c.specs))
        command("queue.renew", calls.Renew, lambda c: calls.Renewed(table.claims.renew(c.leases, now())))
        command("queue.end", calls.EndRows, self._end)
        command("queue.abandon", calls.Abandon, lambda c: table.claims.abandon(c.worker, c.ticket))
        command("queue.expire", calls.Expire, lambda c: table.claims.expire_worker(c.worker))
        command("queue.open_step", calls.OpenStep, lambda c: training.open_step(*_fields(c)))
        command("queue.begin", calls.Begin, lambda c: training.begin(*_fields(c)))
        command("queue.step_done", calls.StepDone, lambda c: training.step_done(*_fields(c)))
        command("queue.commit", calls.Commit, lambda c: training.commit(*_fields(c)))
        command("queue.take_over", calls.TakeOver, lambda c: table.take_over(*_fields(c)))
        command("queue.clear", calls.Clear, lambda c: table.clear(*_fields(c)))
        command("queue.close", calls.Close, lambda c: table.close(c.partition, c.step))
        command("queue.stats", calls.Nothing, lambda _: self._controller.stats())
        command("queue.snapshot", calls.InPartition, self._snapshot)
        command("units.hello", unit_calls.Hello, lambda c: self._sessions.greet(c, now()))
        command("units.announce", unit_calls.Announce, self._announce)
        command("units.admit", unit_calls.Admit, self._admit)
        server.route("units.watch", unit_calls.Watch, self._watch)
        server.route("queue.claim", calls.ClaimRows, self._claim)
        server.route("queue.slot", calls.AskSlot, self._slot)
        server.route("queue.wanted", calls.AskWanted, self._wanted)
        server.route("queue.audit", calls.Nothing, self._audit)

    def _end(self, call: calls.EndRows) -> calls.Verdicts:
        if call.drop:
            return calls.Verdicts(self._table.claims.drop(call.lease, call.rows, call.reason))
        return calls.Verdicts(self._table.give_back(call.lease, call.rows, call.reason))

    def _snapshot(self, call: calls.InPartition) -> calls.Snapshot:
        return calls.Snapshot(snapshot(self._table.books.partition(call.partition)))

    async def _claim(self, call: calls.ClaimRows, _frames: Frames) -> calls.Claimed:
        claim = Claim(
            partition=call.partition,
            task=call.task,
            worker=call.worker,
            ticket=call.ticket,
            appetite=Appetite(call.version, tuple(call.accept)),
            max_rows=call.max_rows,
            max_groups=call.max_groups,
        )

        def ended() -> bool:
            return self._ended(call.partition, call.task)

        rows = await self._controller.claim(claim, ended, call.wait_s)
        return await self._controller.safe(calls.Claimed(rows, not rows and ended()))

    def _ended(self, partition: str, task: str) -> bool:
        """Tell whether a closed partition has nothing for the task that is not done or in somebody's hands."""
        held = self._table.books.partitions.get(partition)
        if held is None or held.closed is None or held.wanted:
            return False
        if any(step > held.closed for step in held.gang.steps):
            return False
        rows = (row for group in held.groups.values() for row in group.rows.values() if row.state is State.LIVE)
        return all((work := row.work.get(task)) is not None and (work.done or work.lease) for row in rows)

    async def _slot(self, call: calls.AskSlot, _frames: Frames) -> calls.Slotted:
        slot = await self._controller.until(
            call.partition,
            lambda: self._table.training.slot(
                call.partition,
                attempt=call.attempt,
                step=call.step,
                slot=call.slot,
                rank=call.rank,
                tokens=call.tokens,
            ),
            call.wait_s,
        )
        return await self._controller.safe(calls.Slotted(slot))

    async def _wanted(self, call: calls.AskWanted, _frames: Frames) -> Wanted:
        def changed() -> Wanted | None:
            wanted = self._table.wanted(call.partition)
            return wanted if wanted.revision != call.known else None

        wanted = await self._controller.until(call.partition, changed, call.wait_s)
        return await self._controller.safe(wanted or self._table.wanted(call.partition))

    async def _audit(self, _call: calls.Nothing, _frames: Frames) -> AuditReport:
        await self._controller.safe(None)
        return await asyncio.to_thread(audit_ledger, self._controller.ledger_dir)

    def _announce(self, call: unit_calls.Announce) -> unit_calls.Strangers:
        self._sessions.check(call.session, self._controller.now())
        strangers = self._table.hold(call.held)
        if call.last:
            self._sessions.synced(call.session)
        return unit_calls.Strangers(strangers)

    def _admit(self, call: unit_calls.Admit) -> unit_calls.Admitted:
        self._sessions.check(call.session, self._controller.now())
        return unit_calls.Admitted([self._verdict(entry) for entry in call.entries])

    def _verdict(self, entry: unit_calls.Entry) -> unit_calls.Verdict:
        try:
            if isinstance(entry, unit_calls.NewRows):
                ok = self._table.create(entry.metas, entry.rows, entry.group_size, entry.cells, attempt=entry.attempt)
            elif entry.reason:
                ok = self._table.give_back(entry.lease, entry.rows, entry.reason, entry.cells)
            else:
                ok = self._table.complete(entry.lease, entry.rows, entry.cells, entry.tags)
        except Refused as error:
            return unit_calls.Verdict([], error.to_wire())
        return unit_calls.Verdict(ok)

    async def _watch(self, call: unit_calls.Watch, _frames: Frames) -> unit_calls.Orders:
        self._sessions.check(call.session, self._controller.now())
        return await self._sessions.orders(call)


def _fields(call: Struct) -> list[Any]:
    return [getattr(call, name) for name in call.__struct_fields__]
