"""Where a task goes when it is declared: to the controller that has the fewest, if any may have it.

Invariant: tasks that end rows, by training or clearing them, are the home's.
"""

from __future__ import annotations

from collections import Counter

from asyncflow.queue.protocol.messages import TaskSpec
from asyncflow.queue.table.books import Books


def ends_rows(spec: TaskSpec) -> bool:
    """Tell whether the task ends rows."""
    return spec.kind == "gang" or spec.clears


def place(books: Books, spec: TaskSpec, controllers: int) -> int:
    """Return the controller for a new task; the home only where it has fewer tasks than all shards."""
    if controllers == 1 or ends_rows(spec):
        return 0
    tasks: Counter[int] = Counter()
    for partition in books.partitions.values():
        tasks[0] += len(partition.queues)
        tasks.update(there.controller for there in partition.elsewhere.values())
    return min(range(controllers), key=lambda index: (tasks[index], index == 0, index))
