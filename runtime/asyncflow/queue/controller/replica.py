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
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from asyncflow.errors import AsyncFlowError, LedgerCorrupt, PeerLost
from asyncflow.queue.controller.handlers import Address, Awaiting, Frames, Handlers, Route, Standalone
from asyncflow.queue.controller.parking import Soon
from asyncflow.queue.protocol import calls, unit_calls
from asyncflow.queue.table.apply import QueueState
from asyncflow.queue.table.replication import FEED, decode, draft_of, install, take
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.tls import Credentials

if TYPE_CHECKING:
    from asyncflow.queue.controller.controller import Controller

log = logging.getLogger(__name__)

ANSWERED = frozenset(
    {
        "queue.claim",
        "queue.acknowledge",
        "queue.renew",
        "queue.end",
        "queue.abandon",
        "queue.withdraw",
        "queue.expire",
        "queue.stats",
        "queue.snapshot",
        "queue.show",
        "queue.audit",
        "open.peek",
        "open.reset",
        "open.progress",
    }
)
"""Calls that a replica answers as a controller that stands alone does, for its own tasks."""

_DROP_S = 10.0
_PARK_S = 10.0
_CALL_S = 10.0
_AGAIN_S = 0.1
_LONGEST_S = 1.0
_TURN = 64
"""Items after which others have their turn."""


class Follower:
    """Keeps the state in step with the primary. home: its epoch; position: in its feed; 0 before a first snapshot."""

    def __init__(self, state: QueueState, *, controller: Controller, home: RpcClient) -> None:
        self.home = 0
        self.position = 0
        self._state = state
        self._controller = controller
        self._client = home
        self._typing: dict[tuple[str, str], asyncio.Task[None]] = {}

    def knows(self, home: int, position: int) -> bool:
        """Tell whether everything up to a place in the feed of that primary is known here."""
        return home == self.home and position <= self.position

    async def run(self) -> None:
        """Follow for ever."""
        pause = _AGAIN_S
        while True:
            try:
                await self._step()
                pause = _AGAIN_S
            except LedgerCorrupt as wrong:
                log.warning("what the primary told does not agree with what is here, which is read anew: %s", wrong)
                self.home = 0
            except AsyncFlowError as lost:
                log.info("the primary is not heard: %s", lost)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_S)

    async def close(self) -> None:
        """Forget what is under way."""
        for task in self._typing.values():
            task.cancel()

    async def _step(self) -> None:
        ask = calls.Follow(self._state.index, self.home, self.position, _PARK_S)
        feed = await self._client.call("replicas.follow", ask, calls.Feed, timeout=_PARK_S + _CALL_S)
        if feed.parts:
            await self._take_snapshot(feed)
            return
        for count, raw in enumerate(feed.items, 1):
            self._state.now = self._controller.now()
            take(self._state, decode(raw))
            if count % _TURN == 0:
                self._controller.settle()
                await asyncio.sleep(0)
        self._arrived(feed)

    async def _take_snapshot(self, feed: calls.Feed) -> None:
        log.info("taking a snapshot of the primary's rows, in %d parts", feed.parts)
        draft = draft_of(self._state)
        draft.now = self._controller.now()
        for number in range(feed.parts):
            ask = calls.AskPart(self._state.index, feed.position, number)
            part = await self._client.call("replicas.part", ask, calls.Part, timeout=_CALL_S)
            for raw in part.items:
                take(draft, decode(raw))
                await asyncio.sleep(0)
        self._controller.settle()
        install(self._state, draft)
        await self._controller.rewrite()
        self._arrived(feed)

    def _arrived(self, feed: calls.Feed) -> None:
        self.home, self.position = feed.epoch, feed.position
        self._state.touched.add(FEED)
        self._controller.settle()

    def enter_types(self, partition: str, dtypes: Mapping[str, str]) -> None:
        """Have the primary enter columns that it does not know yet; it says by the feed what they hold from now on."""
        asked = {name: dtype for name, dtype in dtypes.items() if (partition, name) not in self._typing}
        if not asked:
            return
        task = asyncio.create_task(self._enter(calls.EnterTypes(self._state.index, partition, asked)), name="columns")
        for name in asked:
            self._typing[partition, name] = task

        def over(_: object) -> None:
            for name in asked:
                del self._typing[partition, name]

        task.add_done_callback(over)

    async def _enter(self, call: calls.EnterTypes) -> None:
        try:
            await self._client.call("replicas.type", call, calls.Done, timeout=_CALL_S)
        except AsyncFlowError as error:
            log.info("columns of %s are not entered: %s", call.partition, error)


