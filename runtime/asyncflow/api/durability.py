"""Durable state and limits of a job: ledger and checkpoints, restart budgets, time limits.

Invariant: every wait and every restart that a job may do is bounded by a number in here.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from asyncflow.api.base import Bytes, Name, Options, PluginName, Rule, Spec


class ClaimSpec(Spec):
    """A PersistentVolumeClaim: an existing one by name, or one to be made, of a size. On one machine: a folder."""

    name: Name | None = None
    """An existing claim."""
    size: Bytes | None = None
    """Bytes of a claim that is made for the job."""
    storage_class: Name | None = None
    """Storage class of a claim that is made. Absent: the cluster's default."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("name", "size"),
            ok=lambda claim: (claim.name is None) != (claim.size is None),
            cel="has(self.name) != has(self.size)",
            why="a claim either exists (name) or is made (size)",
            fix="Give exactly one of name and size",
        ),
        Rule(
            reads=("storage_class", "size"),
            ok=lambda claim: claim.storage_class is None or claim.size is not None,
            cel="!has(self.storageClass) || has(self.size)",
            why="an existing claim has its storage class already",
            fix="Leave storageClass out, or give size instead of name",
        ),
    )


class LedgerSpec(Spec):
    """The ledger: every transition of every sample."""

    sync: Literal["process", "interval", "always"] = "process"
    """Crash that an acknowledged record survives. ``process``: of the process. ``interval``: of the node too, but for
    records of the last second. ``always``: of the node."""
    claim: ClaimSpec | None = None
    """Volume claim for the ledger on Kubernetes. Absent: it lies with the controller's pod, and is lost with it."""


class CheckpointsSpec(Spec):
    """Checkpoints: weights, optimizer, position in the data. Samples commit with them."""

    every: Annotated[int, Field(ge=1, le=1_000_000)] = 10
    """Optimizer steps between checkpoints."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 2
    """Checkpoints that are kept."""
    keep_best: Literal["accuracy", "greedy", "reward"] | None = None
    """Keep the checkpoint with the best evaluation too, by this figure of the main set, the earliest of equals. Every
    version that is evaluated has a checkpoint then, which stays at least until the evaluation is there. Absent: off."""
    claim: ClaimSpec | None = None
    """Volume claim for the checkpoints on Kubernetes."""
    access_mode: Literal["ReadWriteOnce", "ReadWriteMany"] = "ReadWriteOnce"
    """ReadWriteOnce: rank 0 writes, and other ranks send it their parts. ReadWriteMany: every rank writes its part."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("access_mode", "claim"),
            ok=lambda checkpoints: checkpoints.access_mode == "ReadWriteOnce" or checkpoints.claim is not None,
            cel="self.accessMode == 'ReadWriteOnce' || has(self.claim)",
            why="without a claim there is no volume that several pods could write",
            fix="Give a claim, or leave accessMode at ReadWriteOnce",
        ),
    )


class SamplesSpec(Spec):
    """Texts of samples that a run keeps, a file for each step and each evaluation."""

    per_step: Annotated[int, Field(ge=0, le=4096)] = 16
    """Samples of a step, drawn by a hash of their names: an unbiased draw, and the same one whoever draws again."""
    extremes: Annotated[int, Field(ge=0, le=256)] = 2
    """Samples with the highest rewards of a step, and as many with the lowest, kept beside those."""
    per_evaluation: Annotated[int, Field(ge=0, le=4096)] = 16
    """Samples of an evaluation, drawn so too: of the same prompts in every evaluation."""
    every: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Steps between two of which samples are kept. The first is always one."""
    format: Literal["jsonl", "parquet"] = "jsonl"
    """Format of the files. ``parquet`` needs pyarrow (``asyncflow[data]``)."""


class StorageSpec(Spec):
    """Durable storage."""

    ledger: LedgerSpec = Field(default_factory=LedgerSpec)
    """The ledger."""
    checkpoints: CheckpointsSpec = Field(default_factory=CheckpointsSpec)
    """The checkpoints."""
    samples: SamplesSpec = Field(default_factory=SamplesSpec)
    """Texts of samples."""


class RestartSpec(Spec):
    """A role's restart budget."""

    max_restarts: Annotated[int, Field(ge=0, le=100_000)] = 10
    """Restarts within the window; one more fails the job. For a gang one counts once."""
    window_seconds: Annotated[float, Field(gt=0, le=31_536_000)] = 3600.0
    """Seconds after which a restart is forgotten."""
    backoff_seconds: Annotated[float, Field(ge=0, le=3600)] = 1.0
    """Seconds before a restart, doubled by each failure in a row, up to 60."""


