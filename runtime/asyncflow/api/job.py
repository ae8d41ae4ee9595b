"""RLJob: one manifest for a whole training run, on one machine and on Kubernetes.

Invariant: nothing that a run does depends on anything but this manifest and the files it names. What no substrate can
run is refused here, by rules that the CRD repeats.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from asyncflow.api.base import Flaw, Frozen, ObjectMeta, Rule, Spec, keyed_by
from asyncflow.api.durability import ElasticitySpec, FailurePolicySpec, LimitsSpec, StorageSpec, TelemetrySpec
from asyncflow.api.graph import REF_LOGPROBS, flaws, graph_of
from asyncflow.api.learning import AlgorithmSpec, CriticSpec, DataSpec, EvaluationSpec, ModelSpec, SamplingSpec
from asyncflow.api.names import API_VERSION, FOLDER, LEAST_BYTES, LOSS_MASK, RoleName, task_role
from asyncflow.api.placement import AUTO, DriverSpec, SchedulingSpec, TemplateSpec
from asyncflow.api.queue import QueueSpec
from asyncflow.api.rewards import MOST_DETAILS, EnvironmentSpec, RewardSpec
from asyncflow.api.schedule import AHEAD_CEL, LAG_CEL, STEPS_OUT_CEL, ScheduleSpec
from asyncflow.api.status import JobStatus
from asyncflow.api.tasks import ENTRY_BYTES, ReferenceSpec, UserTaskSpec
from asyncflow.api.weights import JobWeightsSpec, PublishedDtype
from asyncflow.api.workers import RolloutSpec, TrainerSpec

_TASKS_CEL = (
    "(has(self.tasks) ? self.tasks.map(t,"
    " t.writes.map(w, has(w.most) ? w.most : self.sampling.maxTokens).sum()).sum() : 0)"
)
_ROW_CEL = (
    "double(4 * self.sampling.maxPromptTokens + self.data.maxTaskBytes"
    " + ((has(self.reference) ? 20 : 16) + (has(self.environment) ? 1 : 0)) * self.sampling.maxTokens"
    f" + {MOST_DETAILS + 8} + {ENTRY_BYTES} * {_TASKS_CEL})"
)
_EVAL_CEL = "(has(self.evaluation) ? self.evaluation.samples + (self.evaluation.greedy ? 1 : 0) : 0)"
_PART_CEL = f"[{LEAST_BYTES}.0, {_ROW_CEL} * double([self.algorithm.groupSize, {_EVAL_CEL}].max())].max()"


class RLJobSpec(Spec):
    """Specification of a training run: model, data, reward, algorithm, and the processes that carry it out."""

    model: ModelSpec
    """The model."""
    data: DataSpec
    """The prompts."""
    reward: RewardSpec
    """The judge."""
    environment: EnvironmentSpec | None = None
    """The environment that answers a turn of the model. Absent: a response has one turn."""
    algorithm: AlgorithmSpec
    """The algorithm."""
    sampling: SamplingSpec
    """Settings of the sampling of responses."""
    schedule: ScheduleSpec = Field(default_factory=ScheduleSpec)
    """Overlap of generation and training."""
    rollout: RolloutSpec = Field(default_factory=RolloutSpec)
    """The rollouts."""
    trainer: TrainerSpec = Field(default_factory=TrainerSpec)
    """The trainer."""
    reference: ReferenceSpec | None = None
    """The reference model as a role of its own. Absent: the trainer computes it."""
    critic: CriticSpec | None = None
    """The critic, of algorithms that have one. Absent: all of its settings are the usual ones."""
    tasks: Annotated[tuple[UserTaskSpec, ...], Field(max_length=5, json_schema_extra=keyed_by("name"))] = ()
    """Tasks of the user's own: functions over finished responses, each in processes of its own."""
    driver: DriverSpec = Field(default_factory=DriverSpec)
    """Place of the driver."""
    template: TemplateSpec = Field(default_factory=TemplateSpec)
    """Additions to all pods of the job."""
    transfer_queue: QueueSpec = Field(default_factory=QueueSpec)
    """The queue of samples."""
    weight_sync: JobWeightsSpec = Field(default_factory=JobWeightsSpec)
    """The versions of weights."""
    storage: StorageSpec = Field(default_factory=StorageSpec)
    """Durable storage: what outlives processes."""
    telemetry: TelemetrySpec = Field(default_factory=TelemetrySpec)
    """Figures of the run."""
    evaluation: EvaluationSpec | None = None
    """Evaluation on held-out prompts. Absent: none."""
    elasticity: ElasticitySpec = Field(default_factory=ElasticitySpec)
    """Built-in scaling of rollouts."""
    failure_policy: FailurePolicySpec = Field(default_factory=FailurePolicySpec)
    """Restart budgets."""
    limits: LimitsSpec = Field(default_factory=LimitsSpec)
    """Time limits."""
    scheduling: SchedulingSpec = Field(default_factory=SchedulingSpec)
    """Scheduling of the gang as a whole."""
    suspend: bool = False
    """Checkpoint and release all processes; false again resumes."""
    managed_by: Annotated[str, StringConstraints(pattern=r"^[a-z0-9.-]+/[a-z0-9.-]+$", max_length=253)] | None = None
    """Controller that manages the job instead of this operator, as ``domain/name``."""

    @property
    def longest(self) -> int:
        """Most tokens of one sample, prompt and response together."""
        return self.sampling.max_prompt_tokens + self.sampling.max_tokens

    @property
    def group_sizes(self) -> dict[str, int]:
        """Samples of one prompt, by what they are for: ``train`` or ``eval``."""
        evaluated = self.evaluation.group_size if self.evaluation is not None else 0
        return {"train": self.algorithm.group_size, "eval": evaluated}

    @property
    def devices(self) -> int:
        """Devices of all trainer ranks and rollouts; on the CPU each process counts as one."""
        return self.trainer.ranks + self.rollout.replicas * max(1, self.rollout.accelerator.count)

    @property
    def published_dtype(self) -> PublishedDtype:
        """The dtype to which weights are rounded when they are published."""
        narrow = self.rollout.engine.dtype == "bfloat16" or self.trainer.backend.precision == "bf16-stochastic"
        return self.weight_sync.dtype or ("bfloat16" if narrow else "float32")

    @property
    def output_bytes(self) -> dict[str, int]:
        """Most bytes of each column that is written to a sample after its creation."""
        of_token = {"response_ids": 4, "logprobs": 4, "versions": 8}
        if self.reference is not None:
            of_token[REF_LOGPROBS] = 4
        if self.environment is not None:
            of_token[LOSS_MASK] = 1
        of_task = {
            column.name: ENTRY_BYTES * (column.most or self.sampling.max_tokens)
            for task in self.tasks
            for column in task.writes
        }
        of_row = {name: size * self.sampling.max_tokens for name, size in of_token.items()}
        turns = self.environment.max_turns if self.environment is not None and self.algorithm.credit == "turn" else 1
        return of_row | {"reward": 4, "details": MOST_DETAILS, "advantage": 4 * turns} | of_task

    @property
    def bytes_of_interval(self) -> int:
        """Bytes with which the queue never stands still, whatever is written when.

        Training samples hold theirs until a checkpoint commits them: those of ``checkpoints.every`` steps, and of the
        steps whose prompts are out ahead. Samples of an evaluation leave as soon as they are judged, so they only have
        to pass through: one part of a put. One more part for each further unit: then, as long as a part fits into what
        is left of all units together, it fits into one of them.
        """
        inputs = 4 * self.sampling.max_prompt_tokens + self.data.max_task_bytes
        row = inputs + sum(self.output_bytes.values())
        part = max(LEAST_BYTES, row * max(self.group_sizes.values()))
        samples = self.algorithm.prompts_per_step * self.algorithm.group_size
        steps = self.storage.checkpoints.every + self.schedule.ahead
        return ceil(row * samples * steps) + part * self.transfer_queue.storage_units

    @property
    def task_roles(self) -> dict[RoleName, UserTaskSpec]:
        """The tasks that the job's own processes do, by their roles."""
        return {task_role(task.name): task for task in self.tasks if task.function is not None}

    @property
    def own_tasks(self) -> dict[str, UserTaskSpec]:
        """The tasks that are left to a process of the user's, by name."""
        return {task.name: task for task in self.tasks if task.function is None}

    def flaws(self) -> Iterator[Flaw]:
        """Yield what is wrong with the tasks of the job."""
        return flaws(graph_of(self))

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("data.train.source", "trainer.external"),
            ok=lambda job: job.trainer.external or not job.data.train.source.startswith("put://"),
            cel="self.trainer.external || !self.data.train.source.startsWith('put://')",
            why="put:// has no prompts until a trainer of your own puts them",
            fix="Set trainer.external: true, or name a source that has prompts",
        ),
        Rule(
            reads=("tasks", "trainer.external"),
            ok=lambda job: job.trainer.external or not job.own_tasks,
            cel="self.trainer.external || !has(self.tasks) || self.tasks.all(t, has(t.function))",
            why="a task without a function is left to a process of yours, which joins as the trainer does",
            fix="Set trainer.external: true, or give the task a function",
        ),
        Rule(
            reads=("critic.role.replicas", "trainer.replicas"),
            ok=lambda job: (
                job.critic is None or job.critic.role is None or job.critic.role.replicas <= job.trainer.ranks
            ),
            cel="!has(self.critic) || !has(self.critic.role) || self.critic.role.replicas <= self.trainer.replicas"
            " * (has(self.trainer.ranksPerReplica) ? self.trainer.ranksPerReplica"
            " : self.trainer.accelerator.count > 1 ? self.trainer.accelerator.count : 1)",
            why="each rank of the trainer asks one process of the critic, and nobody would ask the others",
            fix="Give at most the number of ranks of the trainer",
        ),
        Rule(
            reads=("evaluation", "data.eval"),
            ok=lambda job: job.evaluation is None or bool(job.data.held_out),
            cel="!has(self.evaluation) || has(self.data.eval)"
            " || (has(self.data.evalSets) && size(self.data.evalSets) > 0)",
            why="there are no prompts to evaluate on",
            fix="Give data.eval or data.evalSets, or leave evaluation out",
        ),
        Rule(
            reads=("storage.checkpoints.keep_best", "evaluation"),
            ok=lambda job: (
                job.storage.checkpoints.keep_best is None
                or (
                    job.evaluation is not None
                    and (job.storage.checkpoints.keep_best != "greedy" or job.evaluation.greedy)
                )
            ),
            cel="!has(self.storage.checkpoints.keepBest) || (has(self.evaluation)"
            " && (self.storage.checkpoints.keepBest != 'greedy' || self.evaluation.greedy))",
            why="nothing measures which checkpoint is the best",
            fix="Give evaluation (for keepBest: greedy with greedy: true), or leave keepBest out",
        ),
        Rule(
            reads=("reward.function", "reward.components", "data.train.source", "data.eval", "data.eval_sets"),
            ok=lambda job: (
                all(part.function != "gym" for part in job.reward.parts)
                or all(data.source.startswith("gym://") for data in (job.data.train, *job.data.held_out.values()))
            ),
            cel="((!has(self.reward.function) || self.reward.function != 'gym')"
            " && (!has(self.reward.components) || self.reward.components.all(c, c.function != 'gym')))"
            " || (self.data.train.source.startsWith('gym://')"
            " && (!has(self.data.eval) || self.data.eval.source.startsWith('gym://'))"
            " && (!has(self.data.evalSets) || self.data.evalSets.all(d, d.source.startsWith('gym://'))))",
            why="it scores prompts of gym:// only, and every other response would get 0",
            fix="Take gym:// sources, or task, math_verify or module:function",
        ),
        Rule(
            reads=("trainer.backend.tokens_per_micro_batch", "sampling.max_prompt_tokens", "sampling.max_tokens"),
            ok=lambda job: (
                job.trainer.backend.tokens_per_micro_batch is None
                or job.trainer.backend.tokens_per_micro_batch >= job.longest
            ),
            cel="!has(self.trainer.backend.tokensPerMicroBatch) || self.trainer.backend.tokensPerMicroBatch"
            " >= self.sampling.maxPromptTokens + self.sampling.maxTokens",
            why="the longest sample does not fit into a micro-batch, and samples are never cut",
            fix="Give at least sampling.maxPromptTokens + sampling.maxTokens",
        ),
        Rule(
            reads=(
                "transfer_queue.bytes_per_unit",
                "transfer_queue.storage_units",
                "storage.checkpoints.every",
                "schedule.max_staleness",
                "schedule.staleness_threshold",
                "schedule.sync_every",
                "data.max_task_bytes",
                "sampling.max_prompt_tokens",
                "sampling.max_tokens",
                "algorithm.prompts_per_step",
                "algorithm.group_size",
                "evaluation",
                "reference",
                "tasks",
                "environment",
            ),
            ok=lambda job: (
                job.transfer_queue.bytes_per_unit.bytes * job.transfer_queue.storage_units >= job.bytes_of_interval
            ),
            cel="quantity(string(self.transferQueue.bytesPerUnit)).asApproximateFloat()"
            " * double(self.transferQueue.storageUnits) >= "
            f"{_ROW_CEL} * double(self.algorithm.promptsPerStep * self.algorithm.groupSize)"
            f" * (double(self.storage.checkpoints.every) + {AHEAD_CEL})"
            f" + {_PART_CEL} * double(self.transferQueue.storageUnits)",
            why="the units cannot hold the samples of one checkpoint interval, which stay until it commits",
            fix="Give storageUnits * bytesPerUnit >= row * promptsPerStep * groupSize * (checkpoints.every + ahead)"
            " + storageUnits * part, or checkpoint more often; row = 4 maxPromptTokens + maxTaskBytes + 16 maxTokens"
            " + 8, with a reference 4 maxTokens more, with an environment maxTokens more, and 8 for each entry that"
            " tasks write; ahead = 1 (quota, update sync), 2 (quota, delayed), else the less of maxStaleness + 1 and"
            " (1 + stalenessThreshold) * syncEvery; part = the more of 1Mi and row * samples of a prompt",
        ),
        Rule(
            reads=("elasticity.enabled", "rollout.min_replicas", "rollout.max_replicas", "rollout.replicas"),
            ok=lambda job: not job.elasticity.enabled or job.rollout.min_replicas < job.rollout.max_replicas,
            cel="!self.elasticity.enabled"
            " || (has(self.rollout.minReplicas) ? self.rollout.minReplicas : self.rollout.replicas > 0 ? 1 : 0)"
            " < (has(self.rollout.maxReplicas) ? self.rollout.maxReplicas"
            " : self.rollout.replicas > 0 ? self.rollout.replicas : 1)",
            why="minReplicas equals maxReplicas: there is nothing to scale",
            fix="Give rollout.minReplicas < rollout.maxReplicas",
        ),
        Rule(
            reads=(
                "schedule.require_batches",
                "schedule.sync_every",
                "schedule.swap_at",
                "schedule.update",
                "schedule.mode",
                "schedule.max_staleness",
                "schedule.staleness_threshold",
            ),
            ok=lambda job: job.schedule.require_batches <= 1 or job.schedule.steps_out <= job.schedule.ahead,
            cel=f"self.schedule.requireBatches <= 1 || double({STEPS_OUT_CEL}) <= {AHEAD_CEL}",
            why="so many batches are never complete: generation does not run so far ahead of the newest weights",
            fix="Give fewer, of which syncEvery is a multiple, or a larger maxStaleness and stalenessThreshold",
        ),
        Rule(
            reads=("weight_sync.stagger", "schedule.update"),
            ok=lambda job: job.weight_sync.stagger is None or job.schedule.update == "staggered",
            cel="!has(self.weightSync.stagger) || (has(self.schedule.update) && self.schedule.update == 'staggered')",
            why="rollouts that are not staggered change weights whenever they can",
            fix="Give schedule.update: staggered, or leave stagger out",
        ),
        Rule(
            reads=("algorithm.old", "schedule.mode"),
            ok=lambda job: job.algorithm.old != "lagged" or job.schedule.mode == "periodic",
            cel="self.algorithm.old != 'lagged' || self.schedule.mode == 'periodic'",
            why="log-probs one step behind belong to periodic asynchrony",
            fix="Give schedule.mode: periodic, or algorithm.old: behaviour",
        ),
        Rule(
            reads=(
                "algorithm.old",
                "algorithm.correction",
                "schedule.mode",
                "schedule.update",
                "schedule.swap_at",
                "schedule.max_staleness",
                "schedule.sync_every",
            ),
            ok=lambda job: (
                job.algorithm.old != "recompute" or job.algorithm.correction is not None or job.schedule.lag == 0
            ),
            cel=f"self.algorithm.old != 'recompute' || has(self.algorithm.correction) || {LAG_CEL} == 0",
            why="samples are of older weights, and without a correction for them the ratio would be 1 for all",
            fix="Give algorithm.correction, algorithm.old: behaviour, or schedule.mode: sync or periodic",
        ),
        Rule(
            reads=("algorithm.filter_zero_variance", "schedule.deterministic"),
            ok=lambda job: job.algorithm.filter_zero_variance != "drop" or not job.schedule.deterministic,
            cel="self.algorithm.filterZeroVariance != 'drop' || !self.schedule.deterministic",
            why="which prompts replace the dropped groups depends on arrival times",
            fix="Give filterZeroVariance: keep, or schedule.deterministic: false",
        ),
        Rule(
            reads=("schedule.deterministic", "rollout.engine.name", "rollout.accelerator.profile"),
            ok=lambda job: (
                not job.schedule.deterministic
                or job.rollout.engine.name != "vllm"
                or job.rollout.accelerator.profile in ("nvidia", AUTO)
            ),
            cel="!self.schedule.deterministic || self.rollout.engine.name != 'vllm'"
            " || self.rollout.accelerator.profile == 'nvidia'",
            why="vLLM has batch-invariant kernels on NVIDIA GPUs only",
            fix="Give false, the engine transformers, or the profile nvidia",
        ),
        Rule(
            reads=("algorithm.epochs", "algorithm.mini_batches", "schedule.mode"),
            ok=lambda job: job.schedule.mode != "periodic" or job.algorithm.epochs * job.algorithm.mini_batches == 1,
            cel="self.schedule.mode != 'periodic' || self.algorithm.epochs * self.algorithm.miniBatches == 1",
            why="the mode periodic trains samples as they arrive, and several updates need those of a whole step",
            fix="Give mode: sync or async, or leave epochs and miniBatches at 1",
        ),
        Rule(
            reads=("reference", "algorithm.kl.coefficient", "algorithm.name"),
            ok=lambda job: (
                job.reference is None or job.algorithm.kl.coefficient > 0 or job.algorithm.name in ("dpo", "ipo")
            ),
            cel="!has(self.reference) || self.algorithm.kl.coefficient > 0.0 || self.algorithm.name in ['dpo', 'ipo']",
            why="a reference model is only used by DPO, IPO and the KL penalty, whose coefficient is 0",
            fix="Give algorithm.kl.coefficient, or leave reference out",
        ),
        Rule(
            reads=("critic.role", "storage.checkpoints.claim", "storage.checkpoints.access_mode"),
            ok=lambda job: (
                job.critic is None
                or job.critic.role is None
                or job.storage.checkpoints.claim is None
                or job.storage.checkpoints.access_mode == "ReadWriteMany"
            ),
            cel="!has(self.critic) || !has(self.critic.role) || !has(self.storage.checkpoints.claim)"
            " || self.storage.checkpoints.accessMode == 'ReadWriteMany'",
            why="trainer and critic write a checkpoint together, and a claim for one writer is seen on one node",
            fix="Give storage.checkpoints.accessMode: ReadWriteMany, or leave critic.role out",
        ),
        Rule(
            reads=("critic.warmup_steps", "algorithm.steps"),
            ok=lambda job: job.critic is None or job.critic.warmup_steps < job.algorithm.steps,
            cel="!has(self.critic) || self.critic.warmupSteps < self.algorithm.steps",
            why="the run ends before the policy is trained",
            fix="Give critic.warmupSteps < algorithm.steps",
        ),
    )
    frozen_fields: ClassVar[tuple[Frozen, ...]] = (
        Frozen(reads="model.source", why="checkpoints and published versions belong to the old model"),
        Frozen(reads="data.train.source", why="the ledger counts serials of the old data"),
        Frozen(reads="data.train.seed", why="the ledger counts serials of the old order"),
        Frozen(reads="environment", why="samples on their way have the turns and columns of the old one"),
        Frozen(reads="schedule.mode", why="samples on their way carry versions of the old schedule"),
        Frozen(reads="schedule.update", why="samples on their way carry versions of the old schedule"),
        Frozen(reads="schedule.swap_at", why="samples on their way carry versions of the old schedule"),
        Frozen(reads="trainer.backend.name", why="checkpoints belong to the old back end"),
        Frozen(reads="trainer.external", why="checkpoints belong to whoever trained so far"),
        Frozen(reads="trainer.lora", why="checkpoints and published versions belong to the old adapters"),
        Frozen(reads="storage.ledger.sync", why="the ledger's promise covers its whole life"),
        Frozen(reads="managed_by", why="two controllers would both think that the job is theirs"),
        Frozen(reads="weight_sync.name", why="versions do not move between catalogues"),
    )


class RLJob(Spec):
    """A training run."""

    api_version: Literal["asyncflow.dev/v1alpha1"] = API_VERSION
    """asyncflow.dev/v1alpha1."""
    kind: Literal["RLJob"] = "RLJob"
    """RLJob."""
    metadata: ObjectMeta
    """Name, namespace, labels, annotations."""
    spec: RLJobSpec
    """Desired state."""
    status: JobStatus | None = None
    """Observed state; written by the operator."""

    @property
    def name(self) -> str:
        """The job's name."""
        return self.metadata.name

    @property
    def partition(self) -> str:
        """The job's partition of the queue: its UID, or on one machine its name."""
        return self.metadata.uid or self.metadata.name

    def folder(self, beside: Path) -> Path:
        """Return where relative paths and modules begin. beside: that of the manifest, for a job that names none."""
        return Path(self.metadata.annotations.get(FOLDER, beside))
