"""What the queue says about itself: counts for the live view, and what a restarted driver needs.

Invariant: reading changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from asyncflow.queue.protocol.messages import PartitionSnapshot, QueueStats, StepState
from asyncflow.queue.table.partition import Partition
from asyncflow.queue.table.state import State
from asyncflow.queue.table.table import Table


class Storage(NamedTuple):
    """Bytes held and allowed in all units, their number, and the size of the ledger."""

    used: int
    limit: int
    units: int
    ledger: int


def stats(table: Table, storage: Storage) -> QueueStats:
    """Count what there is, in O(partitions, tasks and open steps)."""
    partitions = table.books.partitions.values()
    queues = {f"{p.name}/{name}": queue for p in partitions for name, queue in p.queues.items()}
    counters = table.claims.counters

    def count(state: State) -> int:
        return sum(partition.counts[state] for partition in partitions)

    return QueueStats(
        ready={name: queue.index.weight for name, queue in queues.items()},
        leased={name: queue.leased for name, queue in queues.items() if queue.spec.kind == "lease"},
        parked={f"{partition}/{task}": n for (partition, task), n in table.claims.parked().items()},
        live=count(State.LIVE) + count(State.BOUND) + count(State.WANTED),
        staged=count(State.BOUND),
        committed=count(State.TRAINED),
        filtered=count(State.FILTERED),
        dropped=count(State.DROPPED),
        wanted=count(State.WANTED),
        bytes=storage.used,
        limit=storage.limit,
        units=storage.units,
        lease_expiries=counters.expiries,
        redeliveries=counters.redeliveries,
        fenced=counters.fenced,
        ledger_bytes=storage.ledger,
    )


def snapshot(partition: Partition, *, step: int | None = None) -> PartitionSnapshot:
    """Say how far everything has come, in O(samples); with ``step`` only how far that step has, in O(groups)."""
    gang = partition.gang
    return PartitionSnapshot(
        next_serial=partition.next_serial,
        missing=_missing(partition) if step is None else [],
        steps={number: _step(partition, number) for number in (_unfinished(partition) if step is None else [step])},
        attempt=gang.attempt,
        last_committed_step=gang.committed,
        last_staged_step=gang.last_staged,
        wanted=len(partition.wanted),
        closed=partition.closed,
    )


def _unfinished(partition: Partition) -> list[int]:
    """Return the steps that are not committed, and those with samples that are not finished."""
    gang = partition.gang
    unfinished = {group.step for group in partition.groups.values()}
    later = {step for step in gang.steps if step > gang.committed}
    later |= {finished.step for _, finished in partition.finished.items() if finished.step > gang.committed}
    return sorted(unfinished | later)


def _missing(partition: Partition) -> list[int]:
    """Return the serials below the next one that were never created; in training they say which prompt is next."""
    missing: list[int] = []
    if partition.purpose == "train":
        before = -1
        for serial in sorted([*partition.finished, *partition.groups]):
            missing += range(before + 1, serial)
            before = serial
    return missing


def _step(partition: Partition, number: int) -> StepState:
    step = partition.gang.steps.get(number)
    groups = [group for group in partition.groups.values() if group.step == number]
    rows = [row for group in groups for row in group.rows]
    finished = {serial: f for serial, f in partition.finished.items() if f.step == number}
    outcomes = "".join(f.outcome for f in finished.values())

    def count(state: State, letter: str) -> int:
        return sum(row.state is state for row in rows) + outcomes.count(letter)

    return StepState(
        groups=step.groups if step else None,
        group_size=step.size if step else None,
        serials=sorted([*finished, *(group.serial for group in groups)]),
        done={
            task: sum(not row.state.final and bool((work := row.work.get(task)) and work.done) for row in rows)
            for task, queue in partition.queues.items()
            if queue.spec.kind == "lease"
        },
        bound=sum(row.state is State.BOUND for row in rows),
        trained=count(State.TRAINED, "t"),
        filtered=count(State.FILTERED, "f"),
        dropped=count(State.DROPPED, "d"),
        excluded=sum("t" not in f.outcome for f in finished.values()),
        staged=bool(step and partition.gang.staged(step)),
    )
