"""Status: what the driver's ``GET /v1/status`` answers, and what the operator writes into an RLJob.

Invariant: both are bounded, and the operator's is made of the driver's: no figure has two definitions. Times are
RFC 3339 in UTC, durations seconds, staleness optimizer steps.
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
"""An attempt as a driver says it: whatever it says, there are more to come."""
Share = Annotated[float, Field(ge=0, le=1)]
Line = Annotated[str, StringConstraints(max_length=1024)]
ShortWord = Annotated[str, StringConstraints(max_length=32)]
PassAt = Annotated[dict[Annotated[str, StringConstraints(pattern="^[0-9]{1,4}$")], Share], Field(max_length=8)]


class Staleness(Wire):
    """Staleness (k-1) - v of the samples of the last step."""

    start: float = 0.0
    """Largest, counted on a sample's oldest token."""
    end: float = 0.0
    """Largest, counted on a sample's newest token."""
    mean: float = 0.0
    """Mean over tokens."""


class CorrectionFigures(Wire):
    """Importance weights w of the last step's n tokens or responses, see ``algorithm.correction``."""

    effective_share: float = 0.0
    """Effective sample size as a share of n: (Σw)² / (n Σw²)."""
    bounded_share: float = 0.0
    """Share of them that were beyond a bound, and so truncated or masked."""


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
    state: Standing = "starting"
    """``ready`` once it has caught up."""
    version: Count = 0
    """Step of the version that it serves."""
    inflight: Count = 0
    """Sequences in generation."""


class TaskState(Wire):
    """One task of training samples that is a role of its own, or left to the user's process."""

    role: RoleKey = ""
    """The role that runs it, ``client`` where it is left to the user's process."""
    replicas: Count = 0
    """Processes of it that are there; 0 where the role is ``client``, and so are ``done`` and ``failed``."""
    ready: Count = 0
    """Samples that it could take."""
    leased: Count = 0
    """Samples that it computes."""
    done: Count = 0
    """Samples that the processes which are there have done."""
    failed: Annotated[dict[ShortWord, Count], Field(max_length=4)] = Field(default_factory=dict)
    """Samples for which they have no result, by why: raised, invalid, timeout, died."""
    first_failure: Annotated[str, StringConstraints(max_length=256)] = ""
    """The last line of what is known of the first of them."""


class RewardState(Wire):
    """The samples that were judged, evaluations included."""

    scored: Count = 0
    """Samples that got a reward."""
    failed: Annotated[dict[ShortWord, Count], Field(max_length=64)] = Field(default_factory=dict)
    """Samples that got none, by why: timeout, raised, invalid, out_of_range, died, incomplete; or that failed in a
    task, ``NAME:`` before the why."""
    first_failure: Annotated[str, StringConstraints(max_length=2048)] = ""
    """Details of the first of them, a traceback where the function raised."""
    groups_all_right: Count = 0
    """Groups of training samples whose rewards were all equal, and at least ``evaluation.passReward``."""
    groups_all_wrong: Count = 0
    """Those whose rewards were all equal, and below it."""


class CheckpointState(Wire):
    """The newest checkpoint."""

    step: Count = 0
    """Its optimizer step."""
    at: Time = ""
    """Time at which it was complete."""


class BestState(Wire):
    """The checkpoint with the best evaluation."""

    step: Count
    """Its optimizer step; 0 is the model that the run began with."""
    by: Literal["accuracy", "greedy", "reward"]
    """The figure that is compared."""
    value: float
    """Value of that figure."""


