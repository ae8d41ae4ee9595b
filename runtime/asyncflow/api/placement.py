"""Placement of processes: accelerator, resources, pod template, and the scheduler's settings.

Invariant: an accelerator count is one that the hardware can give; the table of facts is ``asyncflow.api.accelerators``.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, StringConstraints

from asyncflow.api.accelerators import PROFILES, counted
from asyncflow.api.base import Annotations, Labels, Name, Options, Rule, Spec, keyed_by
from asyncflow.api.quantity import Quantity

AUTO: Final = "auto"
"""The profile that stands for what one machine has."""


def _of_a_cluster(schema: dict[str, Any]) -> None:
    """Leave the profile ``auto`` out of the definition of a cluster, which has to be told what its pods ask for."""
    schema["enum"] = [name for name in schema["enum"] if name != AUTO]


ProfileName = Annotated[
    Literal["cpu", "nvidia", "ascend-a2", "ascend-a3", "ascend-a5", "auto"], Field(json_schema_extra=_of_a_cluster)
]


class AcceleratorSpec(Spec):
    """Accelerators of one process."""

    profile: ProfileName = "cpu"
    """Row of the table of facts: resource name, legal counts, mounts, environment, ports. ``auto``, with ``asyncflow
    run`` only: the kind of device that the machine has, of which each replica gets one unless ``count`` says more."""
    count: Annotated[int, Field(ge=0, le=64)] = 0
    """Devices of one replica; 0 exactly on CPU. A trainer starts a rank for each, an engine computes with all."""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Part of one device that the process uses: its tensors take at most this part of the memory; the vendor's own
    buffers come on top, so leave room. On one machine roles whose shares fit share a device; on a cluster the device
    plug-in has to offer a device more than once (time-slicing, MPS), and the pod asks for one such part."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("count", "profile"),
            ok=lambda accelerator: (
                accelerator.profile == AUTO or accelerator.count in PROFILES[accelerator.profile].legal_counts
            ),
            cel=f"self.count in { {name: list(facts.legal_counts) for name, facts in PROFILES.items()} }[self.profile]",
            why="the hardware does not give a process so many devices",
            fix="Give " + "; ".join(f"{name}: {counted(facts.legal_counts)}" for name, facts in PROFILES.items()),
        ),
        Rule(
            reads=("share", "count"),
            ok=lambda accelerator: accelerator.share == 1 or accelerator.count == 1,
            cel="self.share == 1.0 || self.count == 1",
            why="a share is of one device",
            fix="Give count: 1, or leave share out",
        ),
    )


class ResourcesSpec(Spec):
    """CPU and memory of one process: requests, and for memory the limit too. Absent: the cluster's default."""

    cpu: Quantity | None = None
    """Cores. Absent: ``threads``."""
    memory: Quantity | None = None
    """Bytes."""
    shared_memory: Quantity | None = None
    """Bytes of /dev/shm."""


class EnvSpec(Spec):
    """An environment variable."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)]
    """Its name; ASYNCFLOW_* is ours."""
    value: Annotated[str, StringConstraints(max_length=4096)] = ""
    """Its value."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("name",),
            ok=lambda variable: not variable.name.startswith("ASYNCFLOW_"),
            cel="!self.name.startsWith('ASYNCFLOW_')",
            why="ASYNCFLOW_ variables are ours",
            fix="Take another name",
        ),
    )


class TemplateSpec(Spec):
    """Additions to the pods that AsyncFlow makes. On one machine only ``env`` counts."""

    labels: Labels = Field(default_factory=dict)
    """Labels of the pods."""
    annotations: Annotations = Field(default_factory=dict)
    """Annotations of the pods."""
    image: Annotated[str, StringConstraints(min_length=1, max_length=512)] | None = None
    """Image; absent: that of the accelerator profile."""
    env: Annotated[tuple[EnvSpec, ...], Field(max_length=128, json_schema_extra=keyed_by("name"))] = ()
    """Environment variables."""
    pod_spec: Options = Field(default_factory=dict)
    """Fields of a PodSpec, e.g. nodeSelector, tolerations, affinity, imagePullSecrets; merged over ours."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("labels",),
            ok=lambda template: not any(key.startswith("asyncflow.dev/") for key in template.labels),
            cel="!has(self.labels) || self.labels.all(key, !key.startsWith('asyncflow.dev/'))",
            why="labels under asyncflow.dev/ are ours",
            fix="Take another prefix",
        ),
        Rule(
            reads=("env",),
            ok=lambda template: len({variable.name for variable in template.env}) == len(template.env),
            cel="!has(self.env) || self.env.all(a, self.env.exists_one(b, b.name == a.name))",
            why="one variable is set twice",
            fix="Keep one of them",
        ),
    )


class DriverSpec(Spec):
    """Place of the driver."""

    resources: ResourcesSpec = Field(default_factory=ResourcesSpec)
    """CPU and memory."""


class SchedulingSpec(Spec):
    """Scheduling of the gang (trainer, storage and the least number of rollouts) as a whole."""

    gang: Literal["none", "volcano", "kueue"] = "none"
    """Scheduler that places the gang as a whole; ``none``: pods are placed one by one."""
    queue: Name | None = None
    """Queue of that scheduler; needs a gang scheduler."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("queue", "gang"),
            ok=lambda scheduling: scheduling.queue is None or scheduling.gang != "none",
            cel="!has(self.queue) || self.gang != 'none'",
            why="the default scheduler has no queues",
            fix="Set gang to volcano or kueue, or leave queue out",
        ),
    )
