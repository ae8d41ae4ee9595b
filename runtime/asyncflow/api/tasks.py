"""Tasks as roles of their own: a user's function over rows, the reference model, the reward, and the critic.

``asyncflow.api.graph`` derives the tasks of a job, and their dependencies, from these settings.

Invariant: a column that a task writes declares its dtype and its largest size, so that a row is created only if there
is room for all its columns.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, StringConstraints

from asyncflow.api.base import FunctionName, Options, PluginName, Spec, Threads
from asyncflow.api.names import TASK_NAME
from asyncflow.api.placement import AcceleratorSpec, ResourcesSpec, TemplateSpec
from asyncflow.errors import ManifestError

ColumnName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$", max_length=63)]
"""The name of a column."""
ENTRY_BYTES: Final = 8
"""Bytes that are reserved for one entry of a task's column, for every dtype."""
TaskReplicas = Annotated[int, Field(ge=1, le=4096)]


class ColumnSpec(Spec):
    """A column that a task writes: for each row a list of at most ``most`` numbers of one dtype."""

    name: ColumnName
    """Name of the column."""
    dtype: Literal["float32", "float64", "int32", "int64", "bool", "uint8"] = "float32"
    """Dtype of its entries."""
    most: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    """Most entries of one row. Absent: ``sampling.maxTokens``, one for each token of a response."""


class ProcessSpec(Spec):
    """Devices, resources and pod template of the processes of a role."""

    accelerator: AcceleratorSpec = Field(default_factory=AcceleratorSpec)
    """Devices of one replica."""
    threads: Threads = 1
    """Compute threads of one replica (OMP_NUM_THREADS)."""
    resources: ResourcesSpec = Field(default_factory=ResourcesSpec)
    """CPU and memory of one replica."""
    template: TemplateSpec = Field(default_factory=TemplateSpec)
    """Additions to these pods; they override those of the job."""


class CriticRoleSpec(ProcessSpec):
    """The critic as a role of its own."""

    replicas: TaskReplicas = 1
    """Processes, each with the whole critic. Each rank of the trainer uses one of them; they sum their gradients before
    each update."""


class WorkerSpec(ProcessSpec):
    """Processes that work on rows of the queue, independently of each other."""

    replicas: TaskReplicas = 1
    """Processes, one pod each."""
    batch: Annotated[int, Field(ge=1, le=65_536)] = 16
    """Most rows that are computed together."""
    order: PluginName = "fifo"
    """Order of claiming rows: ``fifo`` (oldest step, then in the order in which they became ready), ``oldest`` (made by
    the oldest version), ``longest`` (most tokens, which balances replicas), ``key`` (in the order of the data), or an
    entry point of the group ``asyncflow.selections``."""
    lease_seconds: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    """Seconds without renewal after which another replica gets the rows of a replica."""
    drain_seconds: Annotated[float, Field(ge=0, le=86_400)] = 30.0
    """Seconds in which a terminating replica finishes its work; other replicas get the rest."""


class ReferenceSpec(WorkerSpec):
    """The reference model θ_0 as a role of its own: it computes log-probs of responses as soon as they are finished."""


class RewardRoleSpec(WorkerSpec):
    """The reward as a role of its own: it scores responses as soon as they are finished, in place of the rollouts."""

    groups: bool = False
    """Score all responses to a prompt together, as a function over groups needs: ``batch`` rows or one group."""
    parallel: Annotated[int, Field(ge=1, le=1024)] = 4
    """Batches that one replica scores at the same time; a batch is written when all its rows are scored."""

    def check(self, *, by_group: bool) -> None:
        """Raise ManifestError if a function scores whole groups (``by_group``) but the role claims single rows."""
        if by_group and not self.groups:
            what = "a reward function scores all responses to a prompt together, but the role claims single responses"
            raise ManifestError(what, where="spec.reward.role.groups", hint="Set groups: true")


class UserTaskSpec(WorkerSpec):
    """A user's function over rows, in processes of its own: it reads some columns of a row and writes others.

    The trainer waits for its columns, so that each sample is computed exactly once before it is trained. A task without
    a function is run by the user's own process (``trainer.external``).
    """

    name: Annotated[str, StringConstraints(pattern=f"^{TASK_NAME}$", max_length=16)]
    """Name of the task; its processes are the role ``task-NAME``."""
    function: FunctionName | None = None
    """``module:function`` of an installed module or one in the manifest's folder: ``def function(rows, config)`` or
    ``async def``, which returns a mapping of columns to values for each row. Absent: your own process runs the task, by
    ``get_experience_data`` and ``put_experience_data``; of the other fields only ``reads``, ``writes``, ``groups``,
    ``order`` and ``leaseSeconds`` then have an effect."""
    reads: Annotated[tuple[ColumnName, ...], Field(min_length=1, max_length=16)]
    """Columns that the function receives; a row is ready when it has them all."""
    writes: Annotated[tuple[ColumnSpec, ...], Field(min_length=1, max_length=16)]
    """Columns that the function returns."""
    groups: bool = False
    """Call the function with whole groups: all responses to a prompt together, ``batch`` rows or one group."""
    parallel: Annotated[int, Field(ge=1, le=1024)] = 1
    """Concurrent calls in one replica: of a plain function in so many processes, which can be killed; of an ``async
    def`` in the replica's event loop."""
    timeout_seconds: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    """Seconds that one call may take. After that its process is killed, or an awaited call is cancelled."""
    retries: Annotated[int, Field(ge=0, le=1000)] = 3
    """Number of times that a row is tried again, in any replica, after its call failed or its replica was lost. Then
    the sample is dropped and counted, with the reason; the job pauses if most samples fail."""
    config: Options = Field(default_factory=dict)
    """Settings that the function receives."""
