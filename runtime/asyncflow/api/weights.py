"""WeightSync: distribution of the versions of weights, as part of a job and as a resource of its own.

A job has these fields itself, or names a WeightSync that has them. A WeightSync with a source is for followers:
processes that only receive the versions of a job, or of a model that no job trains.

Invariants: a WeightSync serves one job, or follows one job, or publishes one model; only in the last case it has a pod,
the publisher. The size of the status is bounded, however many instances there are.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from asyncflow.api.base import (
    MOST_REPLICAS,
    Conditions,
    Frozen,
    Name,
    ObjectMeta,
    Quantity,
    Rule,
    Source,
    Spec,
    Threads,
    Time,
)
from asyncflow.api.names import API_VERSION
from asyncflow.api.placement import AcceleratorSpec, ResourcesSpec, TemplateSpec
from asyncflow.api.records import RoleRecord, SecretRecords
from asyncflow.api.versions import Count, VersionsState
from asyncflow.api.workers import EngineSpec, devices_are_used

PublishedDtype = Literal["float32", "bfloat16"]
_LEAST_CHUNK, _LARGEST_CHUNK = 64 << 10, 256 << 20
_LEAST_BANDWIDTH = 1 << 20


class WeightsSpec(Spec):
    """Format and transport of published versions."""

    transport: Literal["host", "mooncake", "pairs", "ipc"] = "host"
    """``host``: receivers pull a version over the network into host memory, from any peer that holds it. The others are
    faster and fall back to ``host``. ``mooncake``: one-sided reads by Mooncake's Transfer Engine, over TCP, RDMA or
    Ascend's links. ``pairs``: process groups of two, by the accelerator's library (NCCL, HCCL) or gloo. ``ipc``: memory
    that processes of one host share."""
    dtype: PublishedDtype | None = None
    """Dtype to which published weights are rounded. Absent: bfloat16 if the engine computes in it, or if the trainer
    holds the weights in it (``precision: bf16-stochastic``); otherwise float32."""
    stagger: Annotated[int, Field(ge=1, le=MOST_REPLICAS)] | None = None
    """Most instances that swap at the same time if the update is staggered. Absent: the update policy decides."""
    chunk_bytes: Quantity = Quantity("1Mi")
    """Most bytes of a version in one reply over the host network."""
    delta: bool = True
    """Over the host network, send only the differences from a version that both sides hold, if they are smaller."""
    bandwidth: Quantity | None = None
    """Most bytes per second that one holder sends to all receivers together; with transport ``host`` only. Absent: no
    limit."""
    keep: Annotated[int, Field(ge=1, le=64)] = 2
    """Number of newest versions that stay available even if no step needs them."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("chunk_bytes",),
            ok=lambda weights: _LEAST_CHUNK <= weights.chunk_bytes.bytes <= _LARGEST_CHUNK,
            cel="quantity(string(self.chunkBytes)).compareTo(quantity('64Ki')) >= 0"
            " && quantity(string(self.chunkBytes)).compareTo(quantity('256Mi')) <= 0",
            why="small chunks need too many calls, and large chunks need too much memory",
            fix="Set 64Ki to 256Mi",
        ),
        Rule(
            reads=("bandwidth",),
            ok=lambda weights: weights.bandwidth is None or weights.bandwidth.bytes >= _LEAST_BANDWIDTH,
            cel="!has(self.bandwidth) || quantity(string(self.bandwidth)).compareTo(quantity('1Mi')) >= 0",
            why="receivers would treat such a slow holder as dead",
            fix="Set bytes per second with a unit, 1Mi or more, e.g. 100Mi",
        ),
        Rule(
            reads=("bandwidth", "transport"),
            ok=lambda weights: weights.bandwidth is None or weights.transport == "host",
            cel="!has(self.bandwidth) || self.transport == 'host'",
            why="only the transport host can limit its bandwidth",
            fix="Set transport: host, or remove bandwidth",
        ),
    )
    frozen_fields: ClassVar[tuple[Frozen, ...]] = (
        Frozen(reads="transport", why="holders and receivers agree on it when they start"),
    )

    @property
    def own(self) -> WeightsSpec:
        """Only the fields that a job's section and a WeightSync share."""
        return WeightsSpec.model_construct(**{field: getattr(self, field) for field in WeightsSpec.model_fields})

    @property
    def are_defaults(self) -> bool:
        """True if the fields have their defaults, in any notation: ``1024Ki`` equals ``1Mi``."""
        default = WeightsSpec()
        written = self.own.model_copy(update={"chunk_bytes": default.chunk_bytes})
        return written == default and self.chunk_bytes.amount == default.chunk_bytes.amount


