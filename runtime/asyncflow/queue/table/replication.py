"""Copies of the first controller's rows in the states of replica controllers: a feed of changes, and snapshots.

The feed contains the ledger's events, except those that concern only leases, and ``RowsHeld`` for the cells that units
reported, which no ledger contains. A position in the feed is a number that counts its items. The feed keeps the last
items, encoded. A replica that is too far behind gets a snapshot, restores it into a separate state, the draft, and
``install``s the draft together with the leases and the work of its own tasks.

Invariants: the items between two positions are all changes of rows between them, in order. A snapshot and the items
after its position give the current rows. The kept items have at most ``limit`` bytes. In a replica, only the feed adds
and ends rows; the work of a task on a row that still exists survives every snapshot; a lease holds only existing rows.
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
"""Events without changes of rows. The feed sends ``RowsCleared`` for a completion that clears its rows."""


class RowsHeld(Struct, frozen=True, array_like=True, tag="held"):
    """Rows as their units hold them."""

    held: list[Held]


class WorkerLost(Struct, frozen=True, array_like=True, tag="worker"):
    """A dead worker, whose leases and claims each replica ends."""

    worker: str


Change: TypeAlias = ev.Event | RowsHeld | WorkerLost

encode = msgspec.msgpack.Encoder().encode
_decode: Callable[[Buffer], Change] = msgspec.msgpack.Decoder(Change).decode


def decode(encoded: Buffer) -> Change:
    """Decode an item that ``encode`` encoded. Raises LedgerCorrupt for anything else."""
    try:
        return _decode(encoded)
    except MALFORMED as wrong:
        raise LedgerCorrupt(f"a change in the feed cannot be decoded: {wrong}", where="feed") from wrong


FEED = "\0feed"
"""The entry of ``QueueState.changed`` for new items in the feed; its other entries are names of partitions."""

_LIMIT = 64 << 20
_MOST = MAX_MESSAGE - (1 << 20)
"""Bytes of a snapshot: a row has about 90 with one column, 170 with four columns and three tags."""
_ROWS = 5_000


class ChangeFeed:
    """The changes of a primary's rows, for its replicas. limit: total bytes of the kept items."""

    def __init__(self, state: QueueState, *, limit: int = _LIMIT) -> None:
        self._state = state
        self._limit = limit
        self._items: deque[bytes] = deque()
        self._bytes = 0
        self.epoch = 0
        self.position = 0

    def start(self) -> None:
        """Start to record changes, in the current epoch."""
        self.epoch = self._state.epoch
        self._state.observer = self.on_event

    def on_event(self, event: ev.Event) -> None:
        """Add an event that is about to be applied, if it concerns rows."""
        if isinstance(event, ev.Completed) and (lease := self._state.leases.get(event.lease)) is not None:
            partition = self._state.partitions[lease.partition]
            if partition.queues[lease.task].spec.clears and partition.purpose == "open":
                self.add(ev.RowsCleared(lease.partition, event.rows))
        elif not isinstance(event, SILENT):
            self.add(event)

    def held(self, numbers: Iterable[int]) -> None:
        """Add the rows that still exist, as their units hold them."""
        rows = self._state.rows
        for item in _held(rows[number] for number in numbers if number in rows):
            self.add(item)

    def add(self, item: Change) -> None:
        """Add a change."""
        encoded = encode(item)
        self._items.append(encoded)
        self._bytes += len(encoded)
        self.position += 1
        while self._bytes > self._limit:
            self._bytes -= len(self._items.popleft())
        self._state.changed.add(FEED)

    def answer(self, epoch: int, position: int) -> Feed | None:
        """Return the items after a position, or a snapshot; None if nothing is new. Refused for too many rows."""
        count = self.position - position
        if epoch != self.epoch or not 0 <= count <= len(self._items):
            return self._snapshot()
        items = list(islice(reversed(self._items), count))
        return Feed(self.epoch, self.position, list(map(Raw, reversed(items)))) if items else None

    def _snapshot(self) -> Feed:
        rows = self._state.rows
        items = list(map(encode, chain(snapshot_rows(self._state), _held(rows.values()))))
        if (size := sum(map(len, items))) > _MOST:
            what = f"{len(rows)} rows are {size} bytes for a replica controller, and a message has at most {_MOST}"
            raise Refused(what, where="controller", hint="Clear rows, or use one controller")
        return Feed(self.epoch, self.position, list(map(Raw, items)), snapshot=True)


def _held(rows: Iterable[Row]) -> Iterator[RowsHeld]:
    """Describe the rows that their units have reported."""
    held = (
        Held(row=row.row, columns=dict(row.columns), partial=dict(row.partial), tokens=row.tokens, tags=row.tags)
        for row in rows
        if row.reported
    )
    return map(RowsHeld, batches(held, _ROWS))


def take(state: QueueState, item: ev.Event | RowsHeld) -> None:
    """Apply a change. Raises LedgerCorrupt if it contradicts the changes before it."""
    if not isinstance(item, RowsHeld):
        state.record(item)
        return
    known = [(row, held) for held in item.held if (row := state.rows.get(held.row)) is not None]
    for row, held in known:
        row.tokens = held.tokens
        row.add(held.partial, partial=True)
    add_cells(state, [(row, held.columns, held.tags) for row, held in known])


def install(state: QueueState, draft: QueueState) -> None:
    """Replace the rows of ``state`` by the rows of ``draft``."""
    for lease in list(state.leases):
        if lost := [row for row in lease.rows if row not in draft.rows]:
            state.leases.release(lease.id, lost)
    for number, row in draft.rows.items():
        old = state.rows.get(number)
        if old is None:
            continue
        row.work, row.since = old.work, old.since
        if old.reported:
            row.tags, row.tokens = {**old.tags, **row.tags}, row.tokens or old.tokens
            row.reported, row.columns = True, {**old.columns, **row.columns}
            row.add(old.partial, partial=True)
    for name, partition in draft.partitions.items():
        if (before := state.partitions.get(name)) is not None:
            partition.resets, partition.peeked = before.resets, before.peeked
            partition.returned = before.returned
        for queue in list(partition.queues.values()):
            partition.declare(queue.spec)
    state.changed |= state.partitions.keys() | draft.partitions.keys()
    state.partitions, state.rows = draft.partitions, draft.rows
