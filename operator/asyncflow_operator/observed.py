"""Views of the cluster's objects: small and frozen, made from whole objects as they arrive.

Invariants: a view holds only the fields that ``decide`` and ``desired`` read, so an index of thousands of pods stays
small. Two equal views never lead to different decisions. Times are unix seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal

from asyncflow.api.job import RLJob
from asyncflow.api.queue import QueueStatus, TransferQueue
from asyncflow.api.status import DriverStatus, JobStatus
from asyncflow.api.weights import WeightsStatus, WeightSync

PodPhase = Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"]
Manifest = dict[str, Any]
"""A Kubernetes object, or a part of one, as JSON values."""


@dataclass(frozen=True, slots=True, order=True)
class Ref:
    """Name of one object within a namespace, e.g. ``Ref("Pod", "quickstart-rollout-2")``."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Denial:
    """Refusal by the API server. why: its message.

    missing: whether the object does not exist because of it; deletes: whether the object was to be deleted; failed:
    whether the server failed, whatever the object.
    """

    ref: Ref
    why: str
    missing: bool
    deletes: bool = False
    failed: bool = False

    def __str__(self) -> str:
        return f"{self.ref.kind}/{self.ref.name}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The custom resource for which objects are made."""

    kind: Literal["RLJob", "TransferQueue", "WeightSync"]
    namespace: str
    name: str
    uid: str
    generation: int = 0
    created: float = 0.0
    deleting: bool = False
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