_DEFAULTS_CEL = (
    "self.transport == 'host' && !has(self.dtype) && !has(self.stagger) && self.delta && !has(self.bandwidth)"
    " && self.keep == 2 && quantity(string(self.chunkBytes)).compareTo(quantity('1Mi')) == 0"
)


class JobWeightsSpec(WeightsSpec):
    """The weight versions of a job, with its own settings or those of an existing WeightSync."""

    name: Name | None = None
    """Name of a WeightSync, in the job's namespace or in the file of the manifest, with the fields above. Absent: the
    job has its own."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *WeightsSpec.rules,
        Rule(
            reads=("name", "transport", "dtype", "stagger", "chunk_bytes", "delta", "bandwidth", "keep"),
            ok=lambda weights: weights.name is None or weights.are_defaults,
            cel=f"!has(self.name) || ({_DEFAULTS_CEL})",
            why="the WeightSync that it names determines the other fields",
            fix="Set them there, or remove name",
        ),
    )

    @classmethod
    def of(cls, weights: WeightsSpec, *, name: str | None = None) -> JobWeightsSpec:
        """Return the section of a job with the fields of ``weights``. name: of the WeightSync that they come from.

        With a name, the section is one that a manifest cannot contain: there, a named WeightSync excludes other fields.
        """
        return cls.model_construct(name=name, **dict(weights.own))


class WeightSourceSpec(Spec):
    """Source of the versions that followers receive: a job that trains them, or a model that is published unchanged."""

    job: Name | None = None
    """An RLJob of the namespace, whose published versions are received."""
    model: Source | None = None
    """A model as in ``spec.model.source`` of a job: a folder, ``pvc://CLAIM/PATH``, ``hf://ORG/NAME`` (local cache),
    ``tiny://NAME``. Its safetensors files are published unchanged, as θ_0."""
    watch: bool = False
    """Publish again whenever there is a newer model: in the folder itself, replaced as a whole, or in a subfolder whose
    name ends with the number of the version."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("model", "job"),
            ok=lambda source: (source.job is None) != (source.model is None),
            cel="has(self.job) != has(self.model)",
            why="versions come from one source",
            fix="Set exactly one of job and model",
        ),
        Rule(
            reads=("watch", "model"),
            ok=lambda source: not source.watch or _is_folder(source.model),
            cel="!self.watch || (has(self.model) && (self.model.startsWith('pvc://') || !self.model.contains('://')))",
            why="only a folder can be watched for newer models",
            fix="Set model to a folder or pvc://CLAIM/PATH, or remove watch",
        ),
    )


def _is_folder(model: str | None) -> bool:
    return model is not None and (model.startswith("pvc://") or "://" not in model)


class PublisherSpec(Spec):
    """The process that publishes the source's model."""

    resources: ResourcesSpec = Field(default_factory=ResourcesSpec)
    """CPU and memory: it holds ``keep`` versions, and one more while it reads a new one."""
    template: TemplateSpec = Field(default_factory=TemplateSpec)
    """Additions to its pod."""


class FollowerSpec(Spec):
    """A follower of ``source.model``, run by ``asyncflow role follower``. Followers of a job have the job's engine."""

    engine: EngineSpec = Field(default_factory=EngineSpec)
    """Engine that generates."""
    accelerator: AcceleratorSpec = Field(default_factory=AcceleratorSpec)
    """Devices of one follower."""
    threads: Threads = 1
    """Compute threads of one follower (OMP_NUM_THREADS)."""
    max_length: Annotated[int, Field(ge=2, le=1 << 20)] | None = None
    """Most tokens of a sequence. Absent: the model's positions, at most 4,096."""

    rules: ClassVar[tuple[Rule, ...]] = (devices_are_used("engine"),)


