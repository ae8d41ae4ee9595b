"""The roles that a job scales: rollouts, trainer ranks, and the optional models beside them.

Invariant: min <= replicas <= max for rollouts; a gang has a legal number of devices when it spans several processes.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from asyncflow.api.accelerators import PROFILES, counted
from asyncflow.api.base import Options, PluginName, Replicas, Rule, Seconds, Spec, Threads
from asyncflow.api.learning import Dtype
from asyncflow.api.placement import AcceleratorSpec, ResourcesSpec, TemplateSpec


class EngineSpec(Spec):
    """The rollout engine: an entry point of the group ``asyncflow.rollout_engines``."""

    name: PluginName = "transformers"
    """``transformers`` (in-process), ``simulated`` (service times, no model), ``vllm``, or a third party's."""
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
    max_replicas: Annotated[int, Field(ge=1, le=10_000)] = Field(default_factory=_usual_most)
    """Most instances. Absent: replicas."""
    engine: EngineSpec = Field(default_factory=EngineSpec)
    """What generates."""
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
    """Seconds without renewal after which an instance's prompts go to another."""

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
    )


class BackendSpec(Spec):
    """The trainer's back end: an entry point of the group ``asyncflow.trainer_backends``."""

    name: PluginName = "torch"
    """``torch``, ``counting`` (adds one per sample, for tests), or a third party's."""
    precision: Literal["float32", "bf16"] = "float32"
    """Precision of forward and backward; weights and optimizer state are float32."""
    packing: Literal["separate", "shared-prompt"] = "separate"
    """Whether the responses of a group share one copy of their prompt in a micro-batch."""
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


class TrainerSpec(Spec):
    """The trainer: a gang of ranks that lives and dies together."""

    replicas: Annotated[int, Field(ge=1, le=4096)] = 1
    """Data-parallel ranks."""
    backend: BackendSpec = Field(default_factory=BackendSpec)
    """What trains."""
    accelerator: AcceleratorSpec = Field(default_factory=AcceleratorSpec)
    """Devices of one rank's process."""
    threads: Threads = 1
    """Compute threads of one rank (OMP_NUM_THREADS)."""
    resources: ResourcesSpec = Field(default_factory=ResourcesSpec)
    """CPU and memory of one rank."""
    template: TemplateSpec = Field(default_factory=TemplateSpec)
    """Additions to these pods; they win over those of the job."""

    rules: ClassVar[tuple[Rule, ...]] = tuple(
        _legal_gang(name) for name, facts in PROFILES.items() if facts.gang_counts != facts.legal_counts
    )


class AuxiliarySpec(Spec):
    """A model of its own beside the policy: reference or critic."""

    replicas: Annotated[int, Field(ge=0, le=4096)] = 1
    """Processes."""
