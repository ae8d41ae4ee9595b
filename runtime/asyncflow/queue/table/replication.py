"""Rows of the first controller in the state of others: the changes that it tells them, and snapshots.

Events of the ledger are told as they are, but for those that concern leases alone; what units told of cells, which no
ledger has, is ``RowsHeld``. A place in the feed is a number that counts on. The last items are kept, encoded; who is
too far behind takes a snapshot, restores it into a state of its own, a draft, and ``install``s that with the leases and
the work of its own tasks.

Invariants: what is between two places is all that happened to rows between them, in order; a snapshot, and what came
after its position, give the rows of now; what is kept has at most ``limit`` bytes. Rows come and end by what was told
alone; what a task has done with a row that is still there survives every snapshot; a lease holds no row that is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import TypeAlias

import msgspec
from msgspec import Raw, Struct

from asyncflow.errors import LedgerCorrupt, Refused
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.protocol.calls import Feed
from asyncflow.queue.protocol.unit_calls import Held
from asyncflow.queue.table.apply import QueueState
from asyncflow.queue.table.rows import add_cells
from asyncflow.queue.table.snapshot import snapshot_rows
from asyncflow.queue.table.state import Row
from asyncflow.rpc.columns import Buffer, batches
from asyncflow.rpc.framing import MALFORMED, MAX_MESSAGE

SILENT = (
    ev.ControllerStarted,
    ev.UnitJoined,
    ev.UnitLeaving,
    ev.Leased,
    ev.Completed,
    ev.Returned,
    ev.TaskReset,
    ev.Peeked,
)
"""Events that say nothing of rows; but a completion that clears does, for which ``RowsCleared`` is told."""


class RowsHeld(Struct, frozen=True, array_like=True, tag="held"):
    """Rows as their units hold them."""

    held: list[Held]


class WorkerLost(Struct, frozen=True, array_like=True, tag="worker"):
    """A worker is dead: its leases and claims end, which the follower sees to."""

    worker: str


Change: TypeAlias = ev.Event | RowsHeld | WorkerLost

encode = msgspec.msgpack.Encoder().encode
_decode: Callable[[Buffer], Change] = msgspec.msgpack.Decoder(Change).decode


def decode(encoded: Buffer) -> Change:
    """Return the item that ``encode`` was given. LedgerCorrupt for anything else."""
    try:
        return _decode(encoded)
    except MALFORMED as wrong:
        raise LedgerCorrupt(f"what was told of rows is none: {wrong}", where="feed") from wrong


FEED = "\0feed"
"""Stands in ``QueueState.changed`` where a partition does: the feed has something new, or may have after the others."""

_LIMIT = 64 << 20
_MOST = MAX_MESSAGE - (1 << 20)
"""Bytes of a snapshot: a row is about 90 with one column, 170 with four and three tags."""
_ROWS = 5_000


class ChangeFeed:
    """The changes of a primary's rows, for its replicas. limit: bytes of items that are kept."""

    def __init__(self, state: QueueState, *, limit: int = _LIMIT) -> None:
        self._state = state
        self._limit = limit
        self._items: deque[bytes] = deque()
        self._bytes = 0
        self.epoch = 0
        self.position = 0

    def start(self) -> None:
        """Begin to tell, in the present epoch."""
        self.epoch = self._state.epoch
        self._state.observer = self.happens

    def happens(self, event: ev.Event) -> None:
        """Tell of an event that is about to happen."""
        if isinstance(event, ev.Completed) and (lease := self._state.leases.get(event.lease)) is not None:
            partition = self._state.partitions[lease.partition]
            if partition.queues[lease.task].spec.clears and partition.purpose == "open":
                self.add(ev.RowsCleared(lease.partition, event.rows))
        elif not isinstance(event, SILENT):
            self.add(event)

    def held(self, numbers: Iterable[int]) -> None:
        """Tell of those of the rows that are there, as their units hold them."""
        rows = self._state.rows
        for item in _held(rows[number] for number in numbers if number in rows):
            self.add(item)

    def add(self, item: Change) -> None:
        """Tell of something that has happened."""
        encoded = encode(item)
        self._items.append(encoded)
        self._bytes += len(encoded)
        self.position += 1
        while self._bytes > self._limit:
            self._bytes -= len(self._items.popleft())
        self._state.changed.add(FEED)

    def answer(self, epoch: int, position: int) -> Feed | None:
        """Return the changes after a place, or a snapshot; None where nothing came yet. Refused for too many rows."""
        later = self.position - position
        if epoch != self.epoch or not 0 <= later <= len(self._items):
            return self._snapshot()
        items = list(islice(reversed(self._items), later))
        return Feed(self.epoch, self.position, list(map(Raw, reversed(items)))) if items else None

    def _snapshot(self) -> Feed:
        rows = self._state.rows
        items = list(map(encode, chain(snapshot_rows(self._state), _held(rows.values()))))
        if (size := sum(map(len, items))) > _MOST:
            what = f"{len(rows)} rows are {size} bytes for a controller that follows, and {_MOST} go in one message"
            raise Refused(what, where="controller", hint="Clear rows, or have one controller")
        return Feed(self.epoch, self.position, list(map(Raw, items)), snapshot=True)


def _held(rows: Iterable[Row]) -> Iterator[RowsHeld]:
    """Describe those of ``rows`` of which their units have told."""
    held = (
        Held(row=row.row, columns=dict(row.columns), partial=dict(row.partial), tokens=row.tokens, tags=row.tags)
        for row in rows
        if row.here
    )
    return map(RowsHeld, batches(held, _ROWS))


def take(state: QueueState, item: ev.Event | RowsHeld) -> None:
    """Apply a change. LedgerCorrupt where it does not follow from the changes before."""
    if not isinstance(item, RowsHeld):
        state.record(item)
        return
    there = [(row, held) for held in item.held if (row := state.rows.get(held.row)) is not None]
    for row, held in there:
        row.tokens = held.tokens
        row.add(held.partial, partial=True)
    add_cells(state, [(row, held.columns, held.tags) for row, held in there])


def install(state: QueueState, draft: QueueState) -> None:
    """Put the rows of ``draft`` in the place of those in ``state``."""
    for lease in list(state.leases):
        if gone := [row for row in lease.rows if row not in draft.rows]:
            state.leases.release(lease.id, gone)
    for number, row in draft.rows.items():
        old = state.rows.get(number)
        if old is None:
            continue
        row.work, row.since = old.work, old.since
        if old.here:
            row.tags, row.tokens = {**old.tags, **row.tags}, row.tokens or old.tokens
            row.here, row.columns = True, {**old.columns, **row.columns}
            row.add(old.partial, partial=True)
    for name, partition in draft.partitions.items():
        if (before := state.partitions.get(name)) is not None:
            partition.resets, partition.peeked = before.resets, before.peeked
            partition.returned = before.returned
        for queue in list(partition.queues.values()):
            partition.declare(queue.spec)
    state.changed |= state.partitions.keys() | draft.partitions.keys()
    state.partitions, state.rows = draft.partitions, draft.rows
