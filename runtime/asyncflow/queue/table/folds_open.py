"""What the events of open partitions do to the books.

Invariant: as for all folds, see ``Books``.
"""

from __future__ import annotations

from asyncflow.queue.ledger import events as ev
from asyncflow.queue.table.books import Books, Fold
from asyncflow.queue.table.state import ANY_VERSION, IDLE, NO_SIZES, NO_TAGS, NO_WORK, Group, Row, State, Work


def _put(books: Books, event: ev.Put) -> None:
    """Make groups, or the wanted rows of those that are there."""
    partition = books.partition(event.partition)
    partition.purpose = "open"
    partition.used.add(event.serial, event.groups, living=partition.groups)
    rows, groups, bare, live = books.rows, partition.groups, partition.bare, State.LIVE
    name, since, size, number = partition.name, books.now, event.size, event.row
    made = 0
    for serial in range(event.serial, event.serial + event.groups):
        group = groups.get(serial)
        if group is None:
            group = groups[serial] = Group(name, "open", serial, size, 0, ANY_VERSION)
            mine = group.rows
            for sample in range(size):
                rows[number] = row = Row(group, sample, number, live, bare, since, NO_WORK, NO_SIZES, NO_TAGS)
                mine.append(row)
                number += 1
            made += size
            continue
        for sample, row in enumerate(group.rows[:size]):
            if row.state is State.WANTED:
                books.enter(partition, group, sample, number + sample)
        number += size
    partition.counts[live] += made


def _numbered(books: Books, event: ev.Numbered) -> None:
    partition = books.partition(event.partition)
    partition.purpose = "open"
    partition.used.name(event.client, event.number)


def _rows_cleared(books: Books, event: ev.RowsCleared) -> None:
    partition = books.partition(event.partition)
    lost = {row.row: row for row in partition.wanted}
    books.clear(partition, [books.rows.get(number) or lost[number] for number in event.rows])


def _reset(books: Books, event: ev.Reset) -> None:
    partition = books.partition(event.partition)
    queue = partition.queues[event.task]
    for group in partition.groups.values():
        for row in group.rows:
            work = row.work.get(event.task, IDLE)
            if row.state is not State.LIVE or not (work.lease or work.done):
                continue
            if work.lease:
                books.leases.release(work.lease, [row.row])
                queue.leased -= 1
            books.advance(queue, [row], lambda work: Work(work.attempt + 1))
        queue.refresh(group)
    partition.resets += event.rows


def _expected(books: Books, event: ev.Expected) -> None:
    books.partition(event.partition).expected = event.total


def _peeked(books: Books, event: ev.Peeked) -> None:
    books.partition(event.partition).peeked += event.rows


FOLDS: dict[type, Fold] = {
    ev.Put: _put,
    ev.Numbered: _numbered,
    ev.RowsCleared: _rows_cleared,
    ev.Reset: _reset,
    ev.Expected: _expected,
    ev.Peeked: _peeked,
}
