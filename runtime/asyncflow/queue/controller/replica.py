"""A replica: a controller that copies the rows of the primary, and decides about the leases of its own tasks.

It requests the changes of rows, applies them, and requests the next ones. If it is too far behind, or the primary has
restarted, it receives a snapshot next to its current state, and uses the current state until the snapshot is complete.

Invariants: a completion is admitted only with dtypes that the primary has entered. Only the primary ends rows, so
dropping a row waits for it. Answers after ``reach`` are no older than the requested position. A replica whose state
contradicts the feed repairs itself with a snapshot. No action or failure of the primary ends a replica.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from asyncflow.errors import AsyncFlowError, LedgerCorrupt
from asyncflow.queue.controller.handlers import Address, Handlers, Route
from asyncflow.queue.controller.parking import MaybeAwaitable
from asyncflow.queue.protocol import calls, unit_calls
from asyncflow.queue.table.apply import QueueState
from asyncflow.queue.table.replication import FEED, WorkerLost, decode, install, take
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.retry import Outage
from asyncflow.rpc.tls import Credentials

if TYPE_CHECKING:
    from asyncflow.queue.controller.controller import Controller

log = logging.getLogger(__name__)

_PARK_S = 10.0
_FOLLOW_S = 120.0
"""Time limit for a request for changes: a snapshot of many rows takes long."""
_CALL_S = 10.0
_TYPES_S = 2.0
_TURN = 64
"""Number of changes after which other work gets a turn."""


class Replica(Handlers):
    """A controller that is not the primary. address: returns the address of each controller."""

    def __init__(self, controller: Controller, *, address: Address, credentials: Credentials | None) -> None:
        super().__init__(controller)
        self._epoch = 0
        self._position = 0
        self._primary = RpcClient(
            name=f"controller {self.state.index}",
            resolve=lambda: address(0),
            credentials=credentials,
            expects=("controller",),
        )
        self._following: asyncio.Task[None] | None = None

    def routes(self) -> dict[str, Route]:
        """Return the routes for clients and units, as far as they concern its own tasks, and for the primary."""
        return {
            **super().routes(),
            "replicas.admit": (unit_calls.AdmitCells, self._admit),
            "replicas.reach": (calls.Reach, self._reach),
        }

    def start(self) -> None:
        """Start to follow the primary."""
        self._following = asyncio.create_task(self._follow(), name="follower")

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self.controller.fail(error)

        self._following.add_done_callback(ended)

    async def close(self) -> None:
        """Stop following the primary."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
        await self._primary.close()

    def ready(self) -> tuple[bool, str]:
        """Return whether the primary has sent its rows."""
        received = self._epoch > 0
        return received, "ready" if received else "the primary has not sent its rows yet"

    async def _follow(self) -> None:
        """Follow the primary forever."""
        outage = Outage("following the primary")
        while True:
            try:
                await self._step()
                outage.end()
            except AsyncFlowError as error:
                if isinstance(error, LedgerCorrupt):
                    self._epoch = 0
                await outage.wait(error)

    async def _step(self) -> None:
        """Request changes, and apply them."""
        ask = calls.Follow(self.state.index, self._epoch, self._position, _PARK_S)
        feed = await self._primary.call("replicas.follow", ask, calls.Feed, timeout=_FOLLOW_S)
        state = QueueState(self.state.index) if feed.snapshot else self.state
        for count, raw in enumerate(feed.items, 1):
            state.now = self.controller.now()
            if isinstance(item := decode(raw), WorkerLost):
                self.table.claims.expire_worker(item.worker)
            else:
                take(state, item)
            if feed.snapshot or count % _TURN == 0:
                self.controller.settle()
                await asyncio.sleep(0)
        if feed.snapshot:
            log.info("took a snapshot of the primary's rows")
            self.controller.settle()
            install(self.state, state)
            self.controller.begin_ledger()
        self._epoch, self._position = feed.epoch, feed.position
        self.state.changed.add(FEED)
        self.controller.settle()

    def _reach(self, call: calls.Reach) -> MaybeAwaitable[bool]:
        def reached() -> bool | None:
            return (call.epoch == self._epoch and call.position <= self._position) or None

        return self.controller.until(FEED, reached, call.wait_s, False)

    async def _admit(self, call: unit_calls.AdmitCells) -> list[unit_calls.EntryResult]:
        """Admit cells in order. One call waits for the primary for at most ``_TYPES_S`` in all, to not delay others."""
        until = self.controller.now() + _TYPES_S
        results = []
        for entry in call.entries:
            try:
                await self._enter_types(entry, until)
                results.append(unit_calls.EntryResult(self.admit_cells(entry)))
            except AsyncFlowError as error:
                results.append(unit_calls.EntryResult([], error.to_wire()))
        await self.controller.written()
        return results

    async def _enter_types(self, entry: unit_calls.NewCells, until: float) -> None:
        """Enter the dtypes of a completion's new columns at the primary."""
        lease = self.table.claims.holder(entry.lease)
        if lease is None or entry.outcome != "complete":
            return
        known = self.state.partitions[lease.partition].schema
        if new := {name: dtype for name, dtype in entry.cells.dtypes.items() if name not in known}:
            self.controller.settle()
            enter = calls.EnterTypes(lease.partition, self.state.index, new)
            await self._primary.call("replicas.type", enter, calls.Done, timeout=until - self.controller.now())

    def _end(self, call: calls.EndRows) -> MaybeAwaitable[list[bool]]:
        return self._drop(call) if call.drop else super()._end(call)

    async def _drop(self, call: calls.EndRows) -> list[bool]:
        if not (held := self.table.claims.held(call.lease, call.rows)):
            return [False] * len(call.rows)
        drop = calls.DropRows(self.state.rows[held[0]].group.partition, self.state.index, held, call.reason)
        ok = await self._primary.call("replicas.drop", drop, list[bool], timeout=_CALL_S)
        dropped = {row for row, done in zip(held, ok, strict=True) if done}
        return [row in dropped for row in call.rows]
