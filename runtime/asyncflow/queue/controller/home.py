"""The home of a queue that has several controllers: it lets shards follow its rows, and speaks for all of them.

Questions about the whole queue are asked of every shard, those about a task of another controller are passed on to it
when it knows of rows what is known here.

Invariants: a shard that is stopped holds up only who asks about its tasks, until a deadline that names it; who looks
(``stats``, ``show``) is told what the others say, and which are silent; no answer about a task is older than its
question.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, PeerLost, Refused
from asyncflow.net.keys import Keys
from asyncflow.net.retry import retry
from asyncflow.net.rpc import Handler, RpcClient, RpcServer
from asyncflow.queue.controller.alone import Alone
from asyncflow.queue.controller.handlers import Handlers
from asyncflow.queue.controller.routes import Chosen, Wrap
from asyncflow.queue.controller.serving import Address, Serving, Soon
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.ledger.audits import merge_audits
from asyncflow.queue.protocol import calls, open_calls, shard_calls
from asyncflow.queue.protocol.messages import AuditReport, QueueStats
from asyncflow.queue.protocol.views import PartitionView
from asyncflow.queue.table import merging
from asyncflow.queue.table.feed import FEED, NewsFeed
from asyncflow.queue.table.state import State

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R", bound=Struct)

_ASK_S = 5.0
_LOOK_S = 2.0
_EXPIRE_S = 60.0
_DONE = calls.Done()


class Home(Alone):
    """Controller 0. controllers: how many there are; address: of each."""

    def __init__(self, controller: Serving, *, controllers: int, address: Address, keys: Keys | None) -> None:
        super().__init__(controller)
        self._feed = NewsFeed(controller.table.books, shards=range(1, controllers))
        self._shards = {
            index: RpcClient(name=f"controller 0 for {index}", resolve=_resolver(address, index), keys=keys)
            for index in range(1, controllers)
        }
        self._telling: set[asyncio.Task[Any]] = set()
        self._asked: dict[int, float] = {}

    def route(self, server: RpcServer) -> None:
        """Have ``server`` answer clients, units and shards."""
        wraps: dict[str, Wrap] = {
            "queue.stats": self._with_most("queue.stats", QueueStats, lambda _, *told: merging.merge_stats(*told)),
            "queue.show": self._with_most("queue.show", PartitionView, self._merge_views),
            "queue.snapshot": self._with_all("queue.snapshot", calls.Snapshot, _merge_snapshots),
            "queue.audit": self._with_all("queue.audit", AuditReport, _merge_audits),
            "queue.expire": self._expire,
            "open.reset": self._reset,
            "open.peek": self._passed_on("open.peek", open_calls.Sight),
            "open.progress": self._passed_on("open.progress", open_calls.Progress),
        }
        Handlers(self._controller, feed=self._feed).route(Chosen(server, only=None, wraps=wraps))
        server.route_now("shards.follow", shard_calls.Follow, self._follow)
        server.route_now("shards.part", shard_calls.AskPart, lambda call, _: self._feed.part(call))
        server.route_now("shards.type", shard_calls.EnterTypes, lambda call, _: self._enter(call))
        server.route_now("shards.drop", shard_calls.DropRows, lambda call, _: self._drop(call))

    def start(self) -> None:
        """Begin to tell what happens."""
        self._feed.start()
        self._asked = dict.fromkeys(self._shards, self._controller.now())

    async def close(self) -> None:
        """Talk to shards no longer."""
        for task in self._telling:
            task.cancel()
        for shard in self._shards.values():
            await shard.close()

    def silences(self) -> dict[int, float]:
        """Return the seconds for which each shard has not asked what happened; one that lives asks every ten or so."""
        now = self._controller.now()
        return {index: now - asked for index, asked in self._asked.items()}

    def expire(self, worker: str) -> None:
        """Do so here, and have the shards do it as soon as each can be reached."""
        super().expire(worker)
        self._tell_all(calls.Expire(worker))

    def _tell_all(self, call: calls.Expire) -> list[asyncio.Task[Any]]:
        made = []
        for index, shard in self._shards.items():
            what = f"telling controller {index} of a dead worker"
            attempt = lambda shard=shard: shard.call("queue.expire", call, calls.Done, timeout=_ASK_S)  # noqa: E731
            made.append(task := asyncio.create_task(_heard(retry(attempt, what=what, timeout=_EXPIRE_S)), name=what))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)
        return made

    def _follow(self, call: Any, _frames: Sequence[memoryview]) -> Soon[shard_calls.Feed]:
        feed = self._feed
        if call.shard in self._asked:
            self._asked[call.shard] = self._controller.now()
        nothing = shard_calls.Feed(feed.home, feed.position, [])
        return self._controller.until(FEED, lambda: feed.answer(call), call.wait_s, lambda: nothing)

    def _enter(self, call: shard_calls.EnterTypes) -> Soon[calls.Done]:
        books = self._table.books
        try:
            books.check_schema(books.partition(call.partition), call.dtypes)
        finally:
            done = self._controller.safe(_DONE)
        return done

    def _drop(self, call: shard_calls.DropRows) -> Soon[calls.Verdicts]:
        """Drop rows for ever whose holder says so; a row that a step has taken stays."""
        books = self._table.books
        rows = [books.rows.get(number) for number in call.rows]
        ok = [
            row is not None and row.state is State.LIVE and row.group.partition == call.partition
            for row in rows
        ]  # fmt: skip
        if mine := [number for number, here in zip(call.rows, ok, strict=True) if here]:
            books.record(ev.Dropped(call.partition, mine, call.reason))
        return self._controller.safe(calls.Verdicts(ok))

    def _with_all(self, method: str, reply: type[R], merge: Callable[[R, Sequence[R]], R]) -> Wrap:
        """Answer with what all controllers say."""

        def wrap(own: Handler) -> Handler:
            async def handle(call: Any, frames: Sequence[memoryview]) -> Any:
                mine: Any = await own(call, frames)
                asked = [self._ask(index, method, call, reply) for index in self._shards]
                return merge(mine, await asyncio.gather(*asked))

            return handle

        return wrap

    def _with_most(self, method: str, reply: type[R], merge: Callable[[Any, R, Sequence[R], Sequence[int]], R]) -> Wrap:
        """Answer with what the controllers say that answer soon; ``merge`` is told which do not."""

        def wrap(own: Handler) -> Handler:
            async def heard(index: int, call: Any) -> R | None:
                try:
                    return await self._ask(index, method, call, reply, within_s=_LOOK_S)
                except (DeadlineExceeded, PeerLost) as silent:
                    log.info("controller %d is silent: %s", index, silent)
                    return None

            async def handle(call: Any, frames: Sequence[memoryview]) -> Any:
                mine: Any = await own(call, frames)
                told = await asyncio.gather(*[heard(index, call) for index in self._shards])
                silent = [index for index, answer in zip(self._shards, told, strict=True) if answer is None]
                return merge(call, mine, [answer for answer in told if answer is not None], silent)

            return handle

        return wrap

    def _merge_views(
        self, call: calls.InPartition, mine: PartitionView, told: Sequence[PartitionView], silent: Sequence[int]
    ) -> PartitionView:
        held = self._table.books.partitions.get(call.partition)
        tasks = held.elsewhere.items() if held is not None else ()
        lacking = {index: sorted(name for name, there in tasks if there.controller == index) for index in silent}
        return merging.merge_views(mine, told, lacking)

    def _passed_on(self, method: str, reply: type[R]) -> Wrap:
        """Have the controller of the task answer, where that is another."""

        def wrap(own: Handler) -> Handler:
            async def handle(call: Any, frames: Sequence[memoryview]) -> Any:
                index = self._place(call.partition, call.task)
                return await (self._ask(index, method, call, reply) if index else own(call, frames))

            return handle

        return wrap

    def _place(self, partition: str, task: str | None) -> int:
        held = self._table.books.partitions.get(partition)
        there = held.elsewhere.get(task) if held is not None and task else None
        return there.controller if there is not None else 0

    def _reset(self, own: Handler) -> Handler:
        """Reset one task where it is, or all tasks everywhere."""

        async def handle(call: Any, frames: Sequence[memoryview]) -> Any:
            if index := self._place(call.partition, call.task):
                return await self._ask(index, "open.reset", call, open_calls.Counted)
            mine: Any = await own(call, frames)
            if call.task is not None:
                return mine
            asked = [self._ask(index, "open.reset", call, open_calls.Counted) for index in self._shards]
            return open_calls.Counted(mine.rows + sum(counted.rows for counted in await asyncio.gather(*asked)))

        return handle

    def _expire(self, own: Handler) -> Handler:
        """Say it here and everywhere; a shard that cannot be reached now is told later."""

        async def handle(call: Any, frames: Sequence[memoryview]) -> Any:
            tasks = self._tell_all(call)
            done = await own(call, frames)
            await asyncio.wait(tasks, timeout=_ASK_S / 2)
            return done

        return handle

    async def _ask(self, index: int, method: str, call: Struct, reply: type[R], *, within_s: float | None = None) -> R:
        """Ask a shard, when it knows what is known here. Raises DeadlineExceeded that names it."""
        within_s = _ASK_S if within_s is None else within_s
        if (pending := self._controller.settle()) is not None:
            await pending
        shard, reach = self._shards[index], shard_calls.Reach(self._feed.home, self._feed.position, within_s / 2)
        try:
            reached = await shard.call("shards.reach", reach, shard_calls.Reached, timeout=within_s)
            if reached.ok:
                return await shard.call(method, call, reply, timeout=within_s)
        except DeadlineExceeded as late:
            raise DeadlineExceeded(f"{method}: no answer within {within_s:g} s", where=f"controller {index}") from late
        raise DeadlineExceeded(f"{method}: it has not caught up with the rows yet", where=f"controller {index}")


def _resolver(address: Address, index: int) -> Callable[[], str | None]:
    return lambda: address(index)


def _merge_audits(home: AuditReport, shards: Sequence[AuditReport]) -> AuditReport:
    return merge_audits(home, dict(enumerate(shards, 1)))


def _merge_snapshots(home: calls.Snapshot, shards: Sequence[calls.Snapshot]) -> calls.Snapshot:
    merged = merging.merge_snapshots(home.snapshot, [shard.snapshot for shard in shards])
    return replace(home, snapshot=merged)


async def _heard(telling: Any) -> None:
    try:
        await telling
    except (AsyncFlowError, Refused) as error:
        log.info("%s", error)
