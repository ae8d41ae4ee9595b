"""TransferQueue: the streaming table, as part of a job or as a standalone resource.

Invariant: a job's queue and a standalone queue have the same fields; only the owner of the pods differs.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from asyncflow.api.base import Conditions, ExistingName, Frozen, ObjectMeta, PluginName, Quantity, Rule, Spec, Time
from asyncflow.api.durability import LedgerSpec
from asyncflow.api.names import API_VERSION, LEAST_BYTES
from asyncflow.api.placement import ResourcesSpec, TemplateSpec
from asyncflow.api.records import RoleRecord, SecretRecords
from asyncflow.api.versions import Count

DRAIN_S = 120.0
"""Seconds in which a unit whose pod is deleted moves its rows to other units."""


class SecretEntry(Spec):
    """An entry of a Secret in the namespace of the object."""

    name: ExistingName
    """Name of the Secret."""
    key: Annotated[str, StringConstraints(pattern=r"^[-._a-zA-Z0-9]+$", max_length=253)] = "password"
    """Key of the entry."""


class StoreSpec(Spec):
    """A store that AsyncFlow does not run."""

    address: Annotated[str, StringConstraints(pattern=r"^[-._a-zA-Z0-9]+:[0-9]{1,5}$", max_length=256)]
    """HOST:PORT of the Redis server, of Mooncake's master, or of a third party's store."""
    password: SecretEntry | None = None
    """Secret with the store's password. On one machine: the file that ASYNCFLOW_STORE_PASSWORD_FILE names."""


class QueueSpec(Spec):
    """Controllers and storage units."""

    backend: PluginName = "memory"
    """Backend that holds the cells, an entry point of the group ``asyncflow.storage_backends``: ``memory`` (of the
    storage units), ``mooncake`` (Mooncake Store), ``redis``, or a third party's."""
    controllers: Annotated[int, Field(ge=1, le=16)] = 1
    """Controllers, one process each: every one has some of the tasks, and the first has all rows."""
    store: StoreSpec | None = None
    """An existing store of the kind that backend names. Absent: a store is created with the queue."""
    storage_units: Annotated[int, Field(ge=1, le=4096)] = 1
    """Storage units, one process each."""
    bytes_per_unit: Quantity = Quantity("256Mi")
    """Bytes of cells that one unit may hold; a put that exceeds it waits."""
    lease_seconds: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    """Seconds of a lease, unless its task sets another value."""
    resources: ResourcesSpec = Field(default_factory=ResourcesSpec)
    """CPU and memory of one storage unit."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("store", "backend"),
            ok=lambda queue: queue.store is None or queue.backend != "memory",
            cel="!has(self.store) || self.backend != 'memory'",
            why="the backend memory uses no store",
            fix="Set another backend, e.g. redis, or remove store",
        ),
        Rule(
            reads=("store.password", "backend"),
            ok=lambda queue: queue.store is None or queue.store.password is None or queue.backend != "mooncake",
            cel="!has(self.store) || !has(self.store.password) || self.backend != 'mooncake'",
            why="Mooncake has no passwords",
            fix="Remove store.password, and restrict network access to the store",
        ),
        Rule(
            reads=("bytes_per_unit",),
            ok=lambda queue: queue.bytes_per_unit.bytes >= LEAST_BYTES,
            cel="quantity(string(self.bytesPerUnit)).compareTo(quantity('1Mi')) >= 0",
            why="a storage unit needs at least 1Mi",
            fix="Set bytes with a unit, e.g. 256Mi",
        ),
        Rule(
            reads=("resources.memory", "bytes_per_unit"),
            ok=lambda queue: (
                queue.resources.memory is None or queue.resources.memory.amount >= queue.bytes_per_unit.amount
            ),
            cel="!has(self.resources.memory) || quantity(string(self.resources.memory))"
            ".compareTo(quantity(string(self.bytesPerUnit))) >= 0",
            why="the memory of the process is smaller than the cells that it may hold",
            fix="Set resources.memory to at least bytesPerUnit",
        ),
    )
    frozen_fields: ClassVar[tuple[Frozen, ...]] = (
        Frozen(reads="backend", why="cells do not move between backends"),
        Frozen(reads="controllers", why="tasks do not move between controllers"),
        Frozen(reads="store", why="cells do not move between stores"),
    )


class StandaloneQueueSpec(QueueSpec):
    """A queue that outlives jobs."""

    ledger: LedgerSpec = Field(default_factory=LedgerSpec)
    """The ledger."""
    template: TemplateSpec = Field(default_factory=TemplateSpec)
    """Additions to the pods."""


class QueueStatus(Spec):
    """State of a TransferQueue as the operator observed it."""

    observed_generation: Annotated[int, Field(ge=0)] = 0
    """Generation of the spec that this status describes."""
    accepted_generation: Count | None = None
    """Generation of the spec in force: the newest accepted one."""
    conditions: Conditions = ()
    """Accepted, Ready, Progressing, Degraded."""
    progress_time: Time | None = None
    """Time of the figures in this status."""
    address: Annotated[str, StringConstraints(max_length=256)] | None = None
    """Address that clients connect to."""
    ready_units: Annotated[int, Field(ge=0)] = 0
    """Storage units that are ready."""
    selector: Annotated[str, StringConstraints(max_length=512)] = ""
    """Label selector of the storage units, for /scale."""
    rows: Count | None = None
    """Live rows; absent while unknown."""
    bytes: Count | None = None
    """Bytes held; absent while unknown."""
    limit: Count | None = None
    """Bytes that may be held; absent while unknown."""
    partitions: Count | None = None
    """Jobs that use it; absent while unknown."""
    insecure: bool = False
    """True if the first controller serves other hosts without a certificate."""
    failures: Annotated[dict[str, RoleRecord], Field(max_length=16)] = Field(default_factory=dict)
    """By role: ends of processes, and attempts, that still matter."""
    secrets: SecretRecords = Field(default_factory=dict)
    """By role: Secrets of a standalone queue; ``client``: the Secret of its clients."""

    @property
    def begun(self) -> bool:
        """True once pods were created for the queue."""
        return self.address is not None


class TransferQueue(Spec):
    """A streaming two-dimensional table: rows are samples, columns are fields, tasks are consumers."""

    api_version: Literal["asyncflow.dev/v1alpha1"] = API_VERSION
    """asyncflow.dev/v1alpha1."""
    kind: Literal["TransferQueue"] = "TransferQueue"
    """TransferQueue."""
    metadata: ObjectMeta
    """Name, namespace, labels, annotations."""
    spec: StandaloneQueueSpec = Field(default_factory=StandaloneQueueSpec)
    """Desired state."""
    status: QueueStatus | None = None
    """Observed state; written by the operator."""
