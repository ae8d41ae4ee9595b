"""Status of a job: the reply to the driver's ``GET /v1/status``, and the status that the operator writes to an RLJob.

Times are RFC 3339 in UTC, durations are in seconds, staleness is in optimizer steps.

Invariants: the size of both is bounded. The operator derives its status from the driver's, so that each figure has one
definition.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import FailFast, Field, StringConstraints

from asyncflow.api.base import MOST_REPLICAS, Conditions, Name, Spec, Time
from asyncflow.api.records import RoleKey, RoleRecord, SecretRecords, Uid
from asyncflow.api.versions import MOST_FLEETS, Count, FleetName, Span, VersionsState, Wire, WorkerId
from asyncflow.api.weights import WeightsSpec

Phase = Literal["Pending", "Starting", "Running", "Paused", "Suspending", "Suspended", "Succeeded", "Failed"]
Standing = Literal["starting", "ready", "lagging", "draining"]
Attempt = Annotated[int, Field(ge=0, le=1_000_000_000)]
"""An attempt as a driver reports it. The bound leaves the operator room to count further attempts."""
Share = Annotated[float, Field(ge=0, le=1)]
Line = Annotated[str, StringConstraints(max_length=1024)]
ShortWord = Annotated[str, StringConstraints(max_length=32)]
PassAt = Annotated[dict[Annotated[str, StringConstraints(pattern="^[0-9]{1,4}$")], Share], Field(max_length=8)]


class Staleness(Wire):
    """Staleness (k-1) - v of the samples of the last step."""

    start: float = 0.0
    """Largest value, counted on a sample's oldest token."""
    end: float = 0.0
    """Largest value, counted on a sample's newest token."""
    mean: float = 0.0
    """Mean over tokens."""


class CorrectionFigures(Wire):
    """Importance weights w of the last step's n tokens or responses, see ``algorithm.correction``."""

    effective_share: float = 0.0
    """Effective sample size as a share of n: (Σw)² / (n Σw²)."""
    bounded_share: float = 0.0
    """Share of the weights that were beyond a bound, and therefore truncated or masked."""


class QueueDepth(Wire):
    """Contents of the queue."""

    ready: Count = 0
    """Finished samples that wait for the trainer."""
    leased: Count = 0
    """Samples in generation."""
    staged: Count = 0
    """Samples that are trained but not yet in a checkpoint."""
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
    state: Standing = "starting"
    """``ready`` once it has caught up."""
    version: Count = 0
    """Step of the version that it serves."""
    inflight: Count = 0
    """Sequences in generation."""


class TaskState(Wire):
    """One task on training samples that is a role of its own, or that the user's process runs."""

    role: RoleKey = ""
    """The role that runs it; ``client`` for the user's process."""
    replicas: Count = 0
    """Its running processes. For the role ``client`` this, ``done`` and ``failed`` are 0."""
    ready: Count = 0
    """Samples that it can claim."""
    leased: Count = 0
    """Samples that it is computing."""
    done: Count = 0
    """Samples that its running processes have finished."""
    failed: Annotated[dict[ShortWord, Count], Field(max_length=4)] = Field(default_factory=dict)
    """Samples without a result in these processes, by reason: raised, invalid, timeout, died."""
    first_failure: Annotated[str, StringConstraints(max_length=256)] = ""
    """Last line of the details of the first failure."""


class RewardState(Wire):
    """Results of scoring, evaluations included."""

    scored: Count = 0
    """Samples with a reward."""
    failed: Annotated[dict[ShortWord, Count], Field(max_length=64)] = Field(default_factory=dict)
    """Samples without a reward, by reason: timeout, raised, invalid, out_of_range, died, incomplete. A failure in a
    task has ``NAME:`` before the reason."""
    first_failure: Annotated[str, StringConstraints(max_length=2048)] = ""
    """Details of the first failure; a traceback if the function raised."""
    groups_all_right: Count = 0
    """Groups of training samples whose rewards were all equal, and at least ``evaluation.passReward``."""
    groups_all_wrong: Count = 0
    """Groups of training samples whose rewards were all equal, and below ``evaluation.passReward``."""


class CheckpointState(Wire):
    """The newest checkpoint."""

    step: Count = 0
    """Its optimizer step."""
    at: Time = ""
    """Time at which it was complete."""


class BestState(Wire):
    """The checkpoint with the best evaluation."""

    step: Count
    """Its optimizer step; 0 is the initial model."""
    by: Literal["accuracy", "greedy", "reward"]
    """The figure that is compared."""
    value: float
    """Value of that figure."""


