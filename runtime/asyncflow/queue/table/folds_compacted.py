"""What the pieces of a compacted state do to the books.

Invariant: as for all folds, see ``Books``.
"""

from __future__ import annotations

from asyncflow.flow.schedule import Window
from asyncflow.queue.ledger import compacted
from asyncflow.queue.table.books import Books, Fold
from asyncflow.queue.table.folds_open import make_groups
from asyncflow.queue.table.partition import Partition
from asyncflow.queue.table.state import STATES, Finished, Group, State, Work, new_row


def _kept(books: Books, event: compacted.Kept) -> None:
    partition = books.partition(event.partition)
    partition.purpose = event.purpose
    window = Window(event.oldest, event.newest)
    group = Group(event.partition, event.purpose, event.serial, event.size, event.step, window)
    partition.groups[event.serial] = group
    if event.purpose != "open":
        partition.number(event.serial)
    for sample, number, state, lost, works in event.rows:
        row = new_row(group, sample, number, State(state), partition.bare, books.now)
        row.lost = lost
        if works:
            row.work = {task: Work(attempt, 0, done) for task, attempt, done in works}
        partition.enter(row)
        if row.state is State.LIVE and not lost:
            books.rows[number] = row
    partition.counts.pop(State.CLEARED, None)


def _alike(books: Books, event: compacted.Alike) -> None:
    partition = books.partition(event.partition)
    partition.purpose = "open"
    work = {task: Work(attempt, 0, done) for task, attempt, done in event.works}
    make_groups(books, partition, event.serial, event.groups, event.size, event.row, work)


def _finals(books: Books, event: compacted.Finals) -> None:
    partition = books.partition(event.partition)
    partition.purpose = event.purpose
    for serial, step, oldest, newest, outcome in event.groups:
        _keep(partition, serial, Finished(step, Window(oldest, newest), outcome))


def _ended(books: Books, event: compacted.Ended) -> None:
    partition = books.partition(event.partition)
    partition.purpose = event.purpose
    for first, count, outcome in event.runs:
        finished = Finished(event.step, Window(event.oldest, event.newest), outcome)
        for serial in range(first, first + count):
            _keep(partition, serial, finished)


def _keep(partition: Partition, serial: int, finished: Finished) -> None:
    partition.finished[serial] = finished
    partition.number(serial)
    for letter in finished.outcome:
        partition.counts[STATES[letter]] += 1


def _used(books: Books, event: compacted.Used) -> None:
    partition = books.partition(event.partition)
    partition.purpose = "open"
    partition.used.update(event.spans)
    partition.cleared += event.cleared
    partition.counts[State.FILTERED] += event.filtered
    partition.counts[State.DROPPED] += event.dropped


def _clients(books: Books, event: compacted.Clients) -> None:
    partition = books.partition(event.partition)
    partition.purpose = "open"
    for name, number, spans in event.clients:
        partition.used.name(name, number)
        partition.used.update(spans)


def _counted(books: Books, event: compacted.Counted) -> None:
    partition = books.partition(event.partition)
    partition.resets, partition.peeked, partition.forgotten = event.resets, event.peeked, event.forgotten


def _again(books: Books, event: compacted.Again) -> None:
    partition = books.partition(event.partition)
    partition.returned = event.returned
    partition.attempts.update(event.attempts)


def _acknowledged(books: Books, event: compacted.Acknowledged) -> None:
    for lease in event.leases:
        books.leases.remember(lease)


FOLDS: dict[type, Fold] = {
    compacted.Kept: _kept,
    compacted.Alike: _alike,
    compacted.Finals: _finals,
    compacted.Ended: _ended,
    compacted.Used: _used,
    compacted.Clients: _clients,
    compacted.Counted: _counted,
    compacted.Again: _again,
    compacted.Acknowledged: _acknowledged,
}
