"""A replica: a controller that follows the rows of the primary, and decides about the leases of its own tasks.

It asks what happened to rows, takes it in, and asks again. Where it is too far behind, or the primary is another than
before, it takes a snapshot, in parts, beside what it has, and goes on with what it has until that is whole.

Invariants: a completion is admitted only with dtypes that the primary has entered; a row ends by the primary's word
alone, so who drops one waits for it; what is answered after ``reach`` is no older than what was asked for; a replica
whose state does not agree with what it is told mends itself by a snapshot; nothing that the primary does or fails to do
ends a replica.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from asyncflow.errors import AsyncFlowError, LedgerCorrupt
from asyncflow.queue.controller.handlers import Address, Handlers, Route
from asyncflow.queue.controller.parking import Soon
from asyncflow.queue.protocol import calls, unit_calls
from asyncflow.queue.table.replication import FEED, WorkerLost, decode, draft_of, install, take
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.tls import Credentials

if TYPE_CHECKING:
    from asyncflow.queue.controller.controller import Controller

log = logging.getLogger(__name__)

_PARK_S = 10.0
_CALL_S = 10.0
_TYPES_S = 2.0
_AGAIN_S = 0.1
_LONGEST_S = 1.0
_TURN = 64
"""Items after which others have their turn."""


class Follower:
    """Keeps the state in step with the primary. epoch: its own; position: in its feed; 0 before a first snapshot."""

    def __init__(self, controller: Controller, primary: RpcClient) -> None:
        self.epoch = 0
        self.position = 0
        self._state = controller.table.state
        self._controller = controller
        self._client = primary

    def knows(self, epoch: int, position: int) -> bool:
        """Return whether everything up to a place in the feed of that primary is known here."""
        return epoch == self.epoch and position <= self.position

    async def run(self) -> None:
        """Follow for ever."""
        pause = _AGAIN_S
        while True:
            try:
                await self._step()
                pause = _AGAIN_S
            except LedgerCorrupt as wrong:
                log.warning("what the primary told does not agree with what is here, which is read anew: %s", wrong)
                self.epoch = 0
            except AsyncFlowError as lost:
                log.info("the primary is not heard: %s", lost)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_S)

    async def _ask(self, position: int, *, part: int = 0) -> calls.Feed:
        ask = calls.Follow(self._state.index, self.epoch, position, part, _PARK_S)
        return await self._client.call("replicas.follow", ask, calls.Feed, timeout=_PARK_S + _CALL_S)

    async def _step(self) -> None:
        feed = await self._ask(self.position)
        if feed.parts:
            await self._take_snapshot(feed)
            return
        for count, raw in enumerate(feed.items, 1):
            self._state.now = self._controller.now()
            if isinstance(item := decode(raw), WorkerLost):
                self._controller.table.claims.expire_worker(item.worker)
            else:
                take(self._state, item)
            if count % _TURN == 0:
                self._controller.settle()
                await asyncio.sleep(0)
        self._arrived(feed)

    async def _take_snapshot(self, feed: calls.Feed) -> None:
        """Take a snapshot, of which ``feed`` is the first part."""
        log.info("taking a snapshot of the primary's rows, in %d parts", feed.parts)
        draft = draft_of(self._state)
        draft.now = self._controller.now()
        for number in range(1, feed.parts + 1):
            for raw in feed.items:
                take(draft, decode(raw))
                await asyncio.sleep(0)
            if number < feed.parts:
                feed = await self._ask(feed.position, part=number)
        self._controller.settle()
        install(self._state, draft)
        await self._controller.rewrite()
        self._arrived(feed)

    def _arrived(self, feed: calls.Feed) -> None:
        self.epoch, self.position = feed.epoch, feed.position
        self._state.changed.add(FEED)
        self._controller.settle()


class Replica(Handlers):
    """A controller that is not the primary. address: of each controller."""

    def __init__(self, controller: Controller, *, address: Address, credentials: Credentials | None) -> None:
        super().__init__(controller)
        index = self.state.index
        self._primary = RpcClient(
            name=f"controller {index}", resolve=lambda: address(0), credentials=credentials, expects=("controller",)
        )
        self._follower = Follower(controller, self._primary)
        self._following: asyncio.Task[None] | None = None

    def routes(self) -> dict[str, Route]:
        """Return how each method is answered, to clients and units as far as its own tasks go, and to the primary."""
        return {
            **super().routes(),
            "queue.end": (calls.EndRows, self._return_or_drop),
            "replicas.admit": (unit_calls.AdmitCells, self._admit),
            "replicas.reach": (calls.Reach, self._reach),
        }

    def start(self) -> None:
        """Begin to follow the primary."""
        self._following = asyncio.create_task(self._follower.run(), name="follower")

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self.controller.fail(error)

        self._following.add_done_callback(ended)

    async def close(self) -> None:
        """Follow no longer."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
        await self._primary.close()

    def ready(self) -> tuple[bool, str]:
        """Return whether the primary has told it of its rows."""
        told = self._follower.epoch > 0
        return told, "ready" if told else "the primary has not told it of its rows yet"

    def _reach(self, call: calls.Reach) -> Soon[bool]:
        def reached() -> bool | None:
            return self._follower.knows(call.epoch, call.position) or None

        return self.controller.until(FEED, reached, call.wait_s, False)

    async def _admit(self, call: unit_calls.AdmitCells) -> list[unit_calls.EntryResult]:
        """Admit cells in order. One call may wait for the primary for ``_TYPES_S`` in all, as others may not wait."""
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
        """Have the primary enter those columns of a completion that nobody has written before."""
        lease = self.table.claims.holder(entry.lease)
        if lease is None or entry.reason:
            return
        known = self.state.partitions[lease.partition].schema
        if new := {name: dtype for name, dtype in entry.cells.dtypes.items() if name not in known}:
            enter = calls.EnterTypes(self.state.index, lease.partition, new)
            await self._primary.call("replicas.type", enter, calls.Done, timeout=until - self.controller.now())

    def _return_or_drop(self, call: calls.EndRows) -> Soon[list[bool]]:
        return self._drop(call) if call.drop else self.table.give_back(call.lease, call.rows, call.reason)

    async def _drop(self, call: calls.EndRows) -> list[bool]:
        lease = self.table.claims.holder(call.lease)
        held = [row for row in dict.fromkeys(call.rows) if lease is not None and row in lease.rows]
        if lease is None or not held:
            return [False] * len(call.rows)
        drop = calls.DropRows(self.state.index, lease.partition, held, call.reason)
        ok = await self._primary.call("replicas.drop", drop, list[bool], timeout=_CALL_S)
        dropped = {row for row, gone in zip(held, ok, strict=True) if gone}
        return [row in dropped for row in call.rows]
