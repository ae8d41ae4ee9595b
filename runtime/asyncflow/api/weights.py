"""WeightSync: how versions of weights reach those who need them, as part of a job and as a resource of its own.

A job has the fields itself or names a WeightSync that has them. One that names a source instead is for followers: what
receives the versions of a job, or of a model that no job trains, and has no other part in it.

Invariant: a WeightSync serves one job, or follows one, or publishes one model; only the last has a pod, its publisher.
The status is bounded however many instances there are.
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
from asyncflow.api.versions import VersionsState
from asyncflow.api.workers import EngineSpec, devices_are_used

PublishedDtype = Literal["float32", "bfloat16"]
_LEAST_CHUNK, _LARGEST_CHUNK = 64 << 10, 256 << 20
_LEAST_BANDWIDTH = 1 << 20


class WeightsSpec(Spec):
    """Form in which versions are published, and how they travel."""

    transport: Literal["host", "mooncake", "pairs", "ipc"] = "host"
    """``host``: pulled over the network into host memory, from any peer that has them. The others are faster ways, with
    ``host`` behind them for what they do not bring: ``mooncake``: read one-sided by Mooncake's Transfer Engine, over
    TCP, RDMA or Ascend's links; ``pairs``: sent over process groups of two, by the accelerator's own library (NCCL,
    HCCL) or gloo; ``ipc``: mapped by processes of the same host."""
    dtype: PublishedDtype | None = None
    """Dtype to which published weights are rounded. Absent: bfloat16 where the engine computes in it, which
    rounds them anyway, or the trainer holds them in it (``precision: bf16-stochastic``), else float32."""
    stagger: Annotated[int, Field(ge=1, le=MOST_REPLICAS)] | None = None
    """Most instances that swap at the same time where the update is staggered. Absent: the update policy decides."""
    chunk_bytes: Quantity = Quantity("1Mi")
    """Most bytes of a version that one answer of a holder has, over the host network."""
    delta: bool = True
    """Send only what differs from a version that both sides hold, where that is less, over the host network."""
    bandwidth: Quantity | None = None
    """Bytes a second that one holder serves at most, to all receivers together; with transport ``host`` only. Absent:
    no bound."""
    keep: Annotated[int, Field(ge=1, le=64)] = 2
    """Newest versions that stay available although no step needs them any more."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("chunk_bytes",),
            ok=lambda weights: _LEAST_CHUNK <= weights.chunk_bytes.bytes <= _LARGEST_CHUNK,
            cel="quantity(string(self.chunkBytes)).compareTo(quantity('64Ki')) >= 0"
            " && quantity(string(self.chunkBytes)).compareTo(quantity('256Mi')) <= 0",
            why="small answers cost more calls than bytes, and several large ones do not fit into memory",
            fix="Give 64Ki to 256Mi",
        ),
        Rule(
            reads=("bandwidth",),
            ok=lambda weights: weights.bandwidth is None or weights.bandwidth.bytes >= _LEAST_BANDWIDTH,
            cel="!has(self.bandwidth) || quantity(string(self.bandwidth)).compareTo(quantity('1Mi')) >= 0",
            why="receivers would take a holder that is so slow for dead",
            fix="Give bytes a second with a unit, 1Mi or more, e.g. 100Mi",
        ),
        Rule(
            reads=("bandwidth", "transport"),
            ok=lambda weights: weights.bandwidth is None or weights.transport == "host",
            cel="!has(self.bandwidth) || self.transport == 'host'",
            why="the faster ways do not pass by what would slow them down",
            fix="Give transport: host, or leave bandwidth out",
        ),
    )
    frozen_fields: ClassVar[tuple[Frozen, ...]] = (
        Frozen(reads="transport", why="holders and receivers agree on it when they start"),
    )

    @property
    def own(self) -> WeightsSpec:
        """These fields alone: those that a job's section and a WeightSync share."""
        return WeightsSpec.model_construct(**{field: getattr(self, field) for field in WeightsSpec.model_fields})

    @property
    def are_defaults(self) -> bool:
        """True where these fields have their defaults, however they are written: ``1024Ki`` is ``1Mi``."""
        default = WeightsSpec()
        written = self.own.model_copy(update={"chunk_bytes": default.chunk_bytes})
        return written == default and self.chunk_bytes.amount == default.chunk_bytes.amount


_DEFAULTS_CEL = (
    "self.transport == 'host' && !has(self.dtype) && !has(self.stagger) && self.delta && !has(self.bandwidth)"
    " && self.keep == 2 && quantity(string(self.chunkBytes)).compareTo(quantity('1Mi')) == 0"
)


