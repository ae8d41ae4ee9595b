"""A shard: a controller that decides about the leases of its own tasks, on rows that are the home's.

Invariants: a completion is admitted only with dtypes that the home has entered; a row ends by the home's word alone, so
who drops one waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from asyncflow.errors import AsyncFlowError, PeerLost, ProtocolError
from asyncflow.net.keys import Keys
from asyncflow.net.rpc import Handler, RpcClient, RpcServer
from asyncflow.queue.controller.alone import Alone
from asyncflow.queue.controller.follower import Follower
from asyncflow.queue.controller.handlers import Handlers
from asyncflow.queue.controller.routes import Chosen
from asyncflow.queue.controller.serving import Address, Following, Soon
from asyncflow.queue.protocol import calls, shard_calls, unit_calls
from asyncflow.queue.protocol.runs import expand
from asyncflow.queue.table.feed import FEED

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
"""Calls that a shard answers as a controller that stands alone does, for its own tasks."""

_DROP_S = 10.0


class Shard(Alone):
    """A controller that is not the home. address: of each controller."""

    def __init__(self, controller: Following, *, address: Address, keys: Keys | None) -> None:
        super().__init__(controller)
        self._fail = controller.fail
        index = controller.table.books.index
        self._home = RpcClient(name=f"controller {index}", resolve=lambda: address(0), keys=keys)
        self.follower = Follower(controller.table.books, serving=controller, home=self._home)
        self._following: asyncio.Task[None] | None = None

    def route(self, server: RpcServer) -> None:
        """Have ``server`` answer clients and units, as far as this shard's tasks go, and the home."""
        Handlers(self._controller).route(Chosen(server, only=ANSWERED, wraps={"queue.end": self._end}))
        server.route_now("shards.admit", shard_calls.AdmitCells, self._admit)
        server.route_now("shards.reach", shard_calls.Reach, self._reach)

    def start(self) -> None:
        """Begin to follow the home."""
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
        """Tell whether the home has told it of its rows."""
        told = self.follower.home > 0
        return told, "ready" if told else "the home has not told it of its rows yet"

    def _reach(self, call: Any, _frames: Sequence[memoryview]) -> Soon[shard_calls.Reached]:
        def reached() -> shard_calls.Reached | None:
            return shard_calls.Reached(True) if self.follower.knows(call.home, call.position) else None

        return self._controller.until(FEED, reached, call.wait_s, lambda: shard_calls.Reached(False))

    def _admit(self, call: Any, _frames: Sequence[memoryview]) -> Soon[unit_calls.Admitted]:
        self._table.books.now = self._controller.now()
        return self._controller.safe(unit_calls.Admitted([self._verdict(entry).short() for entry in call.entries]))

    def _verdict(self, entry: unit_calls.NewCells) -> unit_calls.Verdict:
        try:
            numbers = expand(entry.rows)
            if entry.reason:
                return unit_calls.Verdict(self._table.give_back(entry.lease, numbers, entry.reason, entry.cells))
            self._check_known(entry)
            return unit_calls.Verdict(self._table.complete(entry.lease, numbers, entry.cells, entry.tags))
        except ValueError as wrong:
            return unit_calls.Verdict([], ProtocolError(str(wrong), where="controller").to_wire())
        except AsyncFlowError as error:
            return unit_calls.Verdict([], error.to_wire())

    def _check_known(self, entry: unit_calls.NewCells) -> None:
        """Put off a completion with columns that nobody has written before, until the home has entered them."""
        lease = self._table.claims.holder(entry.lease)
        if lease is None:
            return
        known = self._table.books.partitions[lease.partition].schema
        if fresh := {name: dtype for name, dtype in entry.cells.dtypes.items() if name not in known}:
            self.follower.enter_types(lease.partition, fresh)
            what = f"the home has not entered the columns {', '.join(sorted(fresh))} yet"
            raise PeerLost(what, where=lease.partition, hint="Try again")

    def _end(self, own: Handler) -> Handler:
        async def handle(call: Any, frames: Sequence[memoryview]) -> Any:
            if not call.drop:
                return await own(call, frames)
            lease, rows = self._table.claims.holder(call.lease), expand(call.rows)
            mine = [row for row in dict.fromkeys(rows) if lease is not None and row in lease.rows]
            if lease is None or not mine:
                return calls.Verdicts([False] * len(rows))
            drop = shard_calls.DropRows(lease.partition, mine, call.reason)
            said = await self._home.call("shards.drop", drop, calls.Verdicts, timeout=_DROP_S)
            gone = {row for row, ok in zip(mine, said.ok, strict=True) if ok}
            return calls.Verdicts([row in gone for row in rows])

        return handle
