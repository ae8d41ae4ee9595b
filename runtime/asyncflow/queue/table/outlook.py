"""What a partition waits for: how far each task is, and the oldest row that one lacks a column of.

Invariant: looking changes nothing, and looks at no more than ``MOST`` groups of a partition, the oldest ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from asyncflow.queue.protocol.views import PartitionView, TaskView, Unready
from asyncflow.queue.table.partition import Partition
from asyncflow.queue.table.state import Row, State
from asyncflow.queue.table.table import Table

MOST = 10_000


def view(table: Table, name: str, now: float) -> PartitionView:
    """Describe a partition; one that nobody made is empty."""
    partition = table.books.partitions.get(name) or Partition(name)
    oldest, parked = oldest_unready(partition), table.claims.parked()
    living = sum(partition.counts[state] for state in State if not state.final)
    return PartitionView(
        name=name,
        purpose=partition.purpose or "",
        rows=living,
        wanted=len(partition.wanted),
        cleared=partition.cleared - partition.forgotten,
        expected=partition.expected,
        columns=dict(sorted(partition.schema.items())),
        tasks=[
            TaskView(
                name=task,
                kind=queue.spec.kind,
                needs=queue.spec.needs,
                writes=queue.spec.writes,
                groups=queue.by_group,
                lease_s=queue.spec.lease_s,
                ready=queue.index.weight,
                leased=queue.leased,
                done=queue.busy - queue.leased,
                parked=parked.get((name, task), 0),
                oldest=_unready(partition, task, oldest[task], now) if task in oldest else None,
            )
            for task, queue in sorted(partition.queues.items())
        ],
    )


def waits(table: Table, now: float) -> Iterator[tuple[str, str, Unready]]:
    """Yield partition, task and its oldest row that is not ready, where there is one."""
    for name, partition in table.books.partitions.items():
        for task, row in oldest_unready(partition).items():
            yield name, task, _unready(partition, task, row, now)


def oldest_unready(partition: Partition) -> dict[str, Row]:
    """Give, by task, the oldest living row that has not got all columns that the task needs."""
    found: dict[str, Row] = {}
    living = partition.counts[State.LIVE]
    left = {task: queue for task, queue in partition.queues.items() if queue.index.weight + queue.busy < living}
    for group in islice(partition.groups.values(), MOST):
        if not left:
            break
        for row in group.rows:
            if row.state is not State.LIVE:
                continue
            for task in [task for task, queue in left.items() if not queue.suits(row.shape)]:
                found[task] = row
                del left[task]
    return found


def _unready(partition: Partition, task: str, row: Row, now: float) -> Unready:
    lacks = set(partition.queues[task].spec.needs) - row.shape.has
    return Unready(
        row=row.row,
        serial=row.group.serial,
        sample=row.sample,
        seconds=max(0.0, now - row.since),
        lacks=sorted(lacks),
    )