class StepProgress(Wire):
    """Progress of the step that is being made."""

    step: Count
    """The step."""
    samples: Count
    """Samples that it takes."""
    generated: Count = 0
    """Those of them that are generated and scored."""
    filtered: Count = 0
    """Samples of this step that were generated and left out, and others in their place."""
    trained: Count = 0
    """Those whose gradient is computed."""
    running: Count = 0
    """Sequences in generation, of all steps."""
    tokens_per_second: Annotated[float, Field(ge=0)] = 0.0
    """Response tokens of the sequences that ended, in a second, by all rollouts, over the last seconds."""
    publishing: Count | None = None
    """Step of the version that is being published."""
    saving: bool = False
    """True while a checkpoint is being written."""

    @property
    def words(self) -> str:
        """The same in one sentence."""
        done = (
            f"step {self.step}: generated {self.generated} of {self.samples}, trained {self.trained} of {self.samples}"
        )
        beside = {
            f"{self.filtered} filtered": self.filtered,
            f"{self.running} sequence{'' if self.running == 1 else 's'} running": self.running,
            f"{self.tokens_per_second:.0f} tokens/s": self.tokens_per_second,
            f"publishing θ_{self.publishing}": self.publishing is not None,
            "writing a checkpoint": self.saving,
        }
        return "; ".join(filter(None, (done, ", ".join(words for words, there in beside.items() if there))))


class RecentFigures(Wire):
    """Figures by which the elastic policy decides, of the last steps, taken over laps of some seconds each."""

    since: Count = 0
    """The step after which the first lap begins."""
    wait_share: Share = 0.0
    """Share of its time that the trainer waited for samples, in the lap in which it waited least."""
    busy_share: Share = 1.0
    """Share of their time in which the rollouts had work, in the lap in which they had most."""
    slot_share: Share = 1.0
    """Share of the rollouts' slots that was in use, in the lap in which it was largest."""
    tokens_per_second: Annotated[float, Field(ge=0)] = 0.0
    """Tokens that the rollouts made in a second."""
    tokens_per_sample: Annotated[float, Field(ge=0)] = 0.0
    """Tokens of a sample, prompt and response."""


class SetState(Wire):
    """Results of the last evaluation on one set of held-out prompts."""

    accuracy: Share
    """Share of the samples that pass, of all at the evaluation's temperature."""
    greedy: Share | None = None
    """The same of the greedy ones."""
    reward: float | None = None
    """Mean reward of the samples, the greedy ones apart."""
    pass_at: PassAt = Field(default_factory=dict)
    """By k: pass@k."""


class DriverStatus(Wire):
    """Answer of ``GET /v1/status``."""

    attempt: Attempt = 0
    """The trainer's attempt."""
    phase: Phase = "Starting"
    """Phase of the job."""
    insecure: bool = False
    """Whether the driver serves other hosts without a certificate."""
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
    """Mean reward of the last evaluation's samples, the greedy ones apart."""
    eval_pass_at: PassAt = Field(default_factory=dict)
    """By k: pass@k of the last evaluation."""
    eval_sets: Annotated[dict[Name, SetState], Field(max_length=16)] = Field(default_factory=dict)
    """Results of the last evaluation on the sets of held-out prompts that have a name."""
    tokens_per_second: Annotated[float, Field(ge=0)] = 0.0
    """Tokens trained in a second, prompts and responses, over the last steps."""
    eta_seconds: Span | None = None
    """Seconds to the end at this rate."""
    last_step_at: Time | None = None
    """Time at which the last step was done."""
    step_p95: Span | None = None
    """95th percentile of the seconds between steps."""
    staleness: Staleness = Field(default_factory=Staleness)
    """Staleness of the last step's samples."""
    correction: CorrectionFigures | None = None
    """Importance weights of the last step. Absent: the job has none."""
    version: Count = 0
    """Step of the newest published version."""
    queue: QueueDepth = Field(default_factory=QueueDepth)
    """The queue."""
    trainer_wait_share: Share = 0.0
    """Share of its time that the trainer waited for samples, over the last steps."""
    recent: RecentFigures | None = None
    """Figures by which the elastic policy decides. Absent until there were enough steps."""
    idle_share: Annotated[dict[RoleKey, float], Field(max_length=16)] = Field(default_factory=dict)
    """By role: share of their time in which instances did nothing."""
    prompts_skipped: Count = 0
    """Training prompts left out because they are too long, see ``data.overlong``."""
    rollouts: Annotated[tuple[RolloutState, ...], Field(max_length=MOST_REPLICAS), FailFast()] = ()
    """The rollouts."""
    rewards: RewardState = Field(default_factory=RewardState)
    """Samples judged so far, and why some have no reward."""
    tasks: Annotated[dict[Name, TaskState], Field(max_length=8)] = Field(default_factory=dict)
    """Tasks that are roles of their own, by name: the reference, and users' tasks."""
    checkpoint: CheckpointState | None = None
    """The newest checkpoint."""
    best: BestState | None = None
    """The one with the best evaluation, where ``storage.checkpoints.keepBest`` asks for it."""
    waiting_for: Line = ""
    """Reason why the job waits, in one sentence; empty while it makes progress."""
    desired_rollouts: Count | None = None
    """Rollouts that the built-in policy would have, before minReplicas and maxReplicas. Absent until it has decided."""
    versions: VersionsState = Field(default_factory=VersionsState)
    """The versions of weights on their way."""
    fleets: Annotated[dict[FleetName, VersionsState], Field(max_length=MOST_FLEETS)] | None = None
    """The same of the followers of one WeightSync alone, by its name: of the largest of such fleets. Absent: it is not
    known whose followers they are."""

    @property
    def words(self) -> str:
        """Progress of the job and what it waits for, in one sentence."""
        words = self.step_progress.words if self.step_progress else self.phase.lower()
        return f"{words}; still waiting for {self.waiting_for}" if self.waiting_for else words


