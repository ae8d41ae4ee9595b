"""Views of the cluster as the operator sees it: small and frozen, made from whole objects as they arrive.

Invariant: a view holds only what ``decide`` and ``desired`` read, so an index of thousands of pods stays small; two
equal views never lead to different decisions. Times are unix seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

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
    """Refusal by the API server, in its words.

    missing: whether the object does not exist because of that; failed: whether the server failed, whatever the object.
    """

    ref: Ref
    why: str
    missing: bool
    failed: bool = False

    def __str__(self) -> str:
        return f"{self.ref.kind}/{self.ref.name}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The custom resource that something is made for."""

    kind: Literal["RLJob", "TransferQueue", "WeightSync"]
    namespace: str
    name: str
    uid: str
    generation: int = 0
    created: float = 0.0
    deleting: bool = False
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """One pod that the operator made.

    digest: of what shaped the pod as it was made; outdated: whether it has not begun, and the spec in force would shape
    it in another way; phase: that of its main container once it has ended, whatever else runs beside
    it;
    leftover: whether something does; scheduled: whether it has a node; unschedulable: the scheduler's words;
    gates, finalizers: what keeps it from being scheduled, and from going;
    unreachable: whether its node does not answer; ends_by: when the grace period of its deletion ends, by the clock of
    this machine (unix seconds);
    forced: whether it was deleted without one, so that only finalizers keep it; claims: names of the
    PersistentVolumeClaims that it mounts;
    waiting: the kubelet's reason why the container does not start (ImagePullBackOff ...); waiting_message: its words;
    exit_code, exit_reason, last_words: how the container ended, None and "" while it has not; started: when it ran;
    disrupted: whether the cluster took it away (eviction, preemption, a lost or rebooted node), which counts as no
    failure.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """Settings that Kueue assigns to the pods of one role with its place.

    flavors: names of ResourceFlavors, whose labels nodes must have; more: what its admission checks add to labels,
    annotations, nodeSelector and tolerations, as a PodSetUpdate says it.
    """

    flavors: tuple[str, ...] = ()
    more: tuple[Manifest, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectView:
    """Another object that the operator made: a Service, a claim, a PodGroup.

    digest: as applied; held: the fields that are this operator's, as the API server records them, "" where it is not
    compared; phase: where the kind has one, and of a Workload the latest that happened to it; said: why a Workload is
    where it is; of a Workload also conditions: as Kueue and the operator have written them; version: the resource
    version that they are of; assigned: by role.
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
    """An object of the cluster that a job refers to, as last read. problem: why it cannot be had, "" if it can."""

    content: Manifest = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverProbe:
    """Result of asking the driver. status: its last good answer, taken at ``at``; error: why there is no newer one.

    pod: UID of the pod that was asked.
    """

    status: DriverStatus | None = None
    at: float = 0.0
    pod: str = ""
    error: str = ""
    failing_since: float | None = None

    @property
    def asked(self) -> bool:
        """Return whether this process has asked the driver at all: until then the written status still holds."""
        return self.status is not None or self.failing_since is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFree:
    """Free resources of one node, by name (``cpu`` in cores, ``memory`` in bytes, devices by number)."""

    name: str
    free: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """Everything that decides what happens to one RLJob.

    job: the spec in force: the newest, or the last that was accepted if ``problem`` says why the spec is not; None
    where none ever was; status: as last written;
    queue: the status of the job's own TransferQueue as last written, None where there is none yet; pods: of all roles,
    those of the job's own TransferQueue too; objects: all else that carries the job's label; scaled_by: foreign field
    managers of spec.rollout.replicas; namespace_ending: nothing can be made there any more;
    denied: what the API server refuses of this job (a quota ...); nodes: None if they have not been read; found: what
    of the cluster's objects that the job refers to has been read.
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
    """Everything that decides what happens to one TransferQueue.

    queue: the spec in force, as of a job; job: its owner, where it belongs to a job; nodes: as of a job, which has them
    where it belongs to one.
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
    """Everything that decides about one WeightSync.

    job: whose versions it shows, None where it publishes a model by itself; pods, objects, probe, denied, nodes: of
    that publisher, as of a job; of one for followers of a job, objects: the manifest that these read.
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
