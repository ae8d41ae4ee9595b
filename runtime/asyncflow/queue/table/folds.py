"""What the events that any partition may see do to the books.

Invariant: as for all folds, see ``Books``.
"""

from __future__ import annotations

from itertools import repeat

from asyncflow.flow.schedule import Window
from asyncflow.identity import home
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.protocol.messages import FILTERED
from asyncflow.queue.table.books import Books, Fold
from asyncflow.queue.table.leases import Lease
from asyncflow.queue.table.state import Group, State, Work


def _started(books: Books, event: ev.Started) -> None:
    books.epoch = event.epoch


def _unit_joined(books: Books, event: ev.UnitJoined) -> None:
    books.epoch = event.epoch
    books.units[event.unit] = event


def _unit_lost(books: Books, event: ev.UnitLost) -> None:
    if (unit := books.units.get(event.unit)) and unit.epoch == event.epoch:
        del books.units[event.unit]
    books.leaving.discard(event.epoch)
    gone = home(event.epoch, event.unit)
    books.lose([row for row in books.rows.values() if row.home == gone])


def _unit_leaving(books: Books, event: ev.UnitLeaving) -> None:
    books.leaving.add(event.epoch)


def _moved(books: Books, event: ev.Moved) -> None:
    for number in event.rows:
        books.rows[number].moved = event.home


def _rows_lost(books: Books, event: ev.RowsLost) -> None:
    books.lose([books.rows[row] for row in event.rows])


def _declared(books: Books, event: ev.Declared) -> None:
    partition = books.partition(event.spec.partition)
    if event.controller == books.index:
        partition.declare(event.spec)
    else:
        partition.elsewhere[event.spec.name] = event


def _typed(books: Books, event: ev.Typed) -> None:
    books.partition(event.partition).schema[event.column] = event.dtype


def _created(books: Books, event: ev.Created) -> None:
    partition = books.partition(event.partition)
    partition.purpose = event.purpose
    group = partition.groups.get(event.serial)
    samples = [sample for sample, _ in event.rows]
    if group is None:
        if event.size != len(samples) or samples != list(range(len(samples))):
            raise ValueError("the new group is not whole")
        window = Window(event.oldest, event.newest)
        group = Group(event.partition, event.purpose, event.serial, event.size, event.step, window)
        partition.groups[event.serial] = group
        partition.number(event.serial)
    elif not set(samples) <= set(range(group.size)):
        raise ValueError("the group has no such samples")
    for sample, number in event.rows:
        books.enter(partition, group, sample, number)


def _leased(books: Books, event: ev.Leased) -> None:
    queue = books.partition(event.partition).queues[event.task]
    held = dict.fromkeys(event.rows)
    lease = Lease(event.lease, event.partition, event.task, event.worker, event.ticket, held, whole=event.whole)
    books.leases.add(lease)
    rows = list(map(books.rows.__getitem__, event.rows))
    books.advance(queue, rows, lambda work: Work(work.attempt, event.lease, work.done))
    queue.taken(rows)
    queue.leased += len(held)


def _completed(books: Books, event: ev.Completed) -> None:
    queue, rows = books.end_rows(event.lease, event.rows, done=True)
    if queue.spec.clears and rows and rows[0].group.purpose == "open":
        books.clear(books.partition(rows[0].group.partition), rows)
    elif queue.by_group:
        for group in dict.fromkeys([row.group for row in rows]):
            queue.refresh(group)


def _returned(books: Books, event: ev.Returned) -> None:
    queue, rows = books.end_rows(event.lease, event.rows, done=False)
    queue.freed(rows)
    books.partition(queue.spec.partition).returned += len(rows)


def _dropped(books: Books, event: ev.Dropped) -> None:
    state = State.FILTERED if event.reason.startswith(FILTERED) else State.DROPPED
    books.finish([books.rows[row] for row in event.rows], state)


def _cleared(books: Books, event: ev.Cleared) -> None:
    old = books.partition(event.partition)
    rows = [row for group in old.groups.values() for row in group.rows]
    works = {id(row.work): row.work for row in rows}
    for lease in {work.lease for of in works.values() for work in of.values()}:
        books.leases.cancel(lease)
    books.frees += filter(None, map(books.rows.pop, [row.row for row in rows], repeat(None)))
    for group in old.groups.values():
        group.rows = []
    books.partitions[event.partition] = old.emptied()


def _closed(books: Books, event: ev.Closed) -> None:
    books.partition(event.partition).closed = event.step


def _taken_over(books: Books, event: ev.TakenOver) -> None:
    books.partition(event.partition).creator = event.attempt


FOLDS: dict[type, Fold] = {
    ev.Started: _started,
    ev.UnitJoined: _unit_joined,
    ev.UnitLost: _unit_lost,
    ev.RowsLost: _rows_lost,
    ev.UnitLeaving: _unit_leaving,
    ev.Moved: _moved,
    ev.Declared: _declared,
    ev.Typed: _typed,
    ev.Created: _created,
    ev.Leased: _leased,
    ev.Completed: _completed,
    ev.Returned: _returned,
    ev.Dropped: _dropped,
    ev.Cleared: _cleared,
    ev.Closed: _closed,
    ev.TakenOver: _taken_over,
}
