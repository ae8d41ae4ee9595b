"""The durable state as records, and back.

``snapshot`` gives what a ledger begins with, ``snapshot_rows`` what a shard is told. Each record refers only to what
came before it; the slots and leases that are still in force follow as the events that made them.

Invariant: ``snapshot(restore(snapshot(s))) == snapshot(s)``, where restoring is ``Books.apply`` of each record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import TypeVar

from asyncflow.flow.schedule import Window
from asyncflow.net.batches import batches, weighed_batches
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.protocol.messages import Purpose
from asyncflow.queue.table.books import Books, Fold
from asyncflow.queue.table.gang import Step
from asyncflow.queue.table.partition import Partition
from asyncflow.queue.table.state import NO_SIZES, NO_TAGS, NO_WORK, STATES, Finished, Group, Row, State, Work

T = TypeVar("T")

_CLIENTS = 1000
_ROWS = 1 << 14
"""Rows or outcomes of one record, at most, but for a larger group: a shard serves others between two records."""


def snapshot(books: Books) -> Iterator[ev.Event]:
    """Return the records of the durable state of ``books``, in an order in which they can be restored."""
    units = [books.units[unit] for unit in sorted(books.units)]
    yield ev.SnapshotHead(books.epoch, units, sorted(books.leaving), books.leases.completed())
    for name in sorted(books.partitions):
        yield from _partition(books.partitions[name], books.index, works=True)
    for lease in sorted(books.leases, key=lambda lease: lease.id):
        rows = list(lease.rows)
        yield ev.Leased(lease.id, lease.partition, lease.task, lease.worker, lease.ticket, rows, lease.whole)


def snapshot_rows(books: Books) -> Iterator[ev.Event]:
    """Return the records of the rows of ``books``, without what their tasks have done with them."""
    for name in sorted(books.partitions):
        yield from _partition(books.partitions[name], books.index, works=False)


def _partition(partition: Partition, index: int, *, works: bool) -> Iterator[ev.Event]:
    name, gang, counts = partition.name, partition.gang, partition.counts
    own = {task: ev.Declared(queue.spec, index) for task, queue in partition.queues.items()}
    yield ev.SnapshotPartition(
        name=name,
        purpose=partition.purpose,
        tasks=[task for _, task in sorted((own | partition.elsewhere).items())],
        schema=dict(partition.schema),
        creator=partition.creator,
        expected=partition.expected,
        closed=partition.closed,
        resets=partition.resets if works else 0,
        peeked=partition.peeked if works else 0,
        returned=partition.returned if works else 0,
        cleared=partition.cleared,
        forgotten=partition.forgotten,
        trained=counts[State.TRAINED],
        filtered=counts[State.FILTERED],
        dropped=counts[State.DROPPED],
        attempts=sorted(partition.attempts),
        attempt=gang.attempt,
        theta=gang.theta,
        world=gang.world,
        committed=gang.committed,
    )
    for finished in batches(partition.finished.items(), _ROWS):
        yield ev.SnapshotRows(name, finished=list(_outcome_runs(finished)))
    for groups in weighed_batches(partition.groups.values(), lambda group: group.size, heaviest=_ROWS):
        yield ev.SnapshotRows(name, groups=list(_group_runs(groups, works=works)))
    for clients in batches(partition.used.clients(), _CLIENTS):
        yield ev.SnapshotRows(name, clients=clients)
    for number in sorted(gang.steps):
        yield from _step(name, gang.steps[number])


def _runs(things: Iterable[T], key: Callable[[int, T], object]) -> Iterator[list[T]]:
    """Return the longest runs of things of which ``key``, told also the place of each, is equal."""
    for _, alike in groupby(enumerate(things), lambda at: key(*at)):
        yield [thing for _, thing in alike]


def _outcome_runs(finished: Iterable[tuple[int, Finished]]) -> Iterator[tuple[int, int, int, int, int, str]]:
    for run in _runs(finished, lambda place, one: (one[0] - place, one[1])):
        serial, kind = run[0]
        yield serial, len(run), kind.step, *kind.window, kind.outcome


def _group_runs(groups: Iterable[Group], *, works: bool) -> Iterator[ev.GroupRun]:
    for run in _runs(groups, lambda place, one: (one.serial - place, one.size, one.step, one.window)):
        first, rows = run[0], list(_row_runs([row for group in run for row in group.rows], works=works))
        yield ev.GroupRun(first.serial, len(run), first.size, first.step, *first.window, rows)


def _row_runs(rows: Iterable[Row], *, works: bool) -> Iterator[ev.RowRun]:
    def key(place: int, row: Row) -> tuple[object, ...]:
        return row.row - place, row.state, row.lost, row.moved, row.work if works else None

    for run in _runs(rows, key):
        first = run[0]
        state = State.LIVE if first.state is State.BOUND else first.state
        did = [(task, work.attempt, work.done) for task, work in sorted(first.work.items()) if works]
        yield ev.RowRun(len(run), first.row, int(state), first.lost, first.moved, did)


def _step(name: str, step: Step) -> Iterator[ev.Event]:
    """Return the events of a step of the trainer's that is not committed."""
    if step.groups is not None:
        yield ev.Opened(name, step.number, step.groups, step.size or 0)
    bound, before = list(step.bound), 0
    for slot, decision in enumerate(step.slots):
        totals = decision.totals
        yield ev.Slotted(
            partition=name,
            step=step.number,
            slot=slot,
            bound=bound[before : totals.groups],
            ranks=[[row.row for row in rank] for rank in decision.ranks],
            last=decision.last,
            groups=totals.groups,
            samples=totals.samples,
            response_tokens=totals.response_tokens,
        )
        before = totals.groups
    yield from (ev.RankDone(name, step.number, rank) for rank in sorted(step.ranks_done))


