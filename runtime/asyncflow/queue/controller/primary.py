"""The primary of a queue that has several controllers: it lets replicas follow its rows, and speaks for all of them.

Questions about the whole queue are asked of every replica, those about a task of another controller are passed on to it
when it knows of rows what is known here.

Invariants: a replica that is stopped holds up only who asks about its tasks, until a deadline that names it; who looks
(``stats``, ``show``) is told what the others say, and which are silent; no answer about a task is older than its
question.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from msgspec import Struct

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, PeerLost, Refused
from asyncflow.queue.controller.handlers import Address, Awaiting, Handlers, Route, Standalone
from asyncflow.queue.controller.parking import Soon
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.ledger.audit import merge_audits
from asyncflow.queue.protocol import calls
from asyncflow.queue.protocol.messages import (
    AuditReport,
    PartitionSnapshot,
    PartitionView,
    PeekedRows,
    Progress,
    QueueStats,
)
from asyncflow.queue.table.replication import FEED, ChangeFeed
from asyncflow.queue.table.report import merge_snapshots, merge_stats, merge_views
from asyncflow.queue.table.state import RowState
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.retry import retry
from asyncflow.rpc.tls import Credentials

if TYPE_CHECKING:
    from asyncflow.queue.controller.controller import Controller

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

_ASK_S = 5.0
_LOOK_S = 2.0
_EXPIRE_S = 60.0
_DONE = calls.Done()
Wrap: TypeAlias = Callable[[Awaiting], Awaiting]
"""Returns another handler, made of the usual one."""


class Primary(Standalone):
    """Controller 0. controllers: how many there are; address: of each."""

    def __init__(
        self, controller: Controller, *, controllers: int, address: Address, credentials: Credentials | None
    ) -> None:
        super().__init__(controller)
        self._feed = ChangeFeed(controller.table.state, replicas=range(1, controllers))
        self._replicas = {
            index: RpcClient(
                name=f"controller 0 for {index}",
                resolve=_resolver(address, index),
                credentials=credentials,
                expects=("controller",),
            )
            for index in range(1, controllers)
        }
        self._calls: set[asyncio.Task[Any]] = set()
        self._asked: dict[int, float] = {}

    def routes(self) -> dict[str, Route]:
        """Return what this controller answers clients, units and replicas, by method."""
        routes = Handlers(self._controller, feed=self._feed).routes()
        wraps: dict[str, Wrap] = {
            "queue.stats": self._with_most("queue.stats", QueueStats, lambda _, *told: merge_stats(*told)),
            "queue.show": self._with_most("queue.show", PartitionView, self._merge_views),
            "queue.snapshot": self._with_all("queue.snapshot", PartitionSnapshot, merge_snapshots),
            "queue.audit": self._with_all("queue.audit", AuditReport, _merge_audits),
            "queue.expire": self._expire,
            "open.reset": self._reset,
            "open.peek": self._passed_on("open.peek", PeekedRows),
            "open.progress": self._passed_on("open.progress", Progress),
        }
        return {
            **{method: route.wrapped(wraps[method]) if method in wraps else route for method, route in routes.items()},
            "replicas.follow": Route(calls.Follow, self._follow),
            "replicas.part": Route(calls.AskPart, lambda call, _: self._feed.part(call)),
            "replicas.type": Route(calls.EnterTypes, lambda call, _: self._enter(call)),
            "replicas.drop": Route(calls.DropRows, lambda call, _: self._drop(call)),
        }

    def start(self) -> None:
        """Begin to tell what happens."""
        self._feed.start()
        self._asked = dict.fromkeys(self._replicas, self._controller.now())

    async def close(self) -> None:
        """Talk to replicas no longer."""
        for task in self._calls:
            task.cancel()
        for replica in self._replicas.values():
            await replica.close()

    def silences(self) -> dict[int, float]:
        """Return the seconds since each replica asked what happened; one that lives asks every ten or so."""
        now = self._controller.now()
        return {index: now - asked for index, asked in self._asked.items()}

    def expire(self, worker: str) -> None:
        """Do so here, and have the replicas do it as soon as each can be reached."""
        super().expire(worker)
        self._call_all(calls.Expire(worker))

    def _call_all(self, call: calls.Expire) -> list[asyncio.Task[Any]]:
        made = []
        for index, replica in self._replicas.items():
            what = f"telling controller {index} of a dead worker"
            attempt = lambda replica=replica: replica.call("queue.expire", call, calls.Done, timeout=_ASK_S)  # noqa: E731
            made.append(task := asyncio.create_task(_heard(retry(attempt, what=what, timeout=_EXPIRE_S)), name=what))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
        return made

    def _follow(self, call: Any, _frames: Sequence[memoryview]) -> Soon[calls.Feed]:
        feed = self._feed
        if call.replica in self._asked:
            self._asked[call.replica] = self._controller.now()
        nothing = calls.Feed(feed.epoch, feed.position, [])
        return self._controller.until(FEED, lambda: feed.answer(call), call.wait_s, lambda: nothing)

    def _enter(self, call: calls.EnterTypes) -> Soon[calls.Done]:
        state = self._table.state
        try:
            state.check_schema(state.partition(call.partition), call.dtypes)
        finally:
            done = self._controller.safe(_DONE)
        return done

    def _drop(self, call: calls.DropRows) -> Soon[list[bool]]:
        """Drop rows for ever whose holder says so; a row that a step has taken stays."""
        state = self._table.state
        rows = [state.rows.get(number) for number in call.rows]
        ok = [
            row is not None and row.state is RowState.LIVE and row.group.partition == call.partition
            for row in rows
        ]  # fmt: skip
        if mine := [number for number, here in zip(call.rows, ok, strict=True) if here]:
            state.record(ev.RowsDropped(call.partition, mine, call.reason))
        return self._controller.safe(ok)

    def _with_all(self, method: str, reply: type[R], merge: Callable[[R, Sequence[R]], R]) -> Wrap:
        """Answer with what all controllers say."""

        def wrap(own: Awaiting) -> Awaiting:
            async def handle(call: Any, frames: Sequence[memoryview]) -> Any:
                mine: Any = await own(call, frames)
                asked = [self._ask(index, method, call, reply) for index in self._replicas]
                return merge(mine, await asyncio.gather(*asked))

            return handle

        return wrap

    def _with_most(self, method: str, reply: type[R], merge: Callable[[Any, R, Sequence[R], Sequence[int]], R]) -> Wrap:
        """Answer with what the controllers say that answer soon; ``merge`` is told which do not."""

        def wrap(own: Awaiting) -> Awaiting:
            async def heard(index: int, call: Any) -> R | None:
                try:
                    return await self._ask(index, method, call, reply, within_s=_LOOK_S)
                except (DeadlineExceeded, PeerLost) as silent:
                    log.info("controller %d is silent: %s", index, silent)
                    return None

            async def handle(call: Any, frames: Sequence[memoryview]) -> Any:
                mine: Any = await own(call, frames)
                told = await asyncio.gather(*[heard(index, call) for index in self._replicas])
                silent = [index for index, answer in zip(self._replicas, told, strict=True) if answer is None]
                return merge(call, mine, [answer for answer in told if answer is not None], silent)

            return handle

        return wrap

    def _merge_views(
        self, call: calls.InPartition, mine: PartitionView, told: Sequence[PartitionView], silent: Sequence[int]
    ) -> PartitionView:
        held = self._table.state.partitions.get(call.partition)
        tasks = held.elsewhere.items() if held is not None else ()
        lacking = {index: sorted(name for name, there in tasks if there.controller == index) for index in silent}
        return merge_views(mine, told, lacking)

    def _passed_on(self, method: str, reply: type[R]) -> Wrap:
        """Have the controller of the task answer, where that is another."""

        def wrap(own: Awaiting) -> Awaiting:
            async def handle(call: Any, frames: Sequence[memoryview]) -> Any:
                index = self._place(call.partition, call.task)
                return await (self._ask(index, method, call, reply) if index else own(call, frames))

            return handle

        return wrap

    def _place(self, partition: str, task: str | None) -> int:
        held = self._table.state.partitions.get(partition)
        there = held.elsewhere.get(task) if held is not None and task else None
        return there.controller if there is not None else 0

    def _reset(self, own: Awaiting) -> Awaiting:
        """Reset one task where it is, or all tasks everywhere."""

        async def handle(call: Any, frames: Sequence[memoryview]) -> Any:
            if index := self._place(call.partition, call.task):
                return await self._ask(index, "open.reset", call, int)
            mine: Any = await own(call, frames)
            if call.task is not None:
                return mine
            asked = [self._ask(index, "open.reset", call, int) for index in self._replicas]
            return mine + sum(await asyncio.gather(*asked))

        return handle

    def _expire(self, own: Awaiting) -> Awaiting:
        """Say it here and everywhere; a replica that cannot be reached now is told later."""

        async def handle(call: Any, frames: Sequence[memoryview]) -> Any:
            tasks = self._call_all(call)
            done = await own(call, frames)
            await asyncio.wait(tasks, timeout=_ASK_S / 2)
            return done

        return handle

    async def _ask(self, index: int, method: str, call: Struct, reply: type[R], *, within_s: float | None = None) -> R:
        """Ask a replica, when it knows what is known here. Raises DeadlineExceeded that names it."""
        within_s = _ASK_S if within_s is None else within_s
        if (pending := self._controller.settle()) is not None:
            await asyncio.shield(pending)
        replica, reach = self._replicas[index], calls.Reach(self._feed.epoch, self._feed.position, within_s / 2)
        try:
            reached = await replica.call("replicas.reach", reach, bool, timeout=within_s)
            if reached:
                return await replica.call(method, call, reply, timeout=within_s)
        except DeadlineExceeded as late:
            raise DeadlineExceeded(f"{method}: no answer within {within_s:g} s", where=f"controller {index}") from late
        raise DeadlineExceeded(f"{method}: it has not caught up with the rows yet", where=f"controller {index}")


def _resolver(address: Address, index: int) -> Callable[[], str | None]:
    return lambda: address(index)


def _merge_audits(home: AuditReport, shards: Sequence[AuditReport]) -> AuditReport:
    return merge_audits(home, dict(enumerate(shards, 1)))


async def _heard(telling: Any) -> None:
    try:
        await telling
    except (AsyncFlowError, Refused) as error:
        log.info("%s", error)
