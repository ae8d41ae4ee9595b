"""The roles that a job scales: rollouts, trainer ranks, and the optional models beside them.

Invariant: min <= replicas <= max for rollouts; a gang has a legal number of devices when it spans several processes.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, StringConstraints

from asyncflow.api.base import MOST_REPLICAS, Options, PluginName, Replicas, Rule, Seconds, Spec, Threads
from asyncflow.api.placement import AUTO, PROFILES, AcceleratorSpec, ResourcesSpec, TemplateSpec, counted

Dtype = Literal["float32", "bfloat16", "float16"]
ON_CPU: Final = ("transformers", "simulated", "counting")
"""Engines and back ends that compute on the CPU only."""


def devices_are_used(plugin: str) -> Rule:
    """Return the rule that a role asks for no devices where its ``plugin`` (engine or backend) computes on the CPU."""
    return Rule(
        reads=("accelerator.profile", f"{plugin}.name"),
        ok=lambda worker: getattr(worker, plugin).name not in ON_CPU or worker.accelerator.profile in ("cpu", AUTO),
        cel=f"!(self.{plugin}.name in {list(ON_CPU)}) || self.accelerator.profile == 'cpu'",
        why=f"the {plugin} computes on the CPU",
        fix=f"Give profile: cpu, or another {plugin}",
    )


class EngineSpec(Spec):
    """The rollout engine: an entry point of the group ``asyncflow.rollout_engines``."""

    name: PluginName = "transformers"
    """``transformers`` (in this process, on the CPU), ``vllm`` (a vLLM server beside it, docs/guide/vllm.md),
    ``simulated`` (service times, no model), or a third party's."""
    slots: Annotated[int, Field(ge=1, le=65_536)] = 16
    """Sequences that run at the same time in one instance."""
    dtype: Dtype = "float32"
    """Dtype of the computation."""
    options: Options = Field(default_factory=dict)
    """Settings of the engine."""


def _usual_least(fields: dict[str, Any]) -> int:
    return min(1, int(fields["replicas"]))


def _usual_most(fields: dict[str, Any]) -> int:
    return max(1, int(fields["replicas"]))


class RolloutSpec(Spec):
    """The rollouts: elastic, each one on its own."""

    replicas: Replicas = 1
    """Instances that are wanted; what ``kubectl scale`` changes."""
    min_replicas: Replicas = Field(default_factory=_usual_least)
    """Least number; these belong to the gang. Absent: 1, or 0 where replicas is 0."""
    max_replicas: Annotated[int, Field(ge=1, le=MOST_REPLICAS)] = Field(default_factory=_usual_most)
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
    """Additions to these pods; they win over those of the job."""
    drain_seconds: Seconds = 30.0
    """Seconds that an instance has to finish or hand back its work when it is told to leave."""
    lease_seconds: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    """Seconds without renewal after which an instance's prompts go to another. Three times as often, what there is of
    long responses is saved for it."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("min_replicas", "replicas"),
            ok=lambda rollout: rollout.min_replicas <= rollout.replicas,
            cel="!has(self.minReplicas) || self.minReplicas <= self.replicas",
            why="minReplicas is above replicas",
            fix="Give minReplicas <= replicas <= maxReplicas",
        ),
        Rule(
            reads=("max_replicas", "replicas"),
            ok=lambda rollout: rollout.replicas <= rollout.max_replicas,
            cel="!has(self.maxReplicas) || self.replicas <= self.maxReplicas",
            why="maxReplicas is below replicas",
            fix="Give minReplicas <= replicas <= maxReplicas",
        ),
        devices_are_used("engine"),
    )


class BackendSpec(Spec):
    """The trainer's back end: an entry point of the group ``asyncflow.trainer_backends``."""

    name: PluginName = "torch"
    """``torch``, ``counting`` (adds one per sample, for tests), or a third party's."""
    precision: Literal["float32", "bf16", "bf16-stochastic"] = "float32"
    """Precision of forward, backward and weights. ``bf16`` computes in bfloat16 and holds weights in float32;
    ``bf16-stochastic`` holds them in bfloat16 too and rounds each update to it stochastically. The moments of the
    optimizer and the sum of gradients are always float32."""
    packing: Literal["separate", "shared-prompt"] = "separate"
    """Share one copy of a group's prompt among its responses in a micro-batch."""
    tokens_per_micro_batch: Annotated[int, Field(ge=1, le=16_777_216)] | None = None
    """Most tokens of a rank's micro-batch, which is one pack. Absent: what fits the device; on the CPU 4,096."""
    options: Options = Field(default_factory=dict)
    """Settings of the back end."""


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
        why=f"ranks on several {facts.title} processes need other counts",
        fix=f"Give {counted(facts.gang_counts)}, or replicas: 1",
    )


