"""The durable state as records.

``snapshot`` returns what a ledger begins with, ``snapshot_rows`` what another controller is told. Each record refers
only to what came before it; the slots and leases that are still in force follow as the events that made them.

Invariant: ``snapshot(restore(snapshot(s))) == snapshot(s)``, where restoring is ``QueueState.apply`` of each record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import TypeVar

from asyncflow.queue.ledger import events as ev
from asyncflow.queue.table.apply import QueueState
from asyncflow.queue.table.partition import Partition, Step
from asyncflow.queue.table.state import Finished, Row, RowGroup, RowState
from asyncflow.rpc.columns import batches, weighed_batches

T = TypeVar("T")

_CLIENTS = 1000
_ROWS = 1 << 14
"""Rows or outcomes of one record, at most, but for a larger group: a shard serves others between two records."""


def snapshot(state: QueueState) -> Iterator[ev.Event]:
    """Return the records of the durable state of ``state``, in an order in which they can be restored."""
    units = [state.units[unit] for unit in sorted(state.units)]
    yield ev.SnapshotHead(state.epoch, units, sorted(state.leaving), state.leases.completed())
    for name in sorted(state.partitions):
        yield from _partition(state.partitions[name], state.index, works=True)
    for lease in sorted(state.leases, key=lambda lease: lease.id):
        rows = list(lease.rows)
        yield ev.Leased(lease.id, lease.partition, lease.task, lease.worker, lease.ticket, rows, lease.whole)


def snapshot_rows(state: QueueState) -> Iterator[ev.Event]:
    """Return the records of the rows of ``state``, without what their tasks have done with them."""
    for name in sorted(state.partitions):
        yield from _partition(state.partitions[name], state.index, works=False)


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
        trained=counts[RowState.TRAINED],
        filtered=counts[RowState.FILTERED],
        dropped=counts[RowState.DROPPED],
        attempts=sorted(partition.attempts),
        attempt=gang.attempt,
        theta=gang.theta,
        world=gang.world,
        committed=gang.committed,
    )
    for finished in batches(sorted(partition.finished.items()), _ROWS):
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


def _group_runs(groups: Iterable[RowGroup], *, works: bool) -> Iterator[ev.GroupRun]:
    for run in _runs(groups, lambda place, one: (one.serial - place, one.size, one.step, one.window)):
        first, rows = run[0], list(_row_runs([row for group in run for row in group.rows], works=works))
        yield ev.GroupRun(first.serial, len(run), first.size, first.step, *first.window, rows)


def _row_runs(rows: Iterable[Row], *, works: bool) -> Iterator[ev.RowRun]:
    def key(place: int, row: Row) -> tuple[object, ...]:
        return row.row - place, row.state, row.lost, row.moved, row.work if works else None

    for run in _runs(rows, key):
        first = run[0]
        state = RowState.LIVE if first.state is RowState.BOUND else first.state
        did = [(task, work.attempt, work.done, work.holder) for task, work in sorted(first.work.items()) if works]
        yield ev.RowRun(len(run), first.row, int(state), first.lost, first.moved, did)


def _step(name: str, step: Step) -> Iterator[ev.Event]:
    """Return the events of a step of the trainer's that is not committed."""
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
