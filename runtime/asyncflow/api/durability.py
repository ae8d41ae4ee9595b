"""Durable state and limits of a job: ledger and checkpoints, restart budgets, time limits.

Invariant: a number in this module bounds every wait and every series of restarts of a job.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from asyncflow.api.base import Bytes, ExistingName, Options, PluginName, Rule, Spec


class ClaimSpec(Spec):
    """A PersistentVolumeClaim: an existing one by name, or a new one by size. On one machine: a folder."""

    name: ExistingName | None = None
    """Name of an existing claim."""
    size: Bytes | None = None
    """Bytes of a new claim."""
    storage_class: ExistingName | None = None
    """Storage class of a new claim. Absent: the cluster's default."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("name", "size"),
            ok=lambda claim: (claim.name is None) != (claim.size is None),
            cel="has(self.name) != has(self.size)",
            why="a claim either exists (name) or is created (size)",
            fix="Set exactly one of name and size",
        ),
        Rule(
            reads=("storage_class", "size"),
            ok=lambda claim: claim.storage_class is None or claim.size is not None,
            cel="!has(self.storageClass) || has(self.size)",
            why="an existing claim already has a storage class",
            fix="Remove storageClass, or set size instead of name",
        ),
    )


class LedgerSpec(Spec):
    """The ledger, which records every transition of every sample."""

    sync: Literal["process", "interval", "always"] = "process"
    """Crash that an acknowledged record survives. ``process``: of the process. ``interval``: of the node, except for
    records of the last second. ``always``: of the node."""
    claim: ClaimSpec | None = None
    """Volume claim for the ledger on Kubernetes. Absent: the ledger is lost with the controller's pod."""


class CheckpointsSpec(Spec):
    """Checkpoints: weights, optimizer state and position in the data. A checkpoint commits the samples of its steps."""

    every: Annotated[int, Field(ge=1, le=1_000_000)] = 10
    """Optimizer steps between checkpoints."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 2
    """Number of newest checkpoints to keep."""
    keep_best: Literal["accuracy", "greedy", "reward"] | None = None
    """Also keep the checkpoint with the best evaluation, by this figure of the main set; the earliest wins a tie. Every
    evaluated version then has a checkpoint, at least until its evaluation is done. Absent: off."""
    claim: ClaimSpec | None = None
    """Volume claim for the checkpoints on Kubernetes. Resuming them needs the ledger, so set the ledger's claim too."""
    access_mode: Literal["ReadWriteOnce", "ReadWriteMany"] = "ReadWriteOnce"
    """ReadWriteOnce: rank 0 writes the parts of all ranks. ReadWriteMany: every rank writes its part."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("access_mode", "claim"),
            ok=lambda checkpoints: checkpoints.access_mode == "ReadWriteOnce" or checkpoints.claim is not None,
            cel="self.accessMode == 'ReadWriteOnce' || has(self.claim)",
            why="without a claim there is no volume that several pods can write",
            fix="Set claim, or leave accessMode at ReadWriteOnce",
        ),
    )


class SamplesSpec(Spec):
    """Texts of samples that a run keeps, in one file for each step and each evaluation."""

    per_step: Annotated[int, Field(ge=0, le=4096)] = 16
    """Samples to keep of a step, selected by a hash of their keys: unbiased and repeatable."""
    extremes: Annotated[int, Field(ge=0, le=256)] = 2
    """Samples to keep in addition: so many with the highest rewards of a step, and as many with the lowest."""
    per_evaluation: Annotated[int, Field(ge=0, le=4096)] = 16
    """Samples to keep of an evaluation, selected likewise: from the same prompts in every evaluation."""
    every: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Keep samples of every n-th step, and of the first."""
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
    """Restarts allowed within the window; one more fails the job. The restart of a gang counts once."""
    window_seconds: Annotated[float, Field(gt=0, le=31_536_000)] = 3600.0
    """Seconds after which a restart no longer counts."""
    backoff_seconds: Annotated[float, Field(ge=0, le=3600)] = 1.0
    """Seconds before a restart, doubled by each consecutive failure, up to 60."""


class FailurePolicySpec(Spec):
    """Restart budgets of the roles."""

    driver: RestartSpec = RestartSpec(max_restarts=10)
    """Budget of the driver."""
    controller: RestartSpec = RestartSpec(max_restarts=10)
    """Budget of the queue's controllers."""
    storage: RestartSpec = RestartSpec(max_restarts=10)
    """Budget of all storage units together; the roles holder and master have the same, each for itself."""
    rollout: RestartSpec = RestartSpec(max_restarts=20)
    """Budget of all rollouts together; each is restarted alone."""
    trainer: RestartSpec = RestartSpec(max_restarts=3)
    """Budget of the trainer; a lost rank restarts the gang from its checkpoint."""


class SinkSpec(Spec):
    """A destination of figures: an entry point of the group ``asyncflow.metric_sinks``."""

    kind: PluginName
    """``tensorboard``, ``wandb``, ``mlflow``, or a third party's (docs/guide/outputs.md)."""
    options: Options = Field(default_factory=dict)
    """Settings of the sink. Keys and passwords belong in the driver's environment, e.g. WANDB_API_KEY."""
    secret: ExistingName | None = None
    """Secret whose entries become environment variables of the driver. On one machine the driver has the environment
    of ``asyncflow run``."""


class TelemetrySpec(Spec):
    """Destinations of a run's figures in addition to its files and ``/metrics``."""

    sinks: Annotated[tuple[SinkSpec, ...], Field(max_length=8)] = ()
    """Destinations of the figures of steps and evaluations, at most one of each kind."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("sinks",),
            ok=lambda telemetry: len({sink.kind for sink in telemetry.sinks}) == len(telemetry.sinks),
            cel="!has(self.sinks) || self.sinks.all(a, self.sinks.exists_one(b, a.kind == b.kind))",
            why="two sinks of one kind would write the same figures",
            fix="Keep one sink of each kind",
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
    """Most seconds without a step before the job counts as stalled and reports what it waits for. A trainer rank waits
    as long for another rank, and longer while a checkpoint is being written and makes progress."""
    stop_seconds: Annotated[float, Field(gt=0, le=3600)] = 8.0
    """Seconds that roles have to shut down before they are killed."""
    node_lost_seconds: Annotated[int, Field(ge=0, le=86_400)] = 120
    """Seconds after which the processes of an unreachable node are started elsewhere; rollouts: immediately."""
    keep_on_failure: bool = True
    """Keep the pods of a failed job until its TTL, so that their logs can be read."""


class ElasticitySpec(Spec):
    """The built-in policy that scales rollouts between minReplicas and maxReplicas."""

    enabled: bool = False
    """Apply the decisions of the policy. It stops if another field manager owns ``replicas``."""
    dry_run: bool = False
    """Only show in status what the policy would do."""
    target_trainer_wait_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of its time that the trainer may wait for samples before rollouts are added."""
    max_queued_steps: Annotated[float, Field(gt=0, le=1000)] = 2.0
    """Finished samples in the queue, in optimizer steps, above which rollouts are removed."""
    stabilization_seconds: Annotated[float, Field(ge=0, le=86_400)] = 60.0
    """Seconds for which a recommendation must last before it is followed."""

    @property
    def acts(self) -> bool:
        """True if the policy scales rollouts, unless another field manager owns ``replicas``."""
        return self.enabled and not self.dry_run
