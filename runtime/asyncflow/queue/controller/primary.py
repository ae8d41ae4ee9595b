"""The primary: the controller of the rows, alone or with replicas that copy them and decide about their own tasks.

Queries about the whole queue are sent to every replica. Queries about a task of another controller are forwarded to it
once it knows the rows that are known here.

Invariants: a stopped replica delays only queries about its own tasks, until a deadline that names the replica.
``stats`` and ``show`` include the answers of the replicas, and name the silent ones. No answer about a task is
older than its query. With one controller, no changes are kept for replicas, and no replica is waited for.
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
from asyncflow.queue.controller.parking import MaybeAwaitable
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

_REPLY_S = 5.0
_RESPONSIVE_S = 2.0


class Primary(Handlers):
    """Controller 0. replicas: numbers of the other controllers; address: returns the address of each."""

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
        self._requested: dict[int, float] = {}

    def start(self) -> None:
        """Start to record changes for the replicas."""
        if self._replicas:
            self.feed.start()
        self._requested = dict.fromkeys(self._replicas, self.controller.now())

    async def close(self) -> None:
        """Close the connections to the replicas."""
        for replica in self._replicas.values():
            await replica.close()

    def silences(self) -> dict[int, float]:
        """Return the seconds since each replica requested changes; a running replica does so every 10 s or so."""
        now = self.controller.now()
        return {index: now - since for index, since in self._requested.items()}

    def expire(self, worker: str) -> None:
        """End all leases and claims of a worker that is known to be dead, here and at the replicas."""
        if self._replicas:
            self.feed.add(WorkerLost(worker))
        super().expire(worker)

    def routes(self) -> dict[str, Route]:
        """Return the routes for clients, for units and, if there are replicas, for replicas."""
        table, training, sessions, known = self.table, self.table.training, self._sessions, self.state.partitions
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
            "open.list": (calls.InPartition, lambda call: listing(list_rows(self.read_partition(call.partition)))),
            "open.find": (calls.FindRows, lambda call: find(self.read_partition(call.partition), call.keys)),
            "open.expect": (calls.Expect, spread(table.expect)),
            "open.clear": (calls.ClearRows, lambda call: sum(table.clear_rows(call.partition, call.rows))),
            "open.partitions": (calls.Nothing, lambda _: {name: p.counts.total() for name, p in sorted(known.items())}),
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
                "open.peek": (calls.Peek, self._at_its_controller("open.peek", PeekedRows, self.peek)),
                "open.progress": (calls.AskProgress, self._at_its_controller("open.progress", Progress, self.progress)),
                "replicas.follow": (calls.Follow, self._follow),
                "replicas.type": (calls.EnterTypes, self._enter_types),
                "replicas.drop": (calls.DropRows, self._drop),
            }
        return routes

    def _slot(self, call: calls.AskSlot) -> MaybeAwaitable[calls.Slotted]:
        training = self.table.training

        def attempt() -> calls.Slotted | None:
            if (slot := training.slot(call)) is not None:
                return calls.Slotted(slot)
            return calls.Slotted(None, ended=True) if training.over(call.partition, call.step) else None

        return self.controller.until(call.partition, attempt, call.wait_s, calls.Slotted(None))

    def _wanted(self, call: calls.AskWanted) -> MaybeAwaitable[Wanted]:
        def changed() -> Wanted | None:
            wanted = self.table.wanted(call.partition)
            return wanted if wanted.revision != call.known else None

        return self.controller.until(call.partition, changed, call.wait_s, self.table.wanted(call.partition))

    async def _sync(self, _call: calls.Nothing) -> calls.Done:
        await self.controller.synced()
        return calls.Done()

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
        rows, location = self.state.rows, call.session.location
        self.table.lose_rows([number for number in call.rows if number in rows and rows[number].location == location])

    def _follow(self, call: calls.Follow) -> MaybeAwaitable[calls.Feed]:
        if call.replica not in self._requested:
            what = f"there is no controller {call.replica}"
            raise Refused(what, where="controller", hint="Start as many as spec.transferQueue.controllers says")
        self._requested[call.replica] = self.controller.now()
        nothing = calls.Feed(self.feed.epoch, self.feed.position, [])
        return self.controller.until(FEED, partial(self.feed.answer, call.epoch, call.position), call.wait_s, nothing)

    def _enter_types(self, call: calls.EnterTypes) -> None:
        self.state.check_schema(self.state.partition(call.partition), call.dtypes)

    def _drop(self, call: calls.DropRows) -> list[bool]:
        """Drop rows permanently for their holder, except rows that a step has taken."""
        rows = [self.state.rows.get(number) for number in call.rows]
        ok = [row is not None and row.state is RowState.LIVE and row.group.partition == call.partition for row in rows]
        if dropped := [number for number, live in zip(call.rows, ok, strict=True) if live]:
            self.state.record(ev.RowsDropped(call.partition, dropped, call.reason))
        return ok

    async def _stats_of_all(self, call: calls.Nothing) -> QueueStats:
        return merge_stats(self.controller.stats(), *await self._send_to_responsive("queue.stats", call, QueueStats))

    async def _show_all(self, call: calls.InPartition) -> PartitionView:
        own = self.show(call)
        views, silent = await self._send_to_responsive("queue.show", call, PartitionView)
        elsewhere = self.read_partition(call.partition).elsewhere.items()
        missing = {index: sorted(name for name, remote in elsewhere if remote.controller == index) for index in silent}
        return merge_views(own, views, missing)

    async def _snapshot_of_all(self, call: calls.AskSnapshot) -> PartitionSnapshot:
        own = self.snapshot(call)
        return merge_snapshots(own, await self._send_to_all("queue.snapshot", call, PartitionSnapshot))

    async def _audit_all(self, call: calls.Nothing) -> AuditReport:
        own = await self.audit(call)
        return merge_audits(own, dict(enumerate(await self._send_to_all("queue.audit", call, AuditReport), 1)))

    def _at_its_controller(self, method: str, reply: type[R], own: Callable[[Any], R]) -> Callable[[Any], Awaitable[R]]:
        """Return a handler for calls about a task, which the controller of the task answers."""

        async def handle(call: Any) -> R:
            remote = self.read_partition(call.partition).elsewhere.get(call.task)
            if remote is not None:
                return await self._send(remote.controller, method, call, reply)
            answer = own(call)
            await self.controller.written()
            return answer

        return handle

    async def _reset_all(self, call: calls.Reset) -> int:
        """Reset one task at its controller, or all tasks at all controllers."""
        own = await self._at_its_controller("open.reset", int, self.reset)(call)
        return own if call.task is not None else own + sum(await self._send_to_all("open.reset", call, int))

    async def _send_to_responsive(self, method: str, call: Struct, reply: type[R]) -> tuple[list[R], list[int]]:
        """Return the answers of the replicas that answer soon, and the numbers of the silent ones."""
        answers: list[R] = []
        silent: list[int] = []

        async def send(index: int) -> None:
            try:
                answers.append(await self._send(index, method, call, reply, within_s=_RESPONSIVE_S))
            except (DeadlineExceeded, PeerLost) as why:
                log.info("controller %d did not answer: %s", index, why)
                silent.append(index)

        await asyncio.gather(*map(send, self._replicas))
        return answers, sorted(silent)

    async def _send_to_all(self, method: str, call: Struct, reply: type[R]) -> list[R]:
        """Return the answers of all replicas, in order."""
        return await asyncio.gather(*[self._send(index, method, call, reply) for index in self._replicas])

    async def _send(self, index: int, method: str, call: Struct, reply: type[R], *, within_s: float | None = None) -> R:
        """Query a replica once it knows the rows that are known here. Raises a DeadlineExceeded that names it."""
        within_s = _REPLY_S if within_s is None else within_s
        await self.controller.written()
        replica, reach = self._replicas[index], calls.Reach(self.feed.epoch, self.feed.position, within_s / 2)
        try:
            if await replica.call("replicas.reach", reach, bool, timeout=within_s):
                return await replica.call(method, call, reply, timeout=within_s)
        except DeadlineExceeded as late:
            raise DeadlineExceeded(f"{method}: no answer within {within_s:g} s", where=f"controller {index}") from late
        raise DeadlineExceeded(f"{method}: it has not caught up with the rows yet", where=f"controller {index}")