class FailurePolicySpec(Spec):
    """Restart budgets of the roles."""

    driver: RestartSpec = RestartSpec(max_restarts=10)
    """Of the driver."""
    controller: RestartSpec = RestartSpec(max_restarts=10)
    """Of the queue's controllers."""
    storage: RestartSpec = RestartSpec(max_restarts=10)
    """Of the storage units, together; of their holders and the master as well, each role for itself."""
    rollout: RestartSpec = RestartSpec(max_restarts=20)
    """Of the rollouts, together; each is replaced alone."""
    trainer: RestartSpec = RestartSpec(max_restarts=3)
    """Of the trainer; a lost rank restarts the gang from its checkpoint."""


class SinkSpec(Spec):
    """A place to which figures go: an entry point of the group ``asyncflow.metric_sinks``."""

    kind: PluginName
    """``tensorboard``, ``wandb``, ``mlflow``, or a third party's (docs/guide/outputs.md)."""
    options: Options = Field(default_factory=dict)
    """Settings of the sink. A key or a password is none: the driver's environment has those, e.g. WANDB_API_KEY."""
    secret: Name | None = None
    """Secret of the cluster whose entries are variables of the driver's environment. On one machine that is the
    environment of ``asyncflow run``."""


class TelemetrySpec(Spec):
    """Figures of a run, beside its files and ``/metrics``."""

    sinks: Annotated[tuple[SinkSpec, ...], Field(max_length=8)] = ()
    """Where the figures of steps and evaluations go too. Of one kind there may be one."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("sinks",),
            ok=lambda telemetry: len({sink.kind for sink in telemetry.sinks}) == len(telemetry.sinks),
            cel="!has(self.sinks) || self.sinks.all(a, self.sinks.exists_one(b, a.kind == b.kind))",
            why="two sinks of one kind would write the same",
            fix="Give each kind once",
        ),
    )


class LimitsSpec(Spec):
    """Time limits of a job."""

    active_deadline_seconds: Annotated[int, Field(ge=1, le=31_536_000)] | None = None
    """Seconds after which a job that has not finished fails. Absent: none."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=31_536_000)] | None = None
    """Seconds after which a finished job is deleted. Absent: never."""
    start_seconds: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    """Seconds that a role may take from start to ready."""
    stall_seconds: Annotated[float, Field(gt=0, le=86_400)] = 1800.0
    """Seconds without a step after which the job counts as stalled, and says what it waits for; also those after which
    a trainer rank gives up one that it waits for, unless a checkpoint is being written and gets on."""
    stop_seconds: Annotated[float, Field(gt=0, le=3600)] = 8.0
    """Seconds that roles have to end in order before they are killed."""
    node_lost_seconds: Annotated[int, Field(ge=0, le=86_400)] = 120
    """Seconds after which what ran on a node that does not answer is started elsewhere; rollouts are at once."""
    keep_on_failure: bool = True
    """Keep the pods of a failed job until its TTL, so that their logs can be read."""


class ElasticitySpec(Spec):
    """The built-in policy that scales rollouts between minReplicas and maxReplicas."""

    enabled: bool = False
    """Let the policy act. A foreign owner of ``replicas`` switches it off."""
    dry_run: bool = False
    """Only show in status what the policy would do."""
    target_trainer_wait_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of its time that the trainer may wait for samples before rollouts are added."""
    max_queued_steps: Annotated[float, Field(gt=0, le=1000)] = 2.0
    """Finished samples in the queue, in optimizer steps, above which rollouts are taken away."""
    stabilization_seconds: Annotated[float, Field(ge=0, le=86_400)] = 60.0
    """Seconds for which a recommendation must last before it is followed."""

    @property
    def acts(self) -> bool:
        """True where the policy decides, unless somebody else does."""
        return self.enabled and not self.dry_run
