"""The consumers of a job's two partitions: which columns make a row ready for whom, and what each adds.

    train:  prompt_ids, task ─> rollout ─> responses, reward ─> advantage ─> advantage ─> train (the gang)
    eval:   prompt_ids, task ─> rollout ─> responses, reward ─> score

Of an algorithm whose advantages the trainer makes, the task ``advantage`` filters and shapes as ever, and writes
``outcome``, the reward that they are made of.

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
    lease_s, algorithm = spec.rollout.lease_seconds, algorithm_of(spec)
    return [
        TaskSpec(partition=TRAIN, name="rollout", needs=_PROMPT, writes=_RESPONSE, groups=True, lease_s=lease_s),
        TaskSpec(
            partition=TRAIN,
            name="advantage",
            needs=["reward"],
            writes=[algorithm.writes],
            groups=True,
            lease_s=DRIVER_LEASE_S,
        ),
        TaskSpec(
            partition=TRAIN,
            name="train",
            needs=["prompt_ids", *_RESPONSE, algorithm.writes],
            kind="gang",
            groups=algorithm.pairs,
            order="key" if spec.schedule.whole_steps else "fifo",
            shared_tokens=spec.trainer.backend.packing == "shared-prompt",
        ),
        TaskSpec(partition=EVAL, name="rollout", needs=_PROMPT, writes=_RESPONSE, groups=True, lease_s=lease_s),
        TaskSpec(partition=EVAL, name="score", needs=["reward"], lease_s=DRIVER_LEASE_S),
    ]


def outputs_of(spec: RLJobSpec) -> dict[str, int]:
    """Return the most bytes of each column that is written to a training sample after its creation."""
    own = algorithm_of(spec).writes
    return {own if name == "advantage" else name: size for name, size in spec.output_bytes.items()}
