"""The consumers of a job's two partitions: which columns make a row ready for whom, and what each adds.

    train:  prompt_ids, task ─> rollout ─> responses, reward ─> advantage ─> advantage ─> train (the gang)
    eval:   prompt_ids, task ─> rollout ─> responses, reward ─> score

Rollouts also write ``details``, which no task needs: what reward functions said of a sample beside its reward.

Invariant: a function of the manifest; the process that serves the queue declares them before any client can ask.
"""

from __future__ import annotations

from asyncflow.algorithms.base import algorithm_of
from asyncflow.api.job import RLJobSpec
from asyncflow.queue.protocol.messages import TaskSpec

TRAIN = "train"
EVAL = "eval"
DRIVER_LEASE_S = 10.0
"""The driver decides at once: a longer lease would only delay the next driver."""

_PROMPT = ["prompt_ids", "task"]
_RESPONSE = ["response_ids", "logprobs", "versions", "reward"]


def tasks_of(spec: RLJobSpec) -> list[TaskSpec]:
    """Return the tasks of both partitions."""
    lease_s = spec.rollout.lease_seconds
    return [
        TaskSpec(partition=TRAIN, name="rollout", needs=_PROMPT, writes=_RESPONSE, groups=True, lease_s=lease_s),
        TaskSpec(
            partition=TRAIN,
            name="advantage",
            needs=["reward"],
            writes=["advantage"],
            groups=True,
            lease_s=DRIVER_LEASE_S,
        ),
        TaskSpec(
            partition=TRAIN,
            name="train",
            needs=["prompt_ids", *_RESPONSE, "advantage"],
            kind="gang",
            groups=algorithm_of(spec).pairs,
            order="key" if spec.schedule.whole_steps else "fifo",
            shared_tokens=spec.trainer.backend.packing == "shared-prompt",
        ),
        TaskSpec(partition=EVAL, name="rollout", needs=_PROMPT, writes=_RESPONSE, groups=True, lease_s=lease_s),
        TaskSpec(partition=EVAL, name="score", needs=["reward"], lease_s=DRIVER_LEASE_S),
    ]
