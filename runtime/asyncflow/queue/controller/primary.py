"""The primary: the controller that has the rows, alone, or with replicas that follow them and decide about their tasks.

Questions about the whole queue are asked of every replica, those about a task of another controller are passed on to it
when it knows of rows what is known here.

Invariants: a replica that is stopped holds up only who asks about its tasks, until a deadline that names it; ``stats``
and ``show`` say what the others tell, and which are silent; no answer about a task is older than its question; where
there is one controller, nothing is kept for others, and nothing is waited for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, PeerLost, Refused
from asyncflow.queue.controller.handlers import Address, Handlers, Route, spread
from asyncflow.queue.controller.parking import Soon
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.ledger.audit import merge_audits
from asyncflow.queue.protocol import calls, unit_calls
from asyncflow.queue.protocol.calls import WRITE
from asyncflow.queue.protocol.messages import (
    AuditReport,
    PartitionSnapshot,
    PartitionView,
    PeekedRows,
    Progress,
    QueueStats,
    Wanted,
)
from asyncflow.queue.table.replication import FEED, ChangeFeed, WorkerLost
from asyncflow.queue.table.report import find, listing, merge_snapshots, merge_stats, merge_views
from asyncflow.queue.table.rows import list_rows, put, write
from asyncflow.queue.table.state import RowState
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.tls import Credentials

if TYPE_CHECKING:
    from asyncflow.queue.controller.controller import Controller

log = logging.getLogger(__name__)

R = TypeVar("R")

_ASK_S = 5.0
_LOOK_S = 2.0


class Primary(Handlers):
    """Controller 0. replicas: the numbers of the others; address: of each."""

    def __init__(
        self, controller: Controller, *, replicas: range, address: Address, credentials: Credentials | None
    ) -> None:
        super().__init__(controller)
        self.feed = ChangeFeed(self.state)
        self._sessions = controller.sessions
        self._replicas = {
            index: RpcClient(
                name=f"controller 0 for {index}",
                resolve=partial(address, index),
                credentials=credentials,
                expects=("controller",),
            )
            for index in replicas
        }
        self._asked: dict[int, float] = {}

    def start(self) -> None:
        """Begin to tell replicas what happens."""
        if self._replicas:
            self.feed.start()
        self._asked = dict.fromkeys(self._replicas, self.controller.now())

    async def close(self) -> None:
        """Talk to replicas no longer."""
        for replica in self._replicas.values():
            await replica.close()

    def silences(self) -> dict[int, float]:
        """Return the seconds since each replica asked what happened; one that lives asks every ten or so."""
        now = self.controller.now()
        return {index: now - asked for index, asked in self._asked.items()}

    def expire(self, worker: str) -> None:
        """End all leases and claims of a worker that is known to be dead, here and at the replicas."""
        if self._replicas:
            self.feed.add(WorkerLost(worker))
        super().expire(worker)

    def routes(self) -> dict[str, Route]:
        """Return how each method is answered, to clients, to units and, where there are some, to replicas."""
        table, training, sessions = self.table, self.table.training, self._sessions
        routes: dict[str, Route] = {
            **super().routes(),
            "queue.declare": (calls.Declare, spread(table.declare)),
            "queue.open_step": (calls.OpenStep, spread(training.open_step)),
            "queue.exchange": (calls.Exchange, spread(training.exchange)),
            "queue.begin": (calls.Begin, spread(training.begin)),
            "queue.slot": (calls.AskSlot, self._slot),
            "queue.step_done": (calls.StepDone, spread(training.step_done)),
            "queue.commit": (calls.TrainerStep, spread(training.commit)),
            "queue.wanted": (calls.AskWanted, self._wanted),
            "queue.take_over": (calls.CreatorAttempt, spread(table.take_over)),
            "queue.clear": (calls.CreatorAttempt, spread(table.clear)),
            "queue.close": (calls.Close, spread(table.close)),
            "queue.sync": (calls.Nothing, self._sync),
            "queue.drain": (calls.Drain, sessions.drain),
            "queue.where": (calls.AskWhere, spread(table.moves.where)),
            "queue.units": (calls.Nothing, lambda _: sessions.views(self.controller.now())),
            "open.list": (calls.InPartition, lambda call: listing(list_rows(self.asked(call.partition)))),
            "open.find": (calls.FindRows, lambda call: find(self.asked(call.partition), call.keys)),
            "open.expect": (calls.Expect, spread(table.expect)),
            "open.clear": (calls.ClearRows, lambda call: sum(table.clear_rows(call.partition, call.rows))),
            "open.partitions": (calls.Nothing, self._partitions),
            "units.hello": (unit_calls.Hello, lambda hello: sessions.greet(hello, self.controller.now())),
            "units.announce": (unit_calls.Announce, self._announce),
            "units.admit": (unit_calls.Admit, self._admit),
            "units.lost": (unit_calls.LostRows, self._lost),
            "units.move": (unit_calls.AskMove, lambda ask: sessions.next_order(ask, self.controller.now())),
            "units.watch": (unit_calls.Watch, lambda watch: sessions.orders(watch, self.controller.now())),
        }
        if self._replicas:
            routes |= {
                "queue.stats": (calls.Nothing, self._stats_of_all),
                "queue.show": (calls.InPartition, self._show_all),
                "queue.snapshot": (calls.AskSnapshot, self._snapshot_of_all),
                "queue.audit": (calls.Nothing, self._audit_all),
                "open.reset": (calls.Reset, self._reset_all),
                "open.peek": (calls.Peek, self._where_it_is("open.peek", PeekedRows, self.peek)),
                "open.progress": (calls.AskProgress, self._where_it_is("open.progress", Progress, self.progress)),
                "replicas.follow": (calls.Follow, self._follow),
                "replicas.type": (calls.EnterTypes, self._enter_types),
                "replicas.drop": (calls.DropRows, self._drop),
            }
        return routes

    def _slot(self, call: calls.AskSlot) -> Soon[calls.Slotted]:
        training = self.table.training

        def attempt() -> calls.Slotted | None:
            if (slot := training.slot(call)) is not None:
                return calls.Slotted(slot)
            return calls.Slotted(None, ended=True) if training.over(call.partition, call.step) else None

        return self.controller.until(call.partition, attempt, call.wait_s, calls.Slotted(None))

    def _wanted(self, call: calls.AskWanted) -> Soon[Wanted]:
        def changed() -> Wanted | None:
            wanted = self.table.wanted(call.partition)
            return wanted if wanted.revision != call.known else None

        return self.controller.until(call.partition, changed, call.wait_s, self.table.wanted(call.partition))

    async def _sync(self, _call: calls.Nothing) -> calls.Done:
        await self.controller.synced()
        return calls.Done()

    def _partitions(self, _call: calls.Nothing) -> dict[str, int]:
        return {name: partition.counts.total() for name, partition in sorted(self.state.partitions.items())}

    def _announce(self, call: unit_calls.Announce) -> list[int]:
        self._sessions.check(call.session, self.controller.now())
        unknown = self.table.hold(call.session.location, call.held)
        if self._replicas:
            self.feed.held([held.row for held in call.held])
        if call.last:
            self._sessions.synced(call.session)
        return unknown

    def _admit(self, call: unit_calls.Admit) -> list[unit_calls.EntryResult]:
        self._sessions.check(call.session, self.controller.now())
        results = []
        for entry in call.entries:
            try:
                result = self._admitted(call.session, entry)
            except AsyncFlowError as error:
                result = unit_calls.EntryResult([], error.to_wire())
            results.append(result)
            if self._replicas:
                self.feed.held(compress(entry.rows, result.ok))
        return results

    def _admitted(self, session: unit_calls.Session, entry: unit_calls.Entry) -> unit_calls.EntryResult:
        if isinstance(entry, unit_calls.NewRows):
            ok, rows = put(self.state, entry)
            return unit_calls.EntryResult(ok, rows=[] if all(ok) else list(rows))
        if isinstance(entry, unit_calls.MovedRows):
            ok = self.table.move_in(session.location, entry)
        elif entry.lease.startswith(WRITE):
            ok = write(self.state, entry.rows, entry.cells, entry.tags)
        else:
            ok = self.admit_cells(entry)
        return unit_calls.EntryResult(ok)

    def _lost(self, call: unit_calls.LostRows) -> None:
        self._sessions.check(call.session, self.controller.now())
        rows, here = self.state.rows, call.session.location
        self.table.lose_rows([number for number in call.rows if number in rows and rows[number].location == here])

    def _follow(self, call: calls.Follow) -> Soon[calls.Feed]:
        if call.replica not in self._asked:
            what = f"there is no controller {call.replica}"
            raise Refused(what, where="controller", hint="Start as many as spec.transferQueue.controllers says")
        self._asked[call.replica] = self.controller.now()
        nothing = calls.Feed(self.feed.epoch, self.feed.position, [])
        changes = partial(self.feed.answer, call.epoch, call.position)
        return self.controller.until(FEED, changes, call.wait_s, nothing)

    def _enter_types(self, call: calls.EnterTypes) -> None:
        self.state.check_schema(self.state.partition(call.partition), call.dtypes)

    def _drop(self, call: calls.DropRows) -> list[bool]:
        """Drop rows for ever whose holder says so; a row that a step has taken stays."""
        rows = [self.state.rows.get(number) for number in call.rows]
        ok = [row is not None and row.state is RowState.LIVE and row.group.partition == call.partition for row in rows]
        if dropped := [number for number, here in zip(call.rows, ok, strict=True) if here]:
            self.state.record(ev.RowsDropped(call.partition, dropped, call.reason))
        return ok

    async def _stats_of_all(self, call: calls.Nothing) -> QueueStats:
        return merge_stats(self.controller.stats(), *await self._ask_willing("queue.stats", call, QueueStats))

    async def _show_all(self, call: calls.InPartition) -> PartitionView:
        own = self.show(call)
        views, silent = await self._ask_willing("queue.show", call, PartitionView)
        elsewhere = self.asked(call.partition).elsewhere.items()
        lacking = {index: sorted(name for name, there in elsewhere if there.controller == index) for index in silent}
        return merge_views(own, views, lacking)

    async def _snapshot_of_all(self, call: calls.AskSnapshot) -> PartitionSnapshot:
        own = self.snapshot(call)
        return merge_snapshots(own, await self._ask_all("queue.snapshot", call, PartitionSnapshot))

    async def _audit_all(self, call: calls.Nothing) -> AuditReport:
        own = await self.audit(call)
        return merge_audits(own, dict(enumerate(await self._ask_all("queue.audit", call, AuditReport), 1)))

    def _where_it_is(self, method: str, reply: type[R], own: Callable[[Any], R]) -> Callable[[Any], Awaitable[R]]:
        """Return a handler for calls about a task, which its own controller answers."""

        async def ask(call: Any) -> R:
            there = self.asked(call.partition).elsewhere.get(call.task)
            if there is not None:
                return await self._ask(there.controller, method, call, reply)
            answer = own(call)
            await self.controller.written()
            return answer

        return ask

    async def _reset_all(self, call: calls.Reset) -> int:
        """Reset one task where it is, or all tasks everywhere."""
        own = await self._where_it_is("open.reset", int, self.reset)(call)
        return own if call.task is not None else own + sum(await self._ask_all("open.reset", call, int))

    async def _ask_willing(self, method: str, call: Struct, reply: type[R]) -> tuple[list[R], list[int]]:
        """Return what the replicas say that answer soon, and which do not."""
        said: list[R] = []
        silent: list[int] = []

        async def ask(index: int) -> None:
            try:
                said.append(await self._ask(index, method, call, reply, within_s=_LOOK_S))
            except (DeadlineExceeded, PeerLost) as why:
                log.info("controller %d is silent: %s", index, why)
                silent.append(index)

        await asyncio.gather(*map(ask, self._replicas))
        return said, sorted(silent)

    async def _ask_all(self, method: str, call: Struct, reply: type[R]) -> list[R]:
        """Return what every replica says, in their order."""
        return await asyncio.gather(*[self._ask(index, method, call, reply) for index in self._replicas])

    async def _ask(self, index: int, method: str, call: Struct, reply: type[R], *, within_s: float | None = None) -> R:
        """Ask a replica, when it knows what is known here. Raises DeadlineExceeded that names it."""
        within_s = _ASK_S if within_s is None else within_s
        await self.controller.written()
        replica, reach = self._replicas[index], calls.Reach(self.feed.epoch, self.feed.position, within_s / 2)
        try:
            if await replica.call("replicas.reach", reach, bool, timeout=within_s):
                return await replica.call(method, call, reply, timeout=within_s)
        except DeadlineExceeded as late:
            raise DeadlineExceeded(f"{method}: no answer within {within_s:g} s", where=f"controller {index}") from late
        raise DeadlineExceeded(f"{method}: it has not caught up with the rows yet", where=f"controller {index}")
