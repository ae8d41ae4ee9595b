"""WeightSync: how versions of weights reach those who need them, as part of a job and as a resource of its own.

Invariant: a WeightSync owns no pods and serves one job; its status is bounded however many rollouts there are.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from asyncflow.api.base import API_VERSION, Conditions, Frozen, Name, ObjectMeta, Spec, Time

PublishedDtype = Literal["float32", "bfloat16"]


class WeightsSpec(Spec):
    """Transport of weights."""

    transport: Literal["host", "mooncake", "pairs", "ipc"] = "host"
    """``host``: pulled over the network into host memory, from any peer that has them. The others are faster ways, with
    ``host`` behind them for what they do not bring: ``mooncake``: read one-sided by Mooncake's Transfer Engine, over
    TCP, RDMA or Ascend's links; ``pairs``: sent over process groups of two, by the accelerator's own library (NCCL,
    HCCL) or gloo; ``ipc``: mapped by processes of the same host."""

    frozen_fields: ClassVar[tuple[Frozen, ...]] = (
        Frozen(reads="transport", why="holders and receivers agree on it when they start"),
    )


class JobWeightsSpec(WeightsSpec):
    """The weight versions of a job: of its own, or of an existing WeightSync by name."""

    dtype: PublishedDtype | None = None
    """Dtype to which published weights are rounded. Absent: bfloat16 where the engine computes in it, which
    rounds them anyway, or the trainer holds them in it (``precision: bf16-stochastic``), else float32."""

    name: Name | None = None
    """An existing WeightSync in the job's namespace. Absent: the job makes its own."""


class Laggard(Spec):
    """A rollout that is behind."""

    id: Annotated[str, StringConstraints(max_length=128)]
    """Its worker id."""
    version: Annotated[int, Field(ge=0)]
    """Step of the version that it serves."""
    lag: Annotated[int, Field(ge=0)]
    """Versions behind the newest."""


class WeightsStatus(Spec):
    """State of a WeightSync as the operator observed it."""

    observed_generation: Annotated[int, Field(ge=0)] = 0
    """Generation of the spec that this status speaks of."""
    conditions: Conditions = ()
    """Accepted, Ready, Lagging."""
    progress_time: Time | None = None
    """Time at which this status was written: its figures are as of then."""
    version: Annotated[int, Field(ge=0)] = 0
    """Step of the newest published version."""
    attempt: Annotated[int, Field(ge=0)] = 0
    """Trainer attempt that made it."""
    lag: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=16)] = ()
    """Histogram: entry i counts the rollouts that are i versions behind; the last entry, those further behind."""
    laggards: Annotated[tuple[Laggard, ...], Field(max_length=10)] = ()
    """The ten rollouts that are furthest behind."""
    bytes: Annotated[int, Field(ge=0)] | None = None
    """Bytes of one version; absent while unknown."""
    transfer_seconds: Annotated[float, Field(ge=0)] | None = None
    """Median duration of the rollouts' last transfers; absent while unknown."""


class WeightSync(Spec):
    """The weight versions of one job."""

    api_version: Literal["asyncflow.dev/v1alpha1"] = API_VERSION
    """asyncflow.dev/v1alpha1."""
    kind: Literal["WeightSync"] = "WeightSync"
    """WeightSync."""
    metadata: ObjectMeta
    """Name, namespace, labels, annotations."""
    spec: WeightsSpec = Field(default_factory=WeightsSpec)
    """Desired state."""
    status: WeightsStatus | None = None
    """Observed state; written by the operator."""
