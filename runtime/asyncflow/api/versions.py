"""Versions of weights on their way, as the driver answers it and a WeightSync's status shows it.

Invariant: bounded, however many instances there are.
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
"""A number that every reader of JSON keeps exactly, the API server too."""
Span = Annotated[float, Field(ge=0, le=1e12)]
"""A duration in seconds as a driver measures or expects it."""
WorkerId = Annotated[str, StringConstraints(pattern=r"^[-.:_A-Za-z0-9]+$", max_length=128)]
FleetName = Annotated[str, StringConstraints(max_length=MOST_FLEET_NAME)]
"""The name of a WeightSync, as its followers say it."""
Cause = Annotated[str, StringConstraints(max_length=128)]
"""A reason in a few words."""


class Wire(Spec):
    """Base of what the driver answers: a reader passes over fields that a newer driver added."""

    model_config = ConfigDict(extra="ignore")


class PhaseSeconds(Wire):
    """Seconds of the phases in which a version reaches an engine: medians of what each process measured last."""

    publish: Span | None = None
    """Of a trainer rank: to copy what it holds of a version aside, digest and announce it, beside the training."""
    transfer: Span | None = None
    """Of an instance: to receive it into host memory, beside the generation."""
    stage: Span | None = None
    """Of an instance: to bring it beside the running model, beside the generation."""
    swap: Span | None = None
    """Of an instance: that generation stood still."""


class VersionCount(Wire):
    """Rollouts and followers that serve one version."""

    version: Count
    """Its step."""
    instances: Count
    """How many serve it."""


class Laggard(Wire):
    """A rollout or a follower that does not serve the newest version."""

    id: WorkerId
    """Its worker id."""
    version: Count
    """Step of the version that it serves."""
    lag: Count
    """Versions behind the newest."""
    cause: Cause = ""
    """What it waits for, or does meanwhile."""


class VersionsState(Wire):
    """The versions of weights on their way to instances: rollouts, and followers, which are no part of the job."""

    rollouts: Count = 0
    """Rollouts that serve a version."""
    followers: Count = 0
    """Followers that serve a version."""
    behind: Count = 0
    """Instances of both that do not serve the newest version."""
    serving: Annotated[tuple[VersionCount, ...], Field(max_length=LAG_BUCKETS)] = ()
    """Instances of both by the version that they serve: the newest versions of those that are served."""
    lag: Annotated[tuple[Count, ...], Field(max_length=LAG_BUCKETS)] = ()
    """Histogram: entry i counts the instances that are i versions behind; the last entry, those further behind."""
    laggards: Annotated[tuple[Laggard, ...], Field(max_length=MOST_LAGGARDS)] = ()
    """The instances that are furthest behind."""
    bytes: Count | None = None
    """Bytes of the newest published version; absent while unknown."""
    wire_bytes: Count | None = None
    """Bytes that an instance received of the last one, median; absent while unknown."""
    seconds: PhaseSeconds = Field(default_factory=PhaseSeconds)
    """Seconds by phase."""
