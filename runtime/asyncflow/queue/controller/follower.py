"""A shard's conversation with the home: it asks what happened to rows, takes it in, and asks again.

Where it is too far behind, or the home is another than before, it takes a snapshot, in parts, beside what it has, and
goes on with what it has until that is whole.

Invariants: what is answered after ``reach`` is no older than what was asked for; a shard whose books do not agree with
what it is told mends itself by a snapshot; nothing that the home does or fails to do ends a shard.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from asyncflow.errors import AsyncFlowError, LedgerCorrupt
from asyncflow.net.rpc import RpcClient
from asyncflow.queue.controller.serving import Following
from asyncflow.queue.protocol.calls import Done
from asyncflow.queue.protocol.shard_calls import AskPart, EnterTypes, Feed, Follow, Part
from asyncflow.queue.table.books import Books
from asyncflow.queue.table.feed import FEED
from asyncflow.queue.table.news import decode
from asyncflow.queue.table.replica import draft_of, install, take

log = logging.getLogger(__name__)

_PARK_S = 10.0
_CALL_S = 10.0
_AGAIN_S = 0.1
_LONGEST_S = 1.0
_TURN = 64
"""Items after which others have their turn."""


class Follower:
    """Keeps the books of a shard in step with the home. home, position: how far it is, 0 before the first snapshot."""

    def __init__(self, books: Books, *, serving: Following, home: RpcClient) -> None:
        self.home = 0
        self.position = 0
        self._books = books
        self._serving = serving
        self._client = home
        self._typing: dict[tuple[str, str], asyncio.Task[None]] = {}

    def knows(self, home: int, position: int) -> bool:
        """Tell whether everything up to a place in the feed of that home is known here."""
        return home == self.home and position <= self.position

    async def run(self) -> None:
        """Follow for ever."""
        pause = _AGAIN_S
        while True:
            try:
                await self._step()
                pause = _AGAIN_S
            except LedgerCorrupt as wrong:
                log.warning("what the home told does not agree with what is here, which is read anew: %s", wrong)
                self.home = 0
            except AsyncFlowError as lost:
                log.info("the home is not heard: %s", lost)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_S)

    async def close(self) -> None:
        """Forget what is under way."""
        for task in self._typing.values():
            task.cancel()

    async def _step(self) -> None:
        ask = Follow(self._books.index, self.home, self.position, _PARK_S)
        feed = await self._client.call("shards.follow", ask, Feed, timeout=_PARK_S + _CALL_S)
        if feed.parts:
            await self._take_snapshot(feed)
            return
        for count, raw in enumerate(feed.items, 1):
            self._books.now = self._serving.now()
            take(self._books, decode(raw))
            if count % _TURN == 0:
                self._serving.settle()
                await asyncio.sleep(0)
        self._arrived(feed)

    async def _take_snapshot(self, feed: Feed) -> None:
        log.info("taking a snapshot of the home's rows, in %d parts", feed.parts)
        draft = draft_of(self._books)
        draft.now = self._serving.now()
        for number in range(feed.parts):
            ask = AskPart(self._books.index, feed.position, number)
            part = await self._client.call("shards.part", ask, Part, timeout=_CALL_S)
            for raw in part.items:
                take(draft, decode(raw))
                await asyncio.sleep(0)
        self._serving.settle()
        install(self._books, draft)
        await self._serving.rewrite()
        self._arrived(feed)

    def _arrived(self, feed: Feed) -> None:
        self.home, self.position = feed.home, feed.position
        self._books.touched.add(FEED)
        self._serving.settle()

    def enter_types(self, partition: str, dtypes: Mapping[str, str]) -> None:
        """Have the home enter columns that it does not know yet; it says by the feed what they hold from now on."""
        asked = {name: dtype for name, dtype in dtypes.items() if (partition, name) not in self._typing}
        if not asked:
            return
        task = asyncio.create_task(self._enter(EnterTypes(partition, asked)), name="columns")
        for name in asked:
            self._typing[partition, name] = task

        def over(_: object) -> None:
            for name in asked:
                del self._typing[partition, name]

        task.add_done_callback(over)

    async def _enter(self, call: EnterTypes) -> None:
        try:
            await self._client.call("shards.type", call, Done, timeout=_CALL_S)
        except AsyncFlowError as error:
            log.info("columns of %s are not entered: %s", call.partition, error)
