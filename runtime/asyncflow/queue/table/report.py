"""Reports: counts, the state of a partition for a restarted driver, the rows that tasks wait for, and lists.

If a queue has several controllers, the first reports on rows, and each controller reports on its own tasks.

Invariants: reports change nothing, except that ``peek`` is recorded. Nothing is counted twice. Controllers without a
report are named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from msgspec.structs import replace

from asyncflow.queue.ledger import events as ev
from asyncflow.queue.protocol.messages import (
    KEY_TAG,
    Found,
    Listing,
    PartitionSnapshot,
    PartitionView,
    PeekedRows,
    Progress,
    QueueStats,
    StepState,
    Tag,
    TaskView,
    UnitView,
    Unready,
)
from asyncflow.queue.table.apply import QueueState
from asyncflow.queue.table.partition import PartitionState
from asyncflow.queue.table.rows import list_rows
from asyncflow.queue.table.state import IDLE, Row, RowState
from asyncflow.queue.table.table import Table


def stats(table: Table, units: Sequence[UnitView], *, synced: int, ledger_bytes: int) -> QueueStats:
    """Return all counts, in O(partitions, tasks and open steps). synced: units that have reported their rows."""
    partitions = table.state.partitions.values()
    queues = {f"{p.name}/{name}": queue for p in partitions for name, queue in p.queues.items()}
    counts = sum((partition.counts for partition in partitions), Counter[RowState]())
    return QueueStats(
        ready={name: queue.index.weight for name, queue in queues.items()},
        leased={name: queue.leased for name, queue in queues.items() if queue.spec.kind == "lease"},
        parked={f"{partition}/{task}": n for (partition, task), n in table.claims.parked().items()},
        live=counts[RowState.LIVE] + counts[RowState.BOUND] + counts[RowState.WANTED],
        staged=counts[RowState.BOUND],
        committed=counts[RowState.TRAINED],
        filtered=counts[RowState.FILTERED],
        dropped=counts[RowState.DROPPED],
        wanted=counts[RowState.WANTED],
        bytes=sum(unit.bytes for unit in units),
        limit=sum(unit.limit for unit in units),
        units=synced,
        lease_expiries=table.claims.expiries,
        redeliveries=table.claims.redeliveries,
        fenced=table.claims.fenced,
        ledger_bytes=ledger_bytes,
    )


def snapshot(partition: PartitionState, *, step: int | None = None) -> PartitionSnapshot:
    """Describe the progress of all steps, in O(samples), or of one ``step``, in O(groups)."""
    gang = partition.gang
    return PartitionSnapshot(
        next_serial=partition.used.next(),
        missing=partition.used.missing() if step is None and partition.purpose == "train" else [],
        steps={number: _step(partition, number) for number in (_unfinished(partition) if step is None else [step])},
        attempt=gang.attempt,
        last_committed_step=gang.committed,
        last_staged_step=gang.last_staged,
        closed=partition.closed,
        skipped=len(partition.skipped),
    )


def _unfinished(partition: PartitionState) -> list[int]:
    """Return the steps that are not committed, and those with samples that are not final."""
    known = {*partition.gang.steps, *(step for step, ended in partition.finished.items() if ended)}
    uncommitted = {step for step in known if step > partition.gang.committed}
    return sorted(uncommitted.union(group.step for group in partition.groups.values()))


def _step(partition: PartitionState, number: int) -> StepState:
    groups = [group for group in partition.groups.values() if group.step == number]
    rows = [row for group in groups for row in group.rows]
    finished = partition.finished.get(number, {})
    outcomes = "".join(f.outcome for f in finished.values())
    tasks = [task for task, queue in partition.queues.items() if queue.spec.kind == "lease"]

    def is_done(row: Row, task: str) -> bool:
        return row.state is not RowState.WANTED and row.work.get(task, IDLE).done > 0

    return StepState(
        serials=sorted([*finished, *(group.serial for group in groups)]),
        done={task: sum(not row.state.final and is_done(row, task) for row in rows) for task in tasks},
        undone={
            task: sum(not all(row.state.final or is_done(row, task) for row in group.rows) for group in groups)
            for task in tasks
        },
        filtered=sum(row.state is RowState.FILTERED for row in rows) + outcomes.count("f"),
        excluded=sum("t" not in f.outcome for f in finished.values()),
    )


MOST = 10_000


def view(table: Table, name: str, now: float) -> PartitionView:
    """Describe a partition; one that does not exist is empty."""
    partition = table.state.partitions.get(name) or PartitionState(name)
    oldest, parked = oldest_unready(partition, now), table.claims.parked()
    living = sum(partition.counts[state] for state in RowState if not state.final)
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
                oldest=oldest.get(task),
            )
            for task, queue in sorted(partition.queues.items())
        ],
    )


def waits(table: Table, now: float) -> Iterator[tuple[str, str, Unready]]:
    """Yield partition, task and the task's oldest row that is not ready, for each task that has such a row."""
    for name, partition in table.state.partitions.items():
        for task, row in oldest_unready(partition, now).items():
            yield name, task, row


