"""What each call about open rows does; ``open_table`` has the decisions.

Invariant: a question that looks at every row lets others be served in between, so it may miss rows that are put or
cleared meanwhile, and tells nothing that was not so at some time since it was asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from msgspec import Struct

from asyncflow.net.batches import batches
from asyncflow.queue.controller.routes import Routes
from asyncflow.queue.controller.serving import Serving
from asyncflow.queue.protocol import calls, open_calls
from asyncflow.queue.protocol.views import PartitionView
from asyncflow.queue.table import open_table
from asyncflow.queue.table.outlook import view
from asyncflow.queue.table.partition import Partition
from asyncflow.queue.table.state import Row

Command = Callable[[str, type[Struct], Callable[[Any], Struct | None]], None]
Frames = Sequence[memoryview]
_CHUNK = 2000


class OpenHandlers:
    """The calls of ``open_calls``."""

    def __init__(self, controller: Serving) -> None:
        self._controller = controller
        self._table = controller.table
        self._books = controller.table.books

    def route(self, server: Routes, command: Command, *, freeing: Command) -> None:
        """Have ``server`` answer all of them.

        ``command`` routes those that are answered at once, ``freeing`` those that free what rows have.
        """
        command("open.find", open_calls.FindRows, self._find)
        command("open.peek", open_calls.Peek, self._peek)
        command("open.reset", open_calls.Reset, self._reset)
        command("open.expect", open_calls.Expect, self._expect)
        freeing("open.clear", open_calls.ClearRows, self._clear)
        command("queue.show", calls.InPartition, self._show)
        command("open.partitions", open_calls.ListPartitions, self._partitions)
        server.route("open.list", open_calls.ListRows, self._list)
        server.route("open.progress", open_calls.AskProgress, self._progress)

    def _asked(self, name: str) -> Partition:
        """Return the partition for a question: one that nobody made stays unmade."""
        return self._books.partitions.get(name) or Partition(name)

    def _find(self, call: open_calls.FindRows) -> open_calls.Found:
        return open_table.find(self._asked(call.partition), call.keys)

    def _peek(self, call: open_calls.Peek) -> open_calls.Sight:
        partition = self._asked(call.partition)
        if call.rows:
            rows = open_table.live_rows(self._books, call.rows, of=call.partition)
        else:
            rows = list(islice(open_table.list_rows(partition), call.most))
        return open_table.peek(self._books, partition, call.task, rows)

    def _reset(self, call: open_calls.Reset) -> open_calls.Counted:
        return open_calls.Counted(open_table.reset(self._books, self._books.partition(call.partition), call.task))

    def _expect(self, call: open_calls.Expect) -> None:
        open_table.expect(self._books, self._books.partition(call.partition), call.total)

    def _clear(self, call: open_calls.ClearRows) -> open_calls.Counted:
        return open_calls.Counted(sum(self._table.clear_rows(call.partition, call.rows)))

    def _show(self, call: calls.InPartition) -> PartitionView:
        return view(self._table, call.partition, self._controller.now())

    def _partitions(self, _call: open_calls.ListPartitions) -> open_calls.Partitions:
        held = self._books.partitions
        return open_calls.Partitions({name: held[name].counts.total() for name in sorted(held)})

    async def _list(self, call: open_calls.ListRows, _frames: Frames) -> open_calls.Listing:
        made = open_calls.Listing([], [], [])
        async for chunk in _chunks(open_table.list_rows(self._asked(call.partition))):
            part = open_table.listing(chunk)
            made.rows.extend(part.rows)
            made.keys.extend(part.keys)
            made.tags.extend(part.tags)
        return made

    async def _progress(self, call: open_calls.AskProgress, _frames: Frames) -> open_calls.Progress:
        partition, done = self._asked(call.partition), 0
        if call.task:
            return open_table.consumed(partition, call.task)
        test = open_table.has_columns(call.columns)
        async for chunk in _chunks(open_table.list_rows(partition)):
            done += sum(map(test, chunk))
        return open_table.produced(partition, done=done)


async def _chunks(rows: Iterable[Row]) -> AsyncIterator[list[Row]]:
    for chunk in batches(rows, _CHUNK):
        yield chunk
        await asyncio.sleep(0)
