"""What all controllers of a queue say together, of what each says of its own tasks.

Invariant: what concerns rows is what the home says; what concerns a task is what its controller says; nothing is
counted twice; a controller of which nothing is told is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from asyncflow.queue.protocol.messages import PartitionSnapshot, QueueStats, StepState
from asyncflow.queue.protocol.views import PartitionView


def merge_stats(home: QueueStats, shards: Sequence[QueueStats], silent: Sequence[int] = ()) -> QueueStats:
    """Return the counts of the whole queue, but for what ``silent`` controllers would have said."""
    summed = {
        field: sum(getattr(each, field) for each in (home, *shards))
        for field in ("lease_expiries", "redeliveries", "fenced", "ledger_bytes")
    }
    by_task: dict[str, Any] = {
        field: {task: count for each in (home, *shards) for task, count in getattr(each, field).items()}
        for field in ("ready", "leased", "parked")
    }
    return replace(home, **summed, **by_task, silent=list(silent))


def merge_snapshots(home: PartitionSnapshot, shards: Sequence[PartitionSnapshot]) -> PartitionSnapshot:
    """Return how far a partition has come, with what the tasks of all controllers have done."""
    return replace(home, steps={number: _step(number, state, shards) for number, state in home.steps.items()})


def _step(number: int, state: StepState, shards: Sequence[PartitionSnapshot]) -> StepState:
    there = [shard.steps[number] for shard in shards if number in shard.steps]
    return replace(state, done={task: count for each in (state, *there) for task, count in each.done.items()})


def merge_views(home: PartitionView, shards: Sequence[PartitionView], silent: Mapping[int, list[str]]) -> PartitionView:
    """Describe a partition with the tasks of all controllers, but for those of ``silent`` ones, which are named."""
    tasks = [task for each in (home, *shards) for task in each.tasks]
    return replace(home, tasks=sorted(tasks, key=lambda task: task.name), silent=dict(silent))