def oldest_unready(partition: PartitionState, now: float) -> dict[str, Unready]:
    """Describe, by task, the oldest living row that lacks a column that the task needs."""
    found: dict[str, Unready] = {}
    living = partition.counts[RowState.LIVE]
    left = {task: queue for task, queue in partition.queues.items() if queue.index.weight + queue.busy < living}
    for group in islice(partition.groups.values(), MOST):
        if not left:
            break
        for row in group.rows:
            if row.state is not RowState.LIVE:
                continue
            for task in [task for task, queue in left.items() if not queue.suits(row)]:
                found[task] = Unready(
                    row=row.row,
                    serial=row.group.serial,
                    sample=row.sample,
                    seconds=max(0.0, now - row.since),
                    lacks=sorted(left.pop(task).needs - row.columns.keys()),
                )
    return found


def listing(rows: Iterable[Row]) -> Listing:
    """List the ids, keys and tags of rows."""
    made = Listing([], [], [])
    for row in rows:
        made.rows.append(row.row)
        made.keys.append(key_of(row))
        made.tags.append(other_tags(row))
    return made


def find(partition: PartitionState, keys: Sequence[str]) -> Found:
    """Return the living rows with these keys, and the keys whose rows were lost with their unit."""
    rows = [partition.keys.get(key) for key in keys]
    return Found(
        rows=[row.row if row is not None and row.state is RowState.LIVE else 0 for row in rows],
        lost=[key for key, row in zip(keys, rows, strict=True) if row is not None and row.state is RowState.WANTED],
        unnamed=sum(KEY_TAG not in row.tags for row in partition.wanted),
    )


def peek(state: QueueState, partition: PartitionState, task: str, rows: Sequence[Row]) -> PeekedRows:
    """Describe rows as ``task`` sees them, and record that they were shown."""
    queue = partition.known_task(task) if task else None
    seen = PeekedRows([], [], [], [], [], [], [], [], {})
    for index, row in enumerate(rows):
        work = row.work.get(task, IDLE)
        seen.rows.append(row.row)
        seen.keys.append(key_of(row))
        seen.tags.append(other_tags(row))
        item = row.group if queue is not None and queue.by_group else row
        seen.ready.append(queue is not None and queue.has_ready(row) and item in queue.index)
        seen.leased.append(bool(work.lease))
        seen.done.append(bool(work.done))
        seen.attempts.append(work.attempt)
        seen.lacks.append(sorted(queue.needs - row.columns.keys()) if queue is not None else [])
        for name, size in row.sizes.items():
            seen.sizes.setdefault(name, [-1] * len(rows))[index] = size
    if rows:
        state.record(ev.Peeked(partition.name, len(rows)))
    return seen


def progress(partition: PartitionState, *, columns: Sequence[str], task: str) -> Progress:
    """Return how many rows ``task`` has completed or, without a task, how many have all of ``columns``."""
    if task:
        queue = partition.known_task(task)
        done, leased = queue.busy - queue.leased, queue.leased
    else:
        needed = frozenset(columns)
        done, leased = sum(needed <= row.columns.keys() for row in list_rows(partition)), 0
    return Progress(
        rows=partition.counts.total(),
        done=done,
        leased=leased,
        cleared=partition.cleared - partition.forgotten,
        expected=partition.expected,
    )


def key_of(row: Row) -> str:
    """Return the row's key, "" if it has none."""
    return str(row.tags.get(KEY_TAG, ""))


def other_tags(row: Row) -> dict[str, Tag]:
    """Return the row's tags without its key."""
    return {name: value for name, value in row.tags.items() if name != KEY_TAG}


def merge_stats(primary: QueueStats, replicas: Sequence[QueueStats], silent: Sequence[int] = ()) -> QueueStats:
    """Return the counts of the whole queue, without those of the ``silent`` controllers."""
    summed = {
        field: sum(getattr(each, field) for each in (primary, *replicas))
        for field in ("lease_expiries", "redeliveries", "fenced", "ledger_bytes")
    }
    by_task: dict[str, Any] = {
        field: {task: count for each in (primary, *replicas) for task, count in getattr(each, field).items()}
        for field in ("ready", "leased", "parked")
    }
    return replace(primary, **summed, **by_task, silent=list(silent))


def merge_snapshots(primary: PartitionSnapshot, replicas: Sequence[PartitionSnapshot]) -> PartitionSnapshot:
    """Return the progress of a partition, including the work of the tasks of all controllers."""
    steps = dict(primary.steps)
    for number, state in ((number, replica.steps[number]) for replica in replicas for number in replica.steps):
        if number in steps:
            own = steps[number]
            steps[number] = replace(own, done=own.done | state.done, undone=own.undone | state.undone)
    return replace(primary, steps=steps)


def merge_views(
    primary: PartitionView, replicas: Sequence[PartitionView], silent: Mapping[int, list[str]]
) -> PartitionView:
    """Describe a partition with the tasks of all controllers, except the ``silent`` ones, which are named."""
    tasks = [task for each in (primary, *replicas) for task in each.tasks]
    return replace(primary, tasks=sorted(tasks, key=lambda task: task.name), silent=dict(silent))
