"""Status: what the driver's ``GET /v1/status`` answers, and what the operator writes into an RLJob.

Invariant: both are bounded, and the operator's is made of the driver's: no figure has two definitions. Times are
RFC 3339 in UTC, durations seconds, lags optimizer steps.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, StringConstraints

from asyncflow.api.base import Spec
from asyncflow.api.conditions import Conditions, Time

Phase = Literal["Pending", "Starting", "Running", "Suspending", "Suspended", "Succeeded", "Failed"]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Line = Annotated[str, StringConstraints(max_length=1024)]
WorkerId = Annotated[str, StringConstraints(max_length=128)]
Uid = Annotated[str, StringConstraints(max_length=64)]


class Wire(Spec):
    """Base of what the driver answers: a reader passes over fields that a newer driver added."""

    model_config = ConfigDict(extra="ignore")


class Lag(Wire):
    """Lag (k-1) - v of the samples of the last step."""

    start: float = 0.0
    """Largest, counted on a sample's oldest token."""
    end: float = 0.0
    """Largest, counted on a sample's newest token."""
    mean: float = 0.0
    """Mean over tokens."""


class QueueDepth(Wire):
    """The queue."""

    ready: Count = 0
    """Samples that are finished and wait for the trainer."""
    leased: Count = 0
    """Samples in generation."""
    staged: Count = 0
    """Samples trained on and not yet in a checkpoint."""
    bytes: Count = 0
    """Bytes held."""
    limit: Count = 0
    """Bytes that may be held."""


class RolloutState(Wire):
    """One rollout."""

    id: WorkerId
    """Worker id."""
    index: Count = 0
    """Index of the role."""
    state: Literal["starting", "ready", "lagging", "draining", "lost"] = "starting"
    """``ready`` once it has caught up."""
    version: Count = 0
    """Step of the version that it serves."""
    inflight: Count = 0
    """Sequences in generation."""


class CheckpointState(Wire):
    """The newest checkpoint."""

    step: Count = 0
    """Its optimizer step."""
    at: Time = ""
    """When it was complete."""


class RecentFigures(Wire):
    """What the elastic policy goes by: figures of the last steps, taken over laps of some seconds each."""

    since: Count = 0
    """The step after which the first lap begins."""
    wait_share: Share = 0.0
    """Share of its time that the trainer waited for samples, in the lap in which it waited least."""
    busy_share: Share = 1.0
    """Share of their time in which the rollouts had work, in the lap in which they had most."""


class DriverStatus(Wire):
    """Answer of ``GET /v1/status``."""

    attempt: Count = 0
    """The trainer's attempt."""
    phase: Phase = "Starting"
    """Where the job stands."""
    step: Count = 0
    """Optimizer steps done."""
    steps: Count = 0
    """Optimizer steps of the run."""
    reward: float | None = None
    """Mean reward of the last step's samples."""
    eval: float | None = None
    """pass@1 of the last evaluation."""
    eval_greedy: float | None = None
    """Greedy accuracy of the last evaluation."""
    tokens_per_second: Annotated[float, Field(ge=0)] = 0.0
    """Tokens trained in a second, prompts and responses, over the last steps."""
    eta_seconds: Annotated[float, Field(ge=0)] | None = None
    """Seconds to the end at this rate."""
    last_step_at: Time | None = None
    """When the last step was done."""
    step_p95: Annotated[float, Field(ge=0)] | None = None
    """95th percentile of the seconds between steps."""
    lag: Lag = Field(default_factory=Lag)
    """Lag of the last step's samples."""
    version: Count = 0
    """Step of the newest published version."""
    queue: QueueDepth = Field(default_factory=QueueDepth)
    """The queue."""
    trainer_wait_share: Share = 0.0
    """Share of its time that the trainer waited for samples, over the last steps."""
    recent: RecentFigures | None = None
    """What the elastic policy goes by. Absent until there were enough steps."""
    idle_share: Annotated[dict[str, float], Field(max_length=16)] = Field(default_factory=dict)
    """By role: share of their time in which instances did nothing."""
    rollouts: Annotated[tuple[RolloutState, ...], Field(max_length=10_000)] = ()
    """The rollouts."""
    checkpoint: CheckpointState | None = None
    """The newest checkpoint."""
    waiting_for: Line = ""
    """What the job waits for, in one sentence; empty while it makes progress."""
    desired_rollouts: Count | None = None
    """Rollouts that the built-in policy would have."""
    version_bytes: Count | None = None
    """Bytes of the newest published version."""
    transfer_seconds: Annotated[float, Field(ge=0)] | None = None
    """Median duration of the rollouts' last transfers of weights."""