class StepProgress(Wire):
    """Progress of the current step."""

    step: Count
    """The step."""
    samples: Count
    """Samples of the step."""
    generated: Count = 0
    """Samples of the step that are generated and scored."""
    filtered: Count = 0
    """Samples of the step that were generated but dropped and replaced."""
    trained: Count = 0
    """Samples of the step whose gradient is computed."""
    running: Count = 0
    """Sequences in generation, of all steps."""
    tokens_per_second: Annotated[float, Field(ge=0)] = 0.0
    """Response tokens per second of all rollouts, over the sequences that ended in the last seconds."""
    publishing: Count | None = None
    """Step of the version that is being published."""
    saving: bool = False
    """True while a checkpoint is being written."""

    @property
    def words(self) -> str:
        """The progress as one sentence."""
        done = (
            f"step {self.step}: generated {self.generated} of {self.samples}, trained {self.trained} of {self.samples}"
        )
        details = {
            f"{self.filtered} filtered": self.filtered,
            f"{self.running} sequence{'' if self.running == 1 else 's'} running": self.running,
            f"{self.tokens_per_second:.0f} tokens/s": self.tokens_per_second,
            f"publishing θ_{self.publishing}": self.publishing is not None,
            "writing a checkpoint": self.saving,
        }
        return "; ".join(filter(None, (done, ", ".join(words for words, shown in details.items() if shown))))


class RecentFigures(Wire):
    """Input of the elastic policy: figures of the last steps, each over intervals of some seconds."""

    since: Count = 0
    """The step after which the first interval starts."""
    wait_share: Share = 0.0
    """Share of its time that the trainer waited for samples: the smallest value of an interval."""
    busy_share: Share = 1.0
    """Share of their time in which the rollouts had work: the largest value of an interval."""
    slot_share: Share = 1.0
    """Share of the rollouts' slots that was in use: the largest value of an interval."""
    tokens_per_second: Annotated[float, Field(ge=0)] = 0.0
    """Tokens per second that the rollouts generated."""
    tokens_per_sample: Annotated[float, Field(ge=0)] = 0.0
    """Tokens of a sample, prompt and response."""


class SetState(Wire):
    """Results of the last evaluation on one set of held-out prompts."""

    accuracy: Share
    """Share of the samples at the evaluation's temperature that pass."""
    greedy: Share | None = None
    """Share of the greedy samples that pass."""
    reward: float | None = None
    """Mean reward of the samples, without the greedy ones."""
    pass_at: PassAt = Field(default_factory=dict)
    """By k: pass@k."""


class DriverStatus(Wire):
    """Reply to ``GET /v1/status``."""

    attempt: Attempt = 0
    """The trainer's attempt."""
    phase: Phase = "Starting"
    """Phase of the job."""
    insecure: bool = False
    """True if the driver serves other hosts without a certificate."""
    step: Count = 0
    """Optimizer steps done."""
    steps: Count = 0
    """Optimizer steps of the run."""
    step_progress: StepProgress | None = None
    """Progress of the next step; absent before the first one and after the last."""
    reward: float | None = None
    """Mean reward of the last step's samples."""
    reward_components: Annotated[dict[Name, float], Field(max_length=16)] = Field(default_factory=dict)
    """By name: mean of a component of the reward, over the last step's samples."""
    eval: float | None = None
    """Accuracy of the last evaluation, over all samples at its temperature."""
    eval_greedy: float | None = None
    """Greedy accuracy of the last evaluation."""
    eval_reward: float | None = None
    """Mean reward of the last evaluation's samples, without the greedy ones."""
    eval_pass_at: PassAt = Field(default_factory=dict)
    """By k: pass@k of the last evaluation."""
    eval_sets: Annotated[dict[Name, SetState], Field(max_length=16)] = Field(default_factory=dict)
    """Results of the last evaluation on the named sets of held-out prompts."""
    tokens_per_second: Annotated[float, Field(ge=0)] = 0.0
    """Tokens trained per second, prompts and responses, over the last steps."""
    eta_seconds: Span | None = None
    """Expected seconds to the end of the run."""
    last_step_at: Time | None = None
    """Time at which the last step was done."""
    step_p95: Span | None = None
    """95th percentile of the seconds between steps."""
    staleness: Staleness = Field(default_factory=Staleness)
    """Staleness of the last step's samples."""
    correction: CorrectionFigures | None = None
    """Importance weights of the last step. Absent: the job has no correction."""
    version: Count = 0
    """Step of the newest published version."""
    queue: QueueDepth = Field(default_factory=QueueDepth)
    """The queue."""
    trainer_wait_share: Share = 0.0
    """Share of its time that the trainer waited for samples, over the last steps."""
    recent: RecentFigures | None = None
    """Input of the elastic policy. Absent until there were enough steps."""
    idle_share: Annotated[dict[RoleKey, float], Field(max_length=16)] = Field(default_factory=dict)
    """By role: share of their time in which instances were idle."""
    prompts_skipped: Count = 0
    """Training prompts that were left out because they are too long, see ``data.overlong``."""
    rollouts: Annotated[tuple[RolloutState, ...], Field(max_length=MOST_REPLICAS), FailFast()] = ()
    """The rollouts."""
    rewards: RewardState = Field(default_factory=RewardState)
    """Results of scoring so far."""
    tasks: Annotated[dict[Name, TaskState], Field(max_length=8)] = Field(default_factory=dict)
    """Tasks that are roles of their own, by name: the reference, and users' tasks."""
    checkpoint: CheckpointState | None = None
    """The newest checkpoint."""
    best: BestState | None = None
    """The checkpoint with the best evaluation, if ``storage.checkpoints.keepBest`` is set."""
    waiting_for: Line = ""
    """Reason why the job waits, in one sentence; empty while it makes progress."""
    desired_rollouts: Count | None = None
    """Rollouts that the built-in policy wants, before minReplicas and maxReplicas. Absent until its first decision."""
    versions: VersionsState = Field(default_factory=VersionsState)
    """Distribution of the versions of weights."""
    fleets: Annotated[dict[FleetName, VersionsState], Field(max_length=MOST_FLEETS)] | None = None
    """The same for the followers of one WeightSync alone, by its name, for the largest fleets. Absent: the driver does
    not know the WeightSyncs of its followers."""

    @property
    def words(self) -> str:
        """Progress of the job and what it waits for, in one sentence."""
        words = self.step_progress.words if self.step_progress else self.phase.lower()
        return f"{words}; still waiting for {self.waiting_for}" if self.waiting_for else words