class SyncSpec(WeightsSpec):
    """The versions of the job that names this object, or of a source for followers."""

    source: WeightSourceSpec | None = None
    """Source of the versions if this object is for followers. Absent: the trainer of the job that names it."""
    update: Literal["delayed", "staggered"] | None = None
    """Way that followers change weights. ``delayed``: each follower swaps as soon as it has received a version, while
    it serves. ``staggered``: the same, but at most ``stagger`` followers swap at the same time (absent: a quarter), and
    never all. Absent: delayed. For rollouts see ``schedule.update`` of their job."""
    publisher: PublisherSpec | None = None
    """The process that publishes ``source.model``."""
    follower: FollowerSpec | None = None
    """Followers of ``source.model`` that ``asyncflow role follower`` runs."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *WeightsSpec.rules,
        Rule(
            reads=("publisher", "follower", "source"),
            ok=lambda sync: sync.publishes is not None or (sync.publisher, sync.follower) == (None, None),
            cel="(has(self.source) && has(self.source.model)) || !(has(self.publisher) || has(self.follower))",
            why="publisher and follower have an effect with source.model only",
            fix="Set source.model, or remove publisher and follower",
        ),
        Rule(
            reads=("update", "source"),
            ok=lambda sync: sync.update is None or sync.source is not None,
            cel="!has(self.update) || has(self.source)",
            why="without source, schedule.update of the job determines how rollouts change weights",
            fix="Set schedule.update of the job, or set source",
        ),
        Rule(
            reads=("stagger", "update", "source"),
            ok=lambda sync: sync.stagger is None or sync.source is None or sync.update == "staggered",
            cel="!has(self.stagger) || !has(self.source) || (has(self.update) && self.update == 'staggered')",
            why="stagger has an effect with update: staggered only",
            fix="Set update: staggered, or remove stagger",
        ),
    )
    frozen_fields: ClassVar[tuple[Frozen, ...]] = (
        *WeightsSpec.frozen_fields,
        Frozen(reads="source", why="followers have certificates of one source"),
    )

    @property
    def publishes(self) -> str | None:
        """The model that this object's publisher publishes, or None."""
        return None if self.source is None else self.source.model


class WeightsStatus(VersionsState):
    """State of a WeightSync as the operator observed it: distribution and origin of its versions."""

    observed_generation: Annotated[int, Field(ge=0)] = 0
    """Generation of the spec that this status describes."""
    accepted_generation: Count | None = None
    """Generation of the spec in force: the newest accepted one."""
    conditions: Conditions = ()
    """Accepted, Ready, Lagging; with a publisher also Degraded."""
    progress_time: Time | None = None
    """Time of the figures in this status."""
    job: Name | None = None
    """The job whose versions these are; absent if there is none."""
    version: Annotated[int, Field(ge=0)] = 0
    """Step of the newest published version."""
    attempt: Annotated[int, Field(ge=0)] = 0
    """Trainer attempt that made it."""
    address: Annotated[str, StringConstraints(max_length=256)] | None = None
    """Address that followers connect to."""
    certificate: Annotated[str, StringConstraints(max_length=253)] | None = None
    """Secret with the certificate that followers present."""
    failures: Annotated[dict[str, RoleRecord], Field(max_length=16)] = Field(default_factory=dict)
    """By role: ends of the publisher, and its attempts, that still matter."""
    secrets: SecretRecords = Field(default_factory=dict)
    """By role: Secrets of a WeightSync with a publisher. ``follower``: the Secret for its followers."""

    @property
    def begun(self) -> bool:
        """True once a publisher was created."""
        return bool(self.failures)


class WeightSync(Spec):
    """The weight versions of one job, or of a model that no job trains."""

    api_version: Literal["asyncflow.dev/v1alpha1"] = API_VERSION
    """asyncflow.dev/v1alpha1."""
    kind: Literal["WeightSync"] = "WeightSync"
    """WeightSync."""
    metadata: ObjectMeta
    """Name, namespace, labels, annotations."""
    spec: SyncSpec = Field(default_factory=SyncSpec)
    """Desired state."""
    status: WeightsStatus | None = None
    """Observed state; written by the operator."""