class RoleRecord(Spec):
    """What is remembered of a role, so that no end counts twice and no gang has an attempt twice."""

    attempt: Count = 0
    """Attempt of the next process; it only grows."""
    begun: bool = False
    """Of a gang: whether processes of this attempt may exist."""
    whole: bool = False
    """Of a gang: whether all of this attempt have existed."""
    restarts: Count = 0
    """Failures within the window."""
    disruptions: Count = 0
    """Ends within the window that another process caused."""
    window_start: Time | None = None
    """When the window began."""
    in_a_row: Count = 0
    """Ends in a row."""
    last_failure: Time | None = None
    """When the last end was counted."""
    counted: Annotated[tuple[Uid, ...], Field(max_length=256)] = ()
    """UIDs of pods whose end is counted and that may still exist."""


class ElasticityRecord(Spec):
    """What the elastic policy remembers."""

    replicas: Count = 0
    """Rollouts that are wanted."""
    step: Count = 0
    """Optimizer step from which on they were there."""
    wish: Literal["more", "fewer"] | None = None
    """What the policy would change, once it has wished it for long enough."""
    wish_time: Time | None = None
    """Since when it wishes so."""


class Leaving(Spec):
    """A rollout that is on its way out."""

    name: Annotated[str, StringConstraints(max_length=63)]
    """Its pod."""
    uid: Uid
    """The pod's UID."""
    since: Time
    """When it was chosen."""


class JobStatus(Spec):
    """What the operator observed of an RLJob."""

    observed_generation: Count = 0
    """Generation of the spec that this status speaks of."""
    conditions: Conditions = ()
    """Accepted, Ready, Progressing, Stalled, WhyPending, Complete, Failed, Suspended, ElasticityActive."""
    phase: Phase = "Pending"
    """Where the job stands."""
    attempt: Count = 0
    """The trainer's attempt; it only grows, and fences writers of older ones."""
    start_time: Time | None = None
    """When the first pod was made."""
    completion_time: Time | None = None
    """When the job finished."""
    suspend_time: Time | None = None
    """When the driver was first asked to suspend."""
    progress_time: Time | None = None
    """When this status was written: its figures are as of then."""
    step: Count = 0
    """Optimizer steps done."""
    steps: Count = 0
    """Optimizer steps of the run."""
    progress: Annotated[str, StringConstraints(max_length=32)] = ""
    """``step/steps``."""
    reward: float | None = None
    """Mean reward of the last step's samples."""
    eval: float | None = None
    """pass@1 of the last evaluation."""
    tokens_per_second: Annotated[float, Field(ge=0)] | None = None
    """Tokens trained in a second."""
    lag: float | None = None
    """Largest lag of the last step's samples, counted on their oldest token."""
    version: Count | None = None
    """Step of the newest published version."""
    queue_depth: Count | None = None
    """Samples that wait for the trainer."""
    eta: Annotated[str, StringConstraints(max_length=32)] = ""
    """Time to the end, e.g. ``2h13m``."""
    last_step_at: Time | None = None
    """When the last step was done."""
    checkpoint_step: Count | None = None
    """Step of the newest checkpoint."""
    waiting_for: Line = ""
    """What the job waits for, in one sentence."""
    replicas: Count = 0
    """Rollouts that exist, for /scale."""
    ready_rollouts: Count = 0
    """Rollouts that have caught up."""
    desired_replicas: Count | None = None
    """Rollouts that the built-in policy wants."""
    elasticity: ElasticityRecord | None = None
    """What the built-in policy remembers."""
    draining: Annotated[tuple[Leaving, ...], Field(max_length=256)] = ()
    """Rollouts on their way out."""
    selector: Annotated[str, StringConstraints(max_length=512)] = ""
    """Label selector of the rollouts, for /scale."""
    restarts: Annotated[dict[str, Count], Field(max_length=16)] = Field(default_factory=dict)
    """By role: failures within the window."""
    failures: Annotated[dict[str, RoleRecord], Field(max_length=16)] = Field(default_factory=dict)
    """By role: ends and attempts, as far as they must be remembered."""
    images: Annotated[dict[str, Annotated[str, StringConstraints(max_length=512)]], Field(max_length=16)] = Field(
        default_factory=dict
    )
    """By role: image, pinned when the job was created."""