class DrainingRollout(Spec):
    """A rollout that is being drained."""

    name: Annotated[str, StringConstraints(max_length=63)]
    """Its pod."""
    uid: Uid
    """The pod's UID."""
    since: Time
    """Time at which it was chosen."""


class JobStatus(Spec):
    """State of an RLJob as the operator observed it."""

    observed_generation: Count = 0
    """Generation of the spec that this status speaks of."""
    accepted_generation: Count | None = None
    """Generation of the spec that counts: the newest that was accepted."""
    conditions: Conditions = ()
    """Accepted, Ready, Progressing, Stalled, WhyPending, Complete, Failed, Suspended, ElasticityActive."""
    phase: Phase = "Pending"
    """Phase of the job."""
    attempt: Count = 0
    """The trainer's attempt; it only grows, and fences writers of older ones."""
    start_time: Time | None = None
    """Time at which the first pod was made."""
    completion_time: Time | None = None
    """Time at which the job finished."""
    suspend_time: Time | None = None
    """Time at which the driver was first asked to suspend."""
    progress_time: Time | None = None
    """Time at which this status was written: its figures are as of then."""
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
    """The same on each set of held-out prompts that has a name."""
    tokens_per_second: Annotated[float, Field(ge=0)] | None = None
    """Tokens trained in a second."""
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
    """Step of the checkpoint with the best evaluation, where ``storage.checkpoints.keepBest`` asks for it."""
    failed_rewards: Count | None = None
    """Samples that got no reward."""
    waiting_for: Line = ""
    """Reason why the job waits, in one sentence."""
    replicas: Count = 0
    """Rollouts that exist, for /scale."""
    ready_rollouts: Count = 0
    """Rollouts that have caught up."""
    desired_replicas: Count | None = None
    """Rollouts that the built-in policy wants."""
    draining: Annotated[tuple[DrainingRollout, ...], Field(max_length=256)] = ()
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
    """By role, and of what scores: image, pinned when the job began."""
    weights: WeightsSpec | None = None
    """Fields of the WeightSync that the job names, as they were last: should it go, the job goes on with them."""
    secrets: SecretRecords = Field(default_factory=dict)
    """By role: Secrets with certificates; ``keys``: that with the bearer token and the password of the store."""

    @property
    def begun(self) -> bool:
        """True once pods were made for the job, also where it waits now to be resumed."""
        attempted = any(record.attempt for record in self.failures.values())
        return self.start_time is not None or self.phase != "Pending" or attempted
