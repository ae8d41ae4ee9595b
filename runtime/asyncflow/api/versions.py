"""Distribution of the versions of weights, as in the driver's status and in the status of a WeightSync.

Invariant: the size is bounded, however many instances there are.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field, StringConstraints

from asyncflow.api.base import Spec

LAG_BUCKETS = 16
MOST_LAGGARDS = 10
MOST_FLEETS = 8
MOST_FLEET_NAME = 64
MOST_COUNTED = 2**53 - 1
Count = Annotated[int, Field(ge=0, le=MOST_COUNTED)]
"""An integer that every JSON parser represents exactly, including the API server's."""
Span = Annotated[float, Field(ge=0, le=1e12)]
"""A duration in seconds that a driver measured or expects."""
WorkerId = Annotated[str, StringConstraints(pattern=r"^[-.:_A-Za-z0-9]+$", max_length=128)]
FleetName = Annotated[str, StringConstraints(max_length=MOST_FLEET_NAME)]
"""The name of a WeightSync, as its followers report it."""
Cause = Annotated[str, StringConstraints(max_length=128)]
"""A reason in a few words."""


class Wire(Spec):
    """Base of the driver's replies: a reader ignores fields that a newer driver added."""

    model_config = ConfigDict(extra="ignore")


class PhaseSeconds(Wire):
    """Seconds of the phases in which a version reaches an engine: medians of the latest measurement of each process."""

    publish: Span | None = None
    """Time in which a trainer rank copies, digests and announces its part of a version, during training."""
    transfer: Span | None = None
    """Time in which an instance receives a version into host memory, during generation."""
    stage: Span | None = None
    """Time in which an instance loads a version next to the running model, during generation."""
    swap: Span | None = None
    """Time for which an instance interrupts generation."""


class VersionCount(Wire):
    """Number of rollouts and followers that serve one version."""

    version: Count
    """Step of the version."""
    instances: Count
    """Instances that serve it."""


class Laggard(Wire):
    """A rollout or a follower that does not serve the newest version."""

    id: WorkerId
    """Worker id."""
    version: Count
    """Step of the version that it serves."""
    lag: Count
    """Versions behind the newest."""
    cause: Cause = ""
    """Its current activity, or the reason why it waits."""


class VersionsState(Wire):
    """Distribution of versions to instances: the job's rollouts, and followers, which do not belong to the job."""

    rollouts: Count = 0
    """Rollouts that serve a version."""
    followers: Count = 0
    """Followers that serve a version."""
    behind: Count = 0
    """Instances of both kinds that do not serve the newest version."""
    serving: Annotated[tuple[VersionCount, ...], Field(max_length=LAG_BUCKETS)] = ()
    """Number of instances of both kinds by version, for the newest of the served versions."""
    lag: Annotated[tuple[Count, ...], Field(max_length=LAG_BUCKETS)] = ()
    """Histogram: entry i counts the instances that are i versions behind; the last one also all further behind."""
    laggards: Annotated[tuple[Laggard, ...], Field(max_length=MOST_LAGGARDS)] = ()
    """The instances that are furthest behind."""
    bytes: Count | None = None
    """Bytes of the newest published version; absent while unknown."""
    wire_bytes: Count | None = None
    """Bytes that an instance received for its last version, median; absent while unknown."""
    seconds: PhaseSeconds = Field(default_factory=PhaseSeconds)
    """Seconds by phase."""
