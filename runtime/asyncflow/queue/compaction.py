"""The durable state as the shortest list of events that makes it again.

Invariant: folding ``dump(books)`` into empty ``Books`` gives books that ``dump`` to the same list.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from asyncflow.queue import events as ev
from asyncflow.queue.books import Books
from asyncflow.queue.gang import Step
from asyncflow.queue.readiness import Partition
from asyncflow.queue.state import Group, State

_CHUNK = 1000


def dump(books: Books) -> Iterator[ev.Event]:
    """Give the events that make the durable state of ``books``, in an order in which they can be folded."""
    yield from (books.units[unit] for unit in sorted(books.units))
    yield ev.Started(books.epoch)
    for name in sorted(books.partitions):
        yield from _partition(books.partitions[name])
    for lease in sorted(books.leases, key=lambda lease: lease.id):
        yield ev.Leased(lease.id, lease.partition, lease.task, lease.worker, lease.ticket, list(lease.rows))


def _partition(partition: Partition) -> Iterator[ev.Event]:
    name, gang = partition.name, partition.gang
    yield from (ev.Declared(partition.queues[task].spec) for task in sorted(partition.queues))
    yield from (ev.Typed(name, column, dtype) for column, dtype in sorted(partition.schema.items()))
    if partition.creator:
        yield ev.TakenOver(name, partition.creator)
    if gang.attempt >= 0:
        yield ev.Began(name, gang.attempt, gang.theta, gang.world)
    if gang.committed:
        yield ev.Committed(name, gang.committed)
    finals = ((serial, f.step, *f.window, f.outcome) for serial, f in sorted(partition.finished.items()))
    while chunk := list(islice(finals, _CHUNK)):
        yield ev.Finals(name, partition.purpose, chunk)
    yield from (_group(partition.groups[serial]) for serial in sorted(partition.groups))
    for number in sorted(gang.steps):
        step = gang.steps[number]
        if step.groups is not None:
            yield ev.Opened(name, number, step.groups, step.size or 0)
        yield from _slots(name, step)
        yield from (ev.RankDone(name, number, rank) for rank in sorted(step.ranks_done))
    if partition.closed is not None:
        yield ev.Closed(name, partition.closed)


def _slots(name: str, step: Step) -> Iterator[ev.Event]:
    bound, before = list(step.bound), 0
    for slot, decision in enumerate(step.slots):
        totals = decision.totals
        ranks = [[row.row for row in rank] for rank in decision.ranks]
        fresh = bound[before : totals.groups]
        before = totals.groups
        yield ev.Slotted(
            name, step.number, slot, fresh, ranks, decision.last, totals.groups, totals.samples, totals.response_tokens
        )


def _group(group: Group) -> ev.Event:
    rows = []
    for sample in sorted(group.rows):
        row = group.rows[sample]
        state = State.LIVE if row.state is State.BOUND else row.state
        works = [(task, work.attempt, work.done) for task, work in sorted(row.work.items())]
        rows.append((sample, row.row, int(state), row.lost, works))
    return ev.Kept(group.partition, group.purpose, group.serial, group.size, group.step, *group.window, rows)
