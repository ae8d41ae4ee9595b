"""Tasks as roles of their own: a user's function over rows, the reference model, the reward, and the critic.

Invariant: a column that a task writes says its dtype and how much of it a row may have, so that a row is created only
with room for it; which tasks a job has and how they hang together is in ``asyncflow.api.graph``.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, StringConstraints

from asyncflow.api.base import Options, PluginName, Spec, Threads
from asyncflow.api.names import TASK_NAME
from asyncflow.api.placement import AcceleratorSpec, ResourcesSpec, TemplateSpec
from asyncflow.errors import ManifestError

ColumnName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$", max_length=63)]
"""The name of a column."""
ENTRY_BYTES: Final = 8
"""Bytes that one entry of a column of a task is taken to have, whatever its dtype."""
TaskReplicas = Annotated[int, Field(ge=1, le=4096)]


class ColumnSpec(Spec):
    """A column that a task writes: for each row a list of numbers of one dtype, of any length up to ``most``."""

    name: ColumnName
    """Name of the column."""
    dtype: Literal["float32", "float64", "int32", "int64", "bool", "uint8"] = "float32"
    """Dtype of its entries."""
    most: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    """Most entries of one row. Absent: ``sampling.maxTokens``, one for each token of a response."""


class ProcessSpec(Spec):
    """Devices, resources and additions of the processes of a role."""

    accelerator: AcceleratorSpec = Field(default_factory=AcceleratorSpec)
    """Devices of one replica."""
    threads: Threads = 1
    """Compute threads of one replica (OMP_NUM_THREADS)."""
    resources: ResourcesSpec = Field(default_factory=ResourcesSpec)
    """CPU and memory of one replica."""
    template: TemplateSpec = Field(default_factory=TemplateSpec)
    """Additions to these pods; they win over those of the job."""


class CriticRoleSpec(ProcessSpec):
    """The critic as a role of its own."""

    replicas: TaskReplicas = 1
    """Processes, each with the whole critic: a rank of the trainer asks one of them, which add up what they learned
    before each update."""


class WorkerSpec(ProcessSpec):
    """Processes that work on rows of the queue, each on its own."""

    replicas: TaskReplicas = 1
    """Processes, one pod each."""
    batch: Annotated[int, Field(ge=1, le=65_536)] = 16
    """Most rows that are computed together."""
    order: PluginName = "fifo"
    """Which rows come first: ``fifo`` (oldest step, then as they became ready), ``oldest`` (made by the oldest
    version), ``longest`` (most tokens, which balances replicas), ``key`` (in the order of the data), or an entry point
    of the group ``asyncflow.selections``."""
    lease_seconds: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    """Seconds without renewal after which the rows of a replica go to another."""
    drain_seconds: Annotated[float, Field(ge=0, le=86_400)] = 30.0
    """Seconds that a replica has to finish what it computes when it is told to leave; the rest goes to others."""


class ReferenceSpec(WorkerSpec):
    """The reference model θ_0 as a role of its own: it computes the log-probs of finished responses as they come."""


class RewardRoleSpec(WorkerSpec):
    """The reward as a role of its own: it scores finished responses as they come, and rollouts score none."""

    groups: bool = False
    """Score all responses to a prompt at once, as a function over groups needs: ``batch`` rows or one group."""
    parallel: Annotated[int, Field(ge=1, le=1024)] = 4
    """Batches that one replica scores at the same time; the rows of one are written when all are scored."""

    def check(self, *, by_group: bool) -> None:
        """Raise ManifestError where a function is called with whole groups (``by_group``), and the role claims rows."""
        if by_group and not self.groups:
            what = "a reward function takes all responses to a prompt at once, and the role takes them one by one"
            raise ManifestError(what, where="spec.reward.role.groups", hint="Give true")


class UserTaskSpec(WorkerSpec):
    """A user's function over rows, in processes of its own: it reads columns of a row and writes others.

    The trainer waits for what it writes, so that each sample is computed exactly once before it is trained. Without a
    function the task is left to a process of the user's (``trainer.external``).
    """

    name: Annotated[str, StringConstraints(pattern=f"^{TASK_NAME}$", max_length=16)]
    """Name of the task; its processes are the role ``task-NAME``."""
    function: (
        Annotated[
            str,
            StringConstraints(
                pattern=r"^[A-Za-z_][A-Za-z0-9_]*([.][A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$", max_length=256
            ),
        ]
        | None
    ) = None
    """``module:function`` of a module beside the manifest or installed: ``def function(rows, config)`` or ``async
    def``, which returns a mapping of columns to values for each row. Absent: no process of the job runs the task; a
    process of yours does, by ``get_experience_data`` and ``put_experience_data``. Of the other fields only ``reads``,
    ``writes``, ``groups``, ``order`` and ``leaseSeconds`` count then."""
    reads: Annotated[tuple[ColumnName, ...], Field(min_length=1, max_length=16)]
    """Columns that the function is given; a row is ready when it has them all."""
    writes: Annotated[tuple[ColumnSpec, ...], Field(min_length=1, max_length=16)]
    """Columns that the function returns."""
    groups: bool = False
    """Give the function whole groups: all responses to a prompt at once, ``batch`` rows or one group."""
    parallel: Annotated[int, Field(ge=1, le=1024)] = 1
    """Calls at the same time in one replica: a plain function is called in so many processes, each of which can be
    killed; an ``async def`` so often at once in the replica's event loop."""
    timeout_seconds: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    """Seconds that one call may take. A process that takes longer is killed, an awaited call is cancelled."""
    retries: Annotated[int, Field(ge=0, le=1000)] = 3
    """How often a row is tried again, by whichever replica, after its call has failed or its replica was lost. Then the
    sample is dropped with the reason, and counted; a job of which most samples fail is paused."""
    config: Options = Field(default_factory=dict)
    """Settings that the function is given."""