class JobWeightsSpec(WeightsSpec):
    """The weight versions of a job: of its own, or of an existing WeightSync by name."""

    name: Name | None = None
    """A WeightSync in the job's namespace, or in the file of the manifest, that has the fields above. Absent: the job
    makes its own."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *WeightsSpec.rules,
        Rule(
            reads=("name", "transport", "dtype", "stagger", "chunk_bytes", "delta", "bandwidth", "keep"),
            ok=lambda weights: weights.name is None or weights.are_defaults,
            cel=f"!has(self.name) || ({_DEFAULTS_CEL})",
            why="the other fields are those of the WeightSync that it names",
            fix="Set them there, or leave name out",
        ),
    )

    @classmethod
    def of(cls, weights: WeightsSpec) -> JobWeightsSpec:
        """Return the section of a job that has the fields of ``weights`` itself."""
        return cls(**dict(weights.own))


class WeightSourceSpec(Spec):
    """Origin of versions that followers receive: a job that trains them, or a model that is published as it is."""

    job: Name | None = None
    """An RLJob of the namespace: what its trainer publishes."""
    model: Source | None = None
    """A model as in ``spec.model.source`` of a job: a folder, ``pvc://CLAIM/PATH``, ``hf://ORG/NAME`` (local cache),
    ``tiny://NAME``. Its safetensors files are published as they are, as θ_0."""
    watch: bool = False
    """Publish again whenever the folder has a newer model: itself, replaced as a whole, or a subfolder whose name ends
    with a number, which is the version's."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("model", "job"),
            ok=lambda source: (source.job is None) != (source.model is None),
            cel="has(self.job) != has(self.model)",
            why="versions come from one origin",
            fix="Give either job or model",
        ),
        Rule(
            reads=("watch", "model"),
            ok=lambda source: not source.watch or _is_folder(source.model),
            cel="!self.watch || (has(self.model) && (self.model.startsWith('pvc://') || !self.model.contains('://')))",
            why="only a folder may get another model",
            fix="Give a folder or pvc://CLAIM/PATH, or leave watch out",
        ),
    )


def _is_folder(model: str | None) -> bool:
    return model is not None and (model.startswith("pvc://") or "://" not in model)


class PublisherSpec(Spec):
    """The process that publishes the source's model."""

    resources: ResourcesSpec = Field(default_factory=ResourcesSpec)
    """Its CPU and memory: it holds ``keep`` versions, and one more while it reads that."""
    template: TemplateSpec = Field(default_factory=TemplateSpec)
    """Additions to its pod."""


class FollowerSpec(Spec):
    """A follower of the source's model, by ``asyncflow role follower``; one of a job has its rollouts' engine."""

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
    """Origin of the versions where this object is for followers. Absent: the trainer of the job that names it."""
    update: Literal["delayed", "staggered"] | None = None
    """Way that followers change weights. ``delayed``: each as soon as a version is there, received while it serves.
    ``staggered``: the same, but only ``stagger`` of them at once, a quarter where that is absent, and never all of
    them. Absent: delayed. How the rollouts of a job do is said by its ``schedule.update``."""
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
            why="only a model has a publisher, and followers with an engine of their own",
            fix="Give source.model, or leave publisher and follower out",
        ),
        Rule(
            reads=("update", "source"),
            ok=lambda sync: sync.update is None or sync.source is not None,
            cel="!has(self.update) || has(self.source)",
            why="schedule.update of the job that names it says how rollouts change weights",
            fix="Set it there, or give the source that followers have",
        ),
        Rule(
            reads=("stagger", "update", "source"),
            ok=lambda sync: sync.stagger is None or sync.source is None or sync.update == "staggered",
            cel="!has(self.stagger) || !has(self.source) || (has(self.update) && self.update == 'staggered')",
            why="followers that are not staggered change weights whenever they can",
            fix="Give update: staggered, or leave stagger out",
        ),
    )
    frozen_fields: ClassVar[tuple[Frozen, ...]] = (
        *WeightsSpec.frozen_fields,
        Frozen(reads="source", why="followers have certificates of one source"),
    )

    @property
    def publishes(self) -> str | None:
        """The model that this object publishes by itself, None for none."""
        return None if self.source is None else self.source.model


class WeightsStatus(VersionsState):
    """State of a WeightSync as the operator observed it: what the driver says of versions, and about whose they are."""

    observed_generation: Annotated[int, Field(ge=0)] = 0
    """Generation of the spec that this status speaks of."""
    conditions: Conditions = ()
    """Accepted, Ready, Lagging; of one that publishes a model also Degraded."""
    progress_time: Time | None = None
    """Time at which this status was written: its figures are as of then."""
    job: Name | None = None
    """The job whose versions these are; absent where there is none."""
    version: Annotated[int, Field(ge=0)] = 0
    """Step of the newest published version."""
    attempt: Annotated[int, Field(ge=0)] = 0
    """Trainer attempt that made it."""
    address: Annotated[str, StringConstraints(max_length=256)] | None = None
    """Address that followers dial."""
    certificate: Annotated[str, StringConstraints(max_length=253)] | None = None
    """Secret with the certificate that followers show."""
    failures: Annotated[dict[str, RoleRecord], Field(max_length=16)] = Field(default_factory=dict)
    """By role: ends and attempts of the publisher, as far as they must be remembered."""
    secrets: SecretRecords = Field(default_factory=dict)
    """By role: Secrets of a WeightSync that publishes a model; ``follower``: that for its followers."""


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
