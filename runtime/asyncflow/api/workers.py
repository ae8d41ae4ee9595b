"""Settings of the rollouts and of the trainer's ranks.

Invariants: minReplicas <= replicas <= maxReplicas for rollouts. A gang of several processes has a device count that the
hardware supports.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, StringConstraints

from asyncflow.api.base import MOST_REPLICAS, Options, PluginName, Replicas, Rule, Seconds, Spec, Threads
from asyncflow.api.placement import AUTO, PROFILES, AcceleratorSpec, ResourcesSpec, TemplateSpec, counted

Dtype = Literal["float32", "bfloat16", "float16"]
ON_CPU: Final = ("transformers", "simulated", "counting")
"""Engines and backends that compute on the CPU only."""


def devices_are_used(plugin: str) -> Rule:
    """Return the rule that a role requests no devices if its ``plugin`` (engine or backend) computes on the CPU."""
    return Rule(
        reads=("accelerator.profile", f"{plugin}.name"),
        ok=lambda worker: getattr(worker, plugin).name not in ON_CPU or worker.accelerator.profile in ("cpu", AUTO),
        cel=f"!(self.{plugin}.name in {list(ON_CPU)}) || self.accelerator.profile == 'cpu'",
        why=f"the {plugin} computes on the CPU",
        fix=f"Set profile: cpu, or another {plugin}",
    )


class EngineSpec(Spec):
    """The rollout engine: an entry point of the group ``asyncflow.rollout_engines``."""

    name: PluginName = "transformers"
    """``transformers`` (in the rollout's process, on the CPU), ``vllm`` (a vLLM server next to it, docs/guide/vllm.md),
    ``simulated`` (service times, no model), or a third party's."""
    slots: Annotated[int, Field(ge=1, le=65_536)] = 16
    """Most sequences that run at the same time in one instance."""
    dtype: Dtype = "float32"
    """Dtype of the computation."""
    options: Options = Field(default_factory=dict)
    """Settings of the engine."""


def _default_min(fields: dict[str, Any]) -> int:
    return min(1, int(fields["replicas"]))


def _default_max(fields: dict[str, Any]) -> int:
    return max(1, int(fields["replicas"]))


class RolloutSpec(Spec):
    """The rollouts, which start, end and are scaled independently of each other."""

    replicas: Replicas = 1
    """Desired instances; ``kubectl scale`` changes this field."""
    min_replicas: Replicas = Field(default_factory=_default_min)
    """Fewest instances; they are part of the gang. Absent: 1, or 0 if replicas is 0."""
    max_replicas: Annotated[int, Field(ge=1, le=MOST_REPLICAS)] = Field(default_factory=_default_max)
    """Most instances. Absent: replicas."""
    engine: EngineSpec = Field(default_factory=EngineSpec)
    """Engine that generates."""
    accelerator: AcceleratorSpec = Field(default_factory=AcceleratorSpec)
    """Devices of one instance."""
    threads: Threads = 1
    """Compute threads of one instance (OMP_NUM_THREADS)."""
    resources: ResourcesSpec = Field(default_factory=ResourcesSpec)
    """CPU and memory of one instance."""
    template: TemplateSpec = Field(default_factory=TemplateSpec)
    """Additions to these pods; they override those of the job."""
    drain_seconds: Seconds = 30.0
    """Seconds in which a terminating instance finishes its work or hands it on."""
    lease_seconds: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    """Seconds without renewal after which another instance gets the prompts of an instance. Partial responses that take
    long are saved for it three times in this time."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("min_replicas", "replicas"),
            ok=lambda rollout: rollout.min_replicas <= rollout.replicas,
            cel="!has(self.minReplicas) || self.minReplicas <= self.replicas",
            why="minReplicas is above replicas",
            fix="Set minReplicas <= replicas <= maxReplicas",
        ),
        Rule(
            reads=("max_replicas", "replicas"),
            ok=lambda rollout: rollout.replicas <= rollout.max_replicas,
            cel="!has(self.maxReplicas) || self.replicas <= self.maxReplicas",
            why="maxReplicas is below replicas",
            fix="Set minReplicas <= replicas <= maxReplicas",
        ),
        devices_are_used("engine"),
    )


class BackendSpec(Spec):
    """The trainer's backend: an entry point of the group ``asyncflow.trainer_backends``."""

    name: PluginName = "torch"
    """``torch``, ``counting`` (adds one per sample, for tests), or a third party's."""
    precision: Literal["float32", "bf16", "bf16-stochastic"] = "float32"
    """Precision of forward, backward and weights. ``bf16`` computes in bfloat16 and holds weights in float32.
    ``bf16-stochastic`` also holds them in bfloat16 and rounds each update stochastically. Optimizer moments and
    the sum of gradients are always float32."""
    packing: Literal["separate", "shared-prompt"] = "separate"
    """``shared-prompt``: the responses of a group in a micro-batch share one copy of their prompt."""
    tokens_per_micro_batch: Annotated[int, Field(ge=1, le=16_777_216)] | None = None
    """Most tokens of a rank's micro-batch. Absent: as many as fit the device; on the CPU 4,096."""
    options: Options = Field(default_factory=dict)
    """Settings of the backend."""


def _legal_gang(name: str) -> Rule:
    facts = PROFILES[name]
    return Rule(
        reads=("accelerator.count", "accelerator.profile", "replicas"),
        ok=lambda trainer: (
            trainer.replicas == 1
            or trainer.accelerator.profile != name
            or trainer.accelerator.count in facts.gang_counts
        ),
        cel=f"self.replicas == 1 || self.accelerator.profile != '{name}' "
        f"|| self.accelerator.count in {list(facts.gang_counts)}",
        why=f"replicas of a trainer on {facts.title} cannot have this number of devices",
        fix=f"Set {counted(facts.gang_counts)}, or replicas: 1",
    )


TargetName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_]+([.][A-Za-z0-9_]+)*$", max_length=256)]