class DrainingRollout(Spec):
    """A rollout that is being drained."""

    name: Annotated[str, StringConstraints(max_length=63)]
    """Name of its pod."""
    uid: Uid
    """UID of its pod."""
    since: Time
    """Time at which it was chosen."""


class JobStatus(Spec):
    """State of an RLJob as the operator observed it."""

    observed_generation: Count = 0
    """Generation of the spec that this status describes."""
    accepted_generation: Count | None = None
    """Generation of the spec in force: the newest accepted one."""
    conditions: Conditions = ()
    """Accepted, Ready, Progressing, Stalled, WhyPending, Complete, Failed, Suspended, ElasticityActive."""
    phase: Phase = "Pending"
    """Phase of the job."""
    attempt: Count = 0
    """The trainer's attempt; it only increases, and writes of older attempts are refused."""
    start_time: Time | None = None
    """Time at which the first pod was created."""
    completion_time: Time | None = None
    """Time at which the job finished."""
    suspend_time: Time | None = None
    """Time of the first request to the driver to suspend."""
    progress_time: Time | None = None
    """Time of the figures in this status."""
    step: Count = 0
    """Optimizer steps done."""
    steps: Count = 0
    """Optimizer steps of the run."""
    progress: Annotated[str, StringConstraints(max_length=32)] = ""
    """``step/steps``."""
    reward: float | None = None
    """Mean reward of the last step's samples."""
    eval: float | None = None
    """Accuracy of the last evaluation, over all samples at its temperature."""
    eval_sets: Annotated[dict[Name, Share], Field(max_length=16)] = Field(default_factory=dict)
    """The same on each named set of held-out prompts."""
    tokens_per_second: Annotated[float, Field(ge=0)] | None = None
    """Tokens trained per second."""
    staleness: float | None = None
    """Largest staleness of the last step's samples, counted on their oldest token."""
    version: Count | None = None
    """Step of the newest published version."""
    queue_depth: Count | None = None
    """Samples that wait for the trainer."""
    eta: Annotated[str, StringConstraints(max_length=32)] = ""
    """Time to the end, e.g. ``2h13m``."""
    last_step_at: Time | None = None
    """Time at which the last step was done."""
    checkpoint_step: Count | None = None
    """Step of the newest checkpoint."""
    best_step: Count | None = None
    """Step of the checkpoint with the best evaluation, if ``storage.checkpoints.keepBest`` is set."""
    failed_rewards: Count | None = None
    """Samples without a reward."""
    waiting_for: Line = ""
    """Reason why the job waits, in one sentence."""
    replicas: Count = 0
    """Rollouts that exist, for /scale."""
    ready_rollouts: Count = 0
    """Rollouts that have caught up."""
    desired_replicas: Count | None = None
    """Rollouts that the built-in policy wants."""
    draining: Annotated[tuple[DrainingRollout, ...], Field(max_length=256)] = ()
    """Rollouts that are being drained."""
    selector: Annotated[str, StringConstraints(max_length=512)] = ""
    """Label selector of the rollouts, for /scale."""
    restarts: Annotated[dict[str, Count], Field(max_length=16)] = Field(default_factory=dict)
    """By role: failures within the window."""
    failures: Annotated[dict[str, RoleRecord], Field(max_length=16)] = Field(default_factory=dict)
    """By role: ends of processes, and attempts, that still matter."""
    images: Annotated[dict[str, Annotated[str, StringConstraints(max_length=512)]], Field(max_length=16)] = Field(
        default_factory=dict
    )
    """By role, and for the container that scores: image, pinned when the job started."""
    weights: WeightsSpec | None = None
    """Last known fields of the WeightSync that the job names; the job keeps them if it is deleted."""
    secrets: SecretRecords = Field(default_factory=dict)
    """By role: Secrets with certificates. ``keys``: the Secret with the bearer token and the store's password."""

    @property
    def begun(self) -> bool:
        """True once pods were created for the job, even while the job is suspended."""
        attempted = any(record.attempt for record in self.failures.values())
        return self.start_time is not None or self.phase != "Pending" or attempted