def _restore_head(books: Books, head: ev.SnapshotHead) -> None:
    books.epoch, books.leaving = head.epoch, set(head.leaving)
    books.units = {unit.unit: unit for unit in head.units}
    for lease in head.completed:
        books.leases.remember(lease)


def _restore_partition(books: Books, record: ev.SnapshotPartition) -> None:
    if record.name in books.partitions:
        raise ValueError(f"the partition {record.name} is there")
    partition = books.partition(record.name)
    gang = partition.gang
    for task in record.tasks:
        books.apply(task)
    partition.purpose, partition.schema = record.purpose, dict(record.schema)
    partition.creator, partition.expected, partition.closed = record.creator, record.expected, record.closed
    partition.resets, partition.peeked, partition.returned = record.resets, record.peeked, record.returned
    partition.cleared, partition.forgotten = record.cleared, record.forgotten
    partition.counts[State.TRAINED] = record.trained
    partition.counts[State.FILTERED] = record.filtered
    partition.counts[State.DROPPED] = record.dropped
    partition.attempts = set(record.attempts)
    gang.attempt, gang.theta, gang.world, gang.committed = record.attempt, record.theta, record.world, record.committed


def _restore_rows(books: Books, record: ev.SnapshotRows) -> None:
    partition = books.partition(record.partition)
    if partition.purpose is None:
        raise ValueError(f"the partition {record.partition} has no purpose")
    for first, count, step, oldest, newest, outcome in record.finished:
        finished = Finished(step, Window(oldest, newest), outcome)
        if not STATES.keys() >= set(outcome):
            raise ValueError(f"{outcome} is no outcome")
        for serial in range(first, first + count):
            partition.finished[serial] = finished
        partition.number(first + count - 1)
    for run in record.groups:
        _restore_groups(books, partition, partition.purpose, run)
    for name, number, spans in record.clients:
        partition.used.restore(name, number, spans)


def _restore_groups(books: Books, partition: Partition, purpose: Purpose, run: ev.GroupRun) -> None:
    name, window = partition.name, Window(run.oldest, run.newest)
    serials = range(run.serial, run.serial + run.count)
    if sum(rows.count for rows in run.rows) != run.count * run.size:
        raise ValueError(f"the groups from {run.serial} on have too many rows or too few")
    if not partition.groups.keys().isdisjoint(serials):
        raise ValueError(f"groups from {run.serial} on are there")
    groups = [Group(name, purpose, serial, run.size, run.step, window) for serial in serials]
    partition.groups.update(zip(serials, groups, strict=True))
    if purpose != "open":
        partition.number(serials[-1])
    places = ((group, sample) for group in groups for sample in range(run.size))
    for rows in run.rows:
        _restore_run(books, partition, rows, places)


def _restore_run(books: Books, partition: Partition, run: ev.RowRun, places: Iterator[tuple[Group, int]]) -> None:
    """Make the rows of ``run`` at the next ``places``."""
    state, moved, lost, bare, now = State(run.state), run.moved, run.lost, partition.bare, books.now
    work = {task: Work(attempt, 0, done) for task, attempt, done in run.works} if run.works else NO_WORK
    numbers = range(run.row, run.row + run.count)
    made = [
        Row(group, sample, number, state, bare, now, work, NO_SIZES, NO_TAGS, (), 0, moved, lost)
        for number, (group, sample) in zip(numbers, places, strict=False)
    ]
    for row in made:
        row.group.rows.append(row)
    if state is State.WANTED:
        partition.wanted.update(dict.fromkeys(made))
        partition.revision += len(made)
    if state.final:
        return
    partition.counts[state] += len(made)
    if state is State.LIVE:
        if not lost:
            books.rows.update(zip(numbers, made, strict=True))
        for task, did in work.items():
            partition.queues[task].busy += len(made) * bool(did.done)


FOLDS: dict[type, Fold] = {
    ev.SnapshotHead: _restore_head,
    ev.SnapshotPartition: _restore_partition,
    ev.SnapshotRows: _restore_rows,
}
