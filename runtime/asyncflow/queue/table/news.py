"""What the home tells shards of its rows, one item for each thing that happened.

Events of the ledger are told as they are; those that concern leases alone are not told. What a unit told of cells,
which no ledger has, is ``Gained`` and ``Recalled``.

Invariant: folding what was told, in order, into the books of a shard gives the rows of the home.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec
from msgspec import Struct

from asyncflow.errors import LedgerCorrupt
from asyncflow.net.frames import Buffer
from asyncflow.net.rpc.wire import MALFORMED
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.protocol.messages import Tag
from asyncflow.queue.protocol.runs import expand, shrink
from asyncflow.queue.protocol.shard_calls import chosen
from asyncflow.queue.protocol.unit_calls import Cells, Entry, Held, NewCells, NewRows
from asyncflow.queue.table.books import Books

SILENT = (ev.Started, ev.UnitJoined, ev.UnitLeaving, ev.Leased, ev.Completed, ev.Returned, ev.Reset, ev.Peeked)
"""Events that say nothing of rows; but a completion that clears does."""


class Gained(Struct, frozen=True, array_like=True, tag="gain"):
    """Rows got columns and tags. tokens: of each row's prompt, or none; partial: they were given back unfinished."""

    rows: list[int]
    cells: Cells
    tags: list[dict[str, Tag]]
    tokens: list[int]
    partial: bool


class Recalled(Struct, frozen=True, array_like=True, tag="held"):
    """Rows as their unit holds them."""

    held: list[Held]


Item: TypeAlias = ev.Event | Gained | Recalled

encode = msgspec.msgpack.Encoder().encode
_decode: Callable[[Buffer], Item] = msgspec.msgpack.Decoder(Item).decode


def decode(encoded: Buffer) -> Item:
    """Return the item that ``encode`` was given. LedgerCorrupt for anything else."""
    try:
        return _decode(encoded)
    except MALFORMED as wrong:
        raise LedgerCorrupt(f"what was told of rows is none: {wrong}", where="feed") from wrong


def told_of(books: Books, event: ev.Event) -> ev.Event | None:
    """Return what shards are told of ``event``, which is about to happen; None for nothing."""
    if isinstance(event, ev.Completed):
        lease = books.leases.get(event.lease)
        if lease is None:
            return None
        partition = books.partitions[lease.partition]
        clears = partition.queues[lease.task].spec.clears and partition.purpose == "open"
        return ev.RowsCleared(lease.partition, event.rows) if clears else None
    return None if isinstance(event, SILENT) else event


def gained(entry: Entry, ok: list[bool]) -> Gained:
    """Return what is told of the cells of an entry of which those rows that are ``ok`` were admitted."""
    rows = expand(entry.rows)
    mine = [index for index, admitted in enumerate(ok) if admitted]
    if isinstance(entry, NewRows):
        tags, tokens = [entry.metas[i].tags for i in mine], [entry.metas[i].tokens for i in mine]
    else:
        tags, tokens = [entry.tags[i] for i in mine] if entry.tags else [], []
    part = chosen(entry.cells, len(rows), mine)
    partial = isinstance(entry, NewCells) and bool(entry.reason)
    return Gained(shrink([rows[i] for i in mine]), part, tags if any(tags) else [], tokens, partial)
