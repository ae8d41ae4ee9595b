"""The home's rows in the books of a shard, which adds what its own tasks do with them.

A snapshot is folded into books of its own, a draft, beside those in use; ``install`` then lets it take their place with
the leases and the work of the shard's own tasks, by row id.

Invariants: rows come and end by what was told alone; what a task has done with a row that is still there survives every
snapshot; a lease holds no row that is gone.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncflow.errors import LedgerCorrupt, ProtocolError
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.protocol.runs import MOST, expand
from asyncflow.queue.table.books import Books
from asyncflow.queue.table.cells import by_row
from asyncflow.queue.table.folding import empty_books
from asyncflow.queue.table.news import Gained, Item, Recalled
from asyncflow.queue.table.partition import Partition
from asyncflow.queue.table.state import Row, Shape


def draft_of(books: Books) -> Books:
    """Return empty books of the same controller."""
    draft = empty_books()
    draft.index, draft.epoch = books.index, books.epoch
    return draft


def take(books: Books, item: Item) -> None:
    """Let what was told happen. LedgerCorrupt where it does not follow from what was told before, or is too much."""
    if isinstance(item, Gained):
        try:
            gain(books, item)
        except (ProtocolError, IndexError, ValueError) as wrong:
            raise LedgerCorrupt(f"what was told of columns does not fit its rows: {wrong!r}", where="feed") from wrong
    elif isinstance(item, Recalled):
        for held in item.held:
            if (row := books.rows.get(held.row)) is not None:
                _add(books, row, held.columns, held.partial)
                row.tokens, row.tags = held.tokens, {**row.tags, **held.tags}
    elif not 0 < _stands_for(item) <= MOST:
        raise LedgerCorrupt(f"{type(item).__name__} stands for no rows, or more than {MOST}", where="feed")
    else:
        books.record(item)


def _stands_for(event: ev.Event) -> int:
    """Return how many rows, or outcomes, are made of an event that does not list them; 1 of any other."""
    if isinstance(event, ev.Put):
        return event.groups * event.size if event.size > 0 else 0
    if isinstance(event, ev.SnapshotRows):
        rows = sum(run.count * run.size for run in event.groups)
        return rows + sum(count for _, count, *_ in event.finished) or 1
    return 1


def gain(books: Books, item: Gained) -> None:
    """Add columns and tags to those of the rows that are there."""
    rows = expand(item.rows)
    names, sizes = by_row(item.cells, len(rows))
    changed: dict[str, list[tuple[Row, Shape]]] = {}
    for index, number in enumerate(rows):
        row = books.rows.get(number)
        if row is None:
            continue
        if item.partial:
            fresh = zip(names, sizes[index], strict=True)
            row.partial = {**row.partial, **{name: size for name, size in fresh if name not in row.shape.has}}
            continue
        if item.tags and item.tags[index]:
            row.tags = {**row.tags, **item.tags[index]}
        if item.tokens:
            row.tokens = item.tokens[index]
        changed.setdefault(row.group.partition, []).append((row, row.shape))
        row.present(names, sizes[index])
    for name, pairs in changed.items():
        books.partition(name).gained(pairs)


def _add(books: Books, row: Row, columns: Mapping[str, int], partial: Mapping[str, int]) -> None:
    """Add columns that the row has not got yet."""
    before = row.shape
    fresh = {name: size for name, size in columns.items() if name not in before.has}
    row.present(tuple(fresh), tuple(fresh.values()))
    row.partial = {**row.partial, **{name: size for name, size in partial.items() if name not in row.shape.has}}
    books.partition(row.group.partition).gained([(row, before)])


def install(books: Books, draft: Books) -> None:
    """Let the rows of ``draft`` take the place of those in ``books``."""
    for lease in list(books.leases):
        if gone := [row for row in lease.rows if row not in draft.rows]:
            books.leases.release(lease.id, gone)
    for number, row in draft.rows.items():
        old = books.rows.get(number)
        if old is None:
            continue
        row.work, row.since = old.work, old.since
        if old.here:
            row.tags, row.tokens = {**old.tags, **row.tags}, row.tokens or old.tokens
            _add(draft, row, old.columns, old.partial)
    for name, partition in draft.partitions.items():
        if (before := books.partitions.get(name)) is not None:
            partition.resets, partition.peeked = before.resets, before.peeked
            partition.returned = before.returned
        _take_stock(partition)
    books.touched |= books.partitions.keys() | draft.partitions.keys()
    books.partitions, books.rows = draft.partitions, draft.rows


def _take_stock(partition: Partition) -> None:
    """Make the indexes and counts of all tasks anew, from the rows."""
    for queue in list(partition.queues.values()):
        partition.declare(queue.spec)