class LoraSpec(Spec):
    """Low-rank adapters that are trained in place of the weights (arXiv 2106.09685): W + alpha / rank * B A."""

    rank: Annotated[int, Field(ge=1, le=4096)] = 16
    """Rows of A and columns of B."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] = 32.0
    """Scale of the adapters, before division by ``rank``."""
    targets: Annotated[tuple[TargetName, ...], Field(max_length=64)] = ()
    """Linear layers that have adapters, by the end of their names, e.g. ``q_proj``. Absent: all except the output
    layer."""

    @property
    def scale(self) -> float:
        """The factor of B A in the weights."""
        return self.alpha / self.rank


class TrainerSpec(Spec):
    """The trainer: a gang of ranks that start and end together."""

    replicas: Annotated[int, Field(ge=1, le=4096)] = 1
    """Replicas, one pod each. A replica runs one rank on each of its devices, or one on the CPU."""
    external: bool = False
    """The trainer is your own process, of one rank, which joins the job by ``asyncflow.init_engines`` and may be
    restarted; the job starts none."""
    ranks_per_replica: Annotated[int, Field(ge=1, le=64)] | None = None
    """Ranks of one replica, one process each. Absent: one for each device (``accelerator.count``), 1 on the CPU."""
    backend: BackendSpec = Field(default_factory=BackendSpec)
    """Backend that trains."""
    lora: LoraSpec | None = None
    """Adapters that are trained, published, checkpointed and exported while the model is unchanged; needs the package
    peft. Absent: all weights are trained."""
    accelerator: AcceleratorSpec = Field(default_factory=AcceleratorSpec)
    """Devices of one replica; the LOCAL_RANK of a rank selects its device."""
    threads: Threads = 1
    """Compute threads of one rank (OMP_NUM_THREADS)."""
    resources: ResourcesSpec = Field(default_factory=ResourcesSpec)
    """CPU and memory of one replica. Absent: ``threads`` cores for each of its ranks."""
    template: TemplateSpec = Field(default_factory=TemplateSpec)
    """Additions to these pods; they override those of the job."""

    @property
    def local_ranks(self) -> int:
        """Ranks of one replica."""
        return self.ranks_per_replica or max(1, self.accelerator.count)

    @property
    def ranks(self) -> int:
        """Ranks of all replicas: the world size of the trainer's gang."""
        return self.replicas * self.local_ranks

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("ranks_per_replica", "accelerator.count"),
            ok=lambda trainer: (
                trainer.ranks_per_replica is None or trainer.accelerator.count in (0, trainer.ranks_per_replica)
            ),
            cel="!has(self.ranksPerReplica) || self.accelerator.count == 0 "
            "|| self.accelerator.count == self.ranksPerReplica",
            why="each rank trains on exactly one device",
            fix="Remove it, or set it to the value of accelerator.count",
        ),
        Rule(
            reads=("external", "replicas", "ranks_per_replica", "accelerator.count"),
            ok=lambda trainer: not trainer.external or trainer.ranks == 1,
            cel="!self.external || (self.replicas == 1 && self.accelerator.count <= 1"
            " && (!has(self.ranksPerReplica) || self.ranksPerReplica == 1))",
            why="your own trainer is one process of one rank",
            fix="Set replicas: 1 and at most one device, or remove external",
        ),
        Rule(
            reads=("lora", "external"),
            ok=lambda trainer: trainer.lora is None or not trainer.external,
            cel="!has(self.lora) || !self.external",
            why="your own trainer publishes whole weights",
            fix="Remove lora, or external",
        ),
        devices_are_used("backend"),
        *(_legal_gang(name) for name, facts in PROFILES.items() if facts.gang_counts != facts.legal_counts),
        Rule(
            reads=("lora", "backend.name"),
            ok=lambda trainer: trainer.lora is None or trainer.backend.name == "torch",
            cel="!has(self.lora) || self.backend.name == 'torch'",
            why="only the backend torch trains adapters",
            fix="Set backend.name: torch, or remove lora",
        ),
        Rule(
            reads=("backend.precision", "backend.name"),
            ok=lambda trainer: trainer.backend.precision != "bf16-stochastic" or trainer.backend.name == "torch",
            cel="self.backend.precision != 'bf16-stochastic' || self.backend.name == 'torch'",
            why="only the backend torch rounds stochastically",
            fix="Set precision: bf16, or backend.name: torch",
        ),
        Rule(
            reads=("backend.precision", "lora"),
            ok=lambda trainer: trainer.backend.precision != "bf16-stochastic" or trainer.lora is None,
            cel="self.backend.precision != 'bf16-stochastic' || !has(self.lora)",
            why="adapters are trained in float32",
            fix="Set precision: bf16, or remove lora",
        ),
    )
