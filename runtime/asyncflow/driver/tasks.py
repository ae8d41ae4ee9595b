"""The tasks of a job as the queue's controller declares them.

Rollouts also write ``details``, which no task reads: the output of reward functions in addition to the reward. A gang
whose algorithm compares pairs takes whole groups.

If the trainer computes the advantages of an algorithm, the task ``advantage`` still filters groups and shapes rewards,
and writes ``outcome``, the shaped reward, instead.

Invariants: the tasks follow from the graph of the job (``asyncflow.api.graph``) and its algorithm alone; the controller
declares them before it serves clients.
"""

from __future__ import annotations

from asyncflow.algorithms.base import algorithm_of
from asyncflow.api.graph import ADVANTAGE, DRIVER_LEASE_S, graph_of
from asyncflow.api.job import RLJobSpec
from asyncflow.api.names import EVAL, TRAIN
from asyncflow.queue.protocol.messages import TaskSpec

__all__ = ["DRIVER_LEASE_S", "EVAL", "TRAIN", "tasks_of"]


def tasks_of(spec: RLJobSpec) -> list[TaskSpec]:
    """Return the tasks of both partitions."""
    algorithm = algorithm_of(spec)
    return [
        TaskSpec(
            partition=task.partition,
            name=task.name,
            needs=list(task.reads),
            writes=list(task.writes),
            groups=task.groups or (task.gang and algorithm.pairs),
            order=task.order,
            kind="gang" if task.gang else "lease",
            shared_tokens=task.shared_tokens,
            lease_s=task.lease_s,
        )
        for task in graph_of(spec, decided=algorithm.writes).tasks
    ]


def outputs_of(spec: RLJobSpec) -> dict[str, int]:
    """Return the maximum size in bytes of each column that is written to a training sample after its creation."""
    own = algorithm_of(spec).writes
    return {own if name == ADVANTAGE else name: size for name, size in spec.output_bytes.items()}
