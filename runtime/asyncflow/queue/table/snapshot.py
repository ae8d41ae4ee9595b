"""The durable state as records.

``snapshot`` returns the records at the start of a ledger, ``snapshot_rows`` the records for a replica controller. Each
record refers only to records before it. Tasks, the trainer, and the current slots and leases follow as their events.

Invariant: ``snapshot(restore(snapshot(s))) == snapshot(s)``, where restoring is ``QueueState.apply`` of each record.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from asyncflow.queue.ledger import events as ev
from asyncflow.queue.table.apply import QueueState
from asyncflow.queue.table.partition import PartitionState, Step
from asyncflow.queue.table.state import STATES, RowGroup, RowState
from asyncflow.rpc.columns import weighed_batches

_ROWS = 1 << 14
"""Rows of one record, at most, unless one group is larger: a replica serves clients between two records."""


def snapshot(state: QueueState) -> Iterator[ev.Event]:
    """Yield the records of the durable state of ``state``, in an order in which they can be restored."""
    units = [state.units[unit] for unit in sorted(state.units)]
    yield ev.SnapshotHead(state.epoch, units, sorted(state.leaving), list(state.leases.completed))
    for name in sorted(state.partitions):
        yield from _partition(state.partitions[name], state.index, works=True)
    for lease in sorted(state.leases, key=lambda lease: lease.id):
        rows = list(lease.rows)
        yield ev.Leased(lease.id, lease.partition, lease.task, lease.worker, lease.ticket, rows, lease.whole)


def snapshot_rows(state: QueueState) -> Iterator[ev.Event]:
    """Yield the records of the rows of ``state``, without the work of tasks on them."""
    for name in sorted(state.partitions):
        yield from _partition(state.partitions[name], state.index, works=False)


def _partition(partition: PartitionState, index: int, *, works: bool) -> Iterator[ev.Event]:
    name, gang = partition.name, partition.gang
    yield ev.SnapshotPartition(
        name=name,
        purpose=partition.purpose,
        schema=dict(partition.schema),
        creator=partition.creator,
        expected=partition.expected,
        closed=partition.closed,
        resets=partition.resets if works else 0,
        peeked=partition.peeked if works else 0,
        returned=partition.returned.total() if works else 0,
        cleared=partition.cleared,
        forgotten=partition.forgotten,
        attempts=sorted(partition.attempts),
        ended=[partition.counts[state] for state in STATES.values()],
        clients=dict(partition.clients),
        used=list(partition.used),
        skipped=list(partition.skipped),
        reasons=dict(partition.returned) if works else {},
    )
    own = {task: ev.Declared(queue.spec, index) for task, queue in partition.queues.items()}
    yield from [task for _, task in sorted((own | partition.elsewhere).items())]
    if gang.attempt >= 0:
        yield ev.Began(name, gang.attempt, gang.theta, gang.world)
    if gang.committed:
        yield ev.Committed(name, gang.committed)
    finished = (
        ev.GroupRecord(serial, step, *window, outcome, [])
        for step, ended in sorted(partition.finished.items())
        for serial, (window, outcome) in sorted(ended.items())
    )
    groups = chain(finished, (_group(group, works=works) for group in partition.groups.values()))
    for records in weighed_batches(groups, lambda group: len(group.rows or group.outcome), heaviest=_ROWS):
        yield ev.SnapshotGroups(name, records)
    for number in sorted(gang.steps):
        yield from _step(name, gang.steps[number])


def _group(group: RowGroup, *, works: bool) -> ev.GroupRecord:
    rows = [
        ev.RowRecord(
            row=row.row,
            state=RowState.LIVE if row.state is RowState.BOUND else int(row.state),
            lost=row.lost,
            moved=row.moved,
            works=[(task, work.attempt, work.done, work.holder) for task, work in sorted(row.work.items()) if works],
        )
        for row in group.rows
    ]
    return ev.GroupRecord(group.serial, group.step, *group.window, "", rows, group.instead_of)


def _step(name: str, step: Step) -> Iterator[ev.Event]:
    """Yield the events of a step of the trainer; a committed one has no slots, but keeps its declared size."""
    if step.groups is not None:
        yield ev.Opened(name, step.number, step.groups, step.size or 0)
    bound, before = list(step.bound), 0
    for slot, decision in enumerate(step.slots):
        totals = decision.totals
        yield ev.SlotDecided(
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