class Replica(Standalone):
    """A controller that is not the primary. address: of each controller."""

    def __init__(self, controller: Controller, *, address: Address, credentials: Credentials | None) -> None:
        super().__init__(controller)
        self._fail = controller.fail
        index = controller.table.state.index
        self._home = RpcClient(
            name=f"controller {index}", resolve=lambda: address(0), credentials=credentials, expects=("controller",)
        )
        self.follower = Follower(controller.table.state, controller=controller, home=self._home)
        self._following: asyncio.Task[None] | None = None

    def routes(self) -> dict[str, Route]:
        """Return what this controller answers clients and units, as far as its tasks go, and the primary."""
        usual = Handlers(self._controller).routes()
        return {
            **{method: usual[method] for method in ANSWERED},
            "queue.end": usual["queue.end"].wrapped(self._end),
            "replicas.admit": Route(unit_calls.AdmitCells, self._admit),
            "replicas.reach": Route(calls.Reach, self._reach),
        }

    def start(self) -> None:
        """Begin to follow the primary."""
        self._following = asyncio.create_task(self.follower.run(), name="follower")

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._fail(error)

        self._following.add_done_callback(ended)

    async def close(self) -> None:
        """Follow no longer."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
        await self.follower.close()
        await self._home.close()

    def ready(self) -> tuple[bool, str]:
        """Tell whether the primary has told it of its rows."""
        told = self.follower.home > 0
        return told, "ready" if told else "the primary has not told it of its rows yet"

    def _reach(self, call: Any, _frames: Frames) -> Soon[bool]:
        def reached() -> bool | None:
            return True if self.follower.knows(call.epoch, call.position) else None

        return self._controller.until(FEED, reached, call.wait_s, lambda: False)

    def _admit(self, call: Any, _frames: Frames) -> Soon[list[unit_calls.EntryResult]]:
        self._table.state.now = self._controller.now()
        return self._controller.safe([self._verdict(entry) for entry in call.entries])

    def _verdict(self, entry: unit_calls.NewCells) -> unit_calls.EntryResult:
        try:
            numbers = entry.rows
            if entry.reason:
                return unit_calls.EntryResult(self._table.give_back(entry.lease, numbers, entry.reason, entry.cells))
            self._check_known(entry)
            return unit_calls.EntryResult(self._table.complete(entry.lease, numbers, entry.cells, entry.tags))
        except AsyncFlowError as error:
            return unit_calls.EntryResult([], error.to_wire())

    def _check_known(self, entry: unit_calls.NewCells) -> None:
        """Put off a completion with columns that nobody has written before, until the primary has entered them."""
        lease = self._table.claims.holder(entry.lease)
        if lease is None:
            return
        known = self._table.state.partitions[lease.partition].schema
        if fresh := {name: dtype for name, dtype in entry.cells.dtypes.items() if name not in known}:
            self.follower.enter_types(lease.partition, fresh)
            what = f"the primary has not entered the columns {', '.join(sorted(fresh))} yet"
            raise PeerLost(what, where=lease.partition, hint="Try again")

    def _end(self, own: Awaiting) -> Awaiting:
        async def handle(call: Any, frames: Frames) -> Any:
            if not call.drop:
                return await own(call, frames)
            lease, rows = self._table.claims.holder(call.lease), call.rows
            mine = [row for row in dict.fromkeys(rows) if lease is not None and row in lease.rows]
            if lease is None or not mine:
                return [False] * len(rows)
            drop = calls.DropRows(self._table.state.index, lease.partition, mine, call.reason)
            said = await self._home.call("replicas.drop", drop, list[bool], timeout=_DROP_S)
            gone = {row for row, ok in zip(mine, said, strict=True) if ok}
            return [row in gone for row in rows]

        return handle