LEFT_BEHIND: Final = -1
"""Attempt before all others, of a pod whose end is not one of the present resource."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """One pod that the operator created.

    attempt: ``LEFT_BEHIND`` for a pod that remains of a deleted resource of the same name.
    digest: digest of the inputs from which the pod was built.
    outdated: whether the pod has not started and the spec in force would build it differently.
    phase: the pod's phase, or the result of its main container once that has ended, even if other containers run.
    leftover: whether other containers still run after the main one has ended.
    scheduled: whether it has a node; scheduler, unschedulable: the scheduler's name and message; gates: its scheduling
    gates.
    unreachable: whether its node does not answer.
    ends_by: end of the grace period of its deletion, in unix seconds by the clock of this machine.
    forced: whether it was deleted without a grace period, so that only finalizers keep it.
    claims: names of the PersistentVolumeClaims that it mounts.
    waiting, waiting_message: the kubelet's reason (ImagePullBackOff ...) and message why the container does not start.
    started: when the container started.
    exit_code, exit_reason, last_words: how the container ended, None and "" before that.
    disrupted: whether the cluster ended it (eviction, preemption, a lost or rebooted node); that is not a failure.
    disruption: what the cluster says about that.
    """

    name: str
    uid: str
    role: str
    index: int
    attempt: int
    digest: str = ""
    outdated: bool = False
    phase: PodPhase = "Pending"
    ready: bool = False
    deleting: bool = False
    ends_by: float | None = None
    forced: bool = False
    unreachable: bool = False
    leftover: bool = False
    created: float = 0.0
    started: float | None = None
    finished: float | None = None
    node: str = ""
    ip: str = ""
    scheduled: bool = False
    scheduler: str = ""
    claims: tuple[str, ...] = ()
    gates: tuple[str, ...] = ()
    finalizers: tuple[str, ...] = ()
    gated: bool = False
    unschedulable: str = ""
    waiting: str = ""
    waiting_message: str = ""
    exit_code: int | None = None
    exit_reason: str = ""
    last_words: str = ""
    disrupted: bool = False
    disruption: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """Settings that Kueue assigns to the pods of one role on admission.

    flavors: names of the ResourceFlavors whose labels the nodes must have.
    more: labels, annotations, nodeSelector and tolerations that admission checks add, in the form of PodSetUpdates.
    """

    flavors: tuple[str, ...] = ()
    more: tuple[Manifest, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectView:
    """Another object that the operator created: a Service, a claim, a PodGroup.

    digest: digest of the manifest that was applied.
    held: the fields that this operator manages, as the API server records them, "" if they are not compared.
    phase: the phase if the kind has one; for a Workload, its latest transition, which ``said`` explains.
    conditions, version: for a Workload, its conditions and the resource version that has them.
    assigned: for a Workload, the settings assigned to each role.
    """

    ref: Ref
    uid: str
    digest: str = ""
    held: str = ""
    phase: str = ""
    said: str = ""
    conditions: tuple[Manifest, ...] = ()
    version: str = ""
    assigned: Mapping[str, Assigned] = field(default_factory=lambda: MappingProxyType({}))
    deleting: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferredObject:
    """A cluster-scoped object that a job refers to, as last read. problem: why it is not available, "" if it is."""

    content: Manifest = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverProbe:
    """Result of polling a driver.

    status: its last valid answer, received at ``at``; error: why there is no newer one; pod: UID of the polled pod.
    """

    status: DriverStatus | None = None
    at: float = 0.0
    pod: str = ""
    error: str = ""
    failing_since: float | None = None

    @property
    def asked(self) -> bool:
        """Return whether this process has polled the driver at all: before that, the written status stays valid."""
        return self.status is not None or self.failing_since is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFree:
    """Free resources of one node, by name (``cpu`` in cores, ``memory`` in bytes, devices by number)."""

    name: str
    free: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """Input of the decision about one RLJob.

    job: the spec in force: the newest spec, or the last accepted one if the newest is refused; None without any.
    problem, problem_reason: why the newest spec is refused, "" if it is not.
    queue: the status of the job's own TransferQueue as last written, None if it does not exist yet.
    pods: the pods of all roles and of the job's own TransferQueue; objects: all other objects with the job's label.
    scaled_by: foreign field managers of spec.rollout.replicas.
    namespace_ending: whether the namespace is being deleted, so that nothing can be created in it.
    denied: the API server's refusals for this job (a quota ...).
    nodes: free resources of the nodes, None if they have not been read.
    found: the cluster-scoped objects that the job refers to and that have been read.
    """

    owner: Owner
    job: RLJob | None
    problem: str = ""
    problem_reason: str = ""
    status: JobStatus = field(default_factory=JobStatus)
    queue: QueueStatus | None = None
    pods: tuple[PodView, ...] = ()
    objects: Mapping[Ref, ObjectView] = field(default_factory=lambda: MappingProxyType({}))
    probe: DriverProbe = DriverProbe()
    scaled_by: tuple[str, ...] = ()
    namespace_ending: bool = False
    denied: tuple[Denial, ...] = ()
    nodes: tuple[NodeFree, ...] | None = None
    found: Mapping[Ref, ReferredObject] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferQueueState:
    """Input of the decision about one TransferQueue.

    queue: the spec in force, as in a JobState; job: the state of its job, None without one; nodes: as in a JobState,
    None for the queue of a job.
    """

    owner: Owner
    queue: TransferQueue | None
    problem: str = ""
    problem_reason: str = ""
    status: QueueStatus = field(default_factory=QueueStatus)
    job: JobState | None = None
    pods: tuple[PodView, ...] = ()
    objects: Mapping[Ref, ObjectView] = field(default_factory=lambda: MappingProxyType({}))
    namespace_ending: bool = False
    denied: tuple[Denial, ...] = ()
    nodes: tuple[NodeFree, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncState:
    """Input of the decision about one WeightSync.

    job: the state of the job whose versions it shows, None if there is none or it publishes a model itself.
    pods, objects, probe, denied, nodes: of its publisher, as in a JobState. For followers, objects has their manifest.
    """

    owner: Owner
    sync: WeightSync | None
    problem: str = ""
    problem_reason: str = ""
    status: WeightsStatus = field(default_factory=WeightsStatus)
    job: JobState | None = None
    pods: tuple[PodView, ...] = ()
    objects: Mapping[Ref, ObjectView] = field(default_factory=lambda: MappingProxyType({}))
    probe: DriverProbe = DriverProbe()
    namespace_ending: bool = False
    denied: tuple[Denial, ...] = ()
    nodes: tuple[NodeFree, ...] | None = None
