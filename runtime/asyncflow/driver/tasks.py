"""The tasks of a job as the queue's controller declares them.

Rollouts also write ``details``, which no task needs: what reward functions said of a sample beside its reward. A gang
whose algorithm compares pairs takes whole groups.

Invariant: what the graph of the job says (``asyncflow.api.graph``), and nothing else; the process that serves the queue
declares them before any client can ask.
"""

from __future__ import annotations

from asyncflow.algorithms.base import algorithm_of
from asyncflow.api.graph import DRIVER_LEASE_S, EVAL, TRAIN, graph_of
from asyncflow.api.job import RLJobSpec
from asyncflow.queue.protocol.messages import TaskSpec

__all__ = ["DRIVER_LEASE_S", "EVAL", "TRAIN", "tasks_of"]


def tasks_of(spec: RLJobSpec) -> list[TaskSpec]:
    """Return the tasks of both partitions."""
    pairs = algorithm_of(spec).pairs
    return [
        TaskSpec(
            partition=task.partition,
            name=task.name,
            needs=list(task.reads),
            writes=list(task.writes),
            groups=task.groups or (task.gang and pairs),
            order=task.order,
            kind="gang" if task.gang else "lease",
            shared_tokens=task.shared_tokens,
            lease_s=task.lease_s,
        )
        for task in graph_of(spec).tasks
    ]