TargetName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_]+([.][A-Za-z0-9_]+)*$", max_length=256)]


class LoraSpec(Spec):
    """Low-rank adapters that are trained in place of the weights (arXiv 2106.09685): W + alpha / rank * B A."""

    rank: Annotated[int, Field(ge=1, le=4096)] = 16
    """Rows of A and columns of B."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] = 32.0
    """Scale of the adapters, before it is divided by ``rank``."""
    targets: Annotated[tuple[TargetName, ...], Field(max_length=64)] = ()
    """Linear layers that have adapters, by the end of their name, such as ``q_proj``. Absent: all but the output
    layer."""

    @property
    def scale(self) -> float:
        """The factor of B A in the weights."""
        return self.alpha / self.rank


class TrainerSpec(Spec):
    """The trainer: a gang of ranks that lives and dies together."""

    replicas: Annotated[int, Field(ge=1, le=4096)] = 1
    """Replicas, one pod each. A replica runs one rank on each of its devices, or one on the CPU."""
    external: bool = False
    """The trainer is a process of yours, of one rank, that joins the job by ``asyncflow.init_engines`` and may come and
    go: nothing starts one."""
    ranks_per_replica: Annotated[int, Field(ge=1, le=64)] | None = None
    """Ranks of one replica, each a process. Absent: one for each device (``accelerator.count``), 1 on the CPU."""
    backend: BackendSpec = Field(default_factory=BackendSpec)
    """Backend that trains."""
    lora: LoraSpec | None = None
    """Adapters that are trained, published, checkpointed and exported while the model stays as it is; needs the package
    peft. Absent: all weights are trained."""
    accelerator: AcceleratorSpec = Field(default_factory=AcceleratorSpec)
    """Devices of one replica: each rank trains on one of them, which its LOCAL_RANK says."""
    threads: Threads = 1
    """Compute threads of one rank (OMP_NUM_THREADS)."""
    resources: ResourcesSpec = Field(default_factory=ResourcesSpec)
    """CPU and memory of one replica. Absent: ``threads`` cores for each of its ranks."""
    template: TemplateSpec = Field(default_factory=TemplateSpec)
    """Additions to these pods; they win over those of the job."""

    @property
    def local_ranks(self) -> int:
        """Ranks of one replica."""
        return self.ranks_per_replica or max(1, self.accelerator.count)

    @property
    def ranks(self) -> int:
        """Ranks of all replicas: the world of the trainer's gang."""
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
            fix="Leave it out, or give it the value of accelerator.count",
        ),
        Rule(
            reads=("external", "replicas", "ranks_per_replica", "accelerator.count"),
            ok=lambda trainer: not trainer.external or trainer.ranks == 1,
            cel="!self.external || (self.replicas == 1 && self.accelerator.count <= 1"
            " && (!has(self.ranksPerReplica) || self.ranksPerReplica == 1))",
            why="a trainer of yours is one process of one rank",
            fix="Give replicas: 1 and at most one device, or leave external out",
        ),
        devices_are_used("backend"),
        *(_legal_gang(name) for name, facts in PROFILES.items() if facts.gang_counts != facts.legal_counts),
        Rule(
            reads=("lora", "backend.name"),
            ok=lambda trainer: trainer.lora is None or trainer.backend.name == "torch",
            cel="!has(self.lora) || self.backend.name == 'torch'",
            why="only the back end torch trains adapters",
            fix="Give backend.name: torch, or leave lora out",
        ),
        Rule(
            reads=("backend.precision", "backend.name"),
            ok=lambda trainer: trainer.backend.precision != "bf16-stochastic" or trainer.backend.name == "torch",
            cel="self.backend.precision != 'bf16-stochastic' || self.backend.name == 'torch'",
            why="only the back end torch rounds stochastically",
            fix="Give bf16, or backend.name: torch",
        ),
        Rule(
            reads=("backend.precision", "lora"),
            ok=lambda trainer: trainer.backend.precision != "bf16-stochastic" or trainer.lora is None,
            cel="self.backend.precision != 'bf16-stochastic' || !has(self.lora)",
            why="adapters are trained in float32",
            fix="Give bf16, or leave lora out",
        ),
    )
