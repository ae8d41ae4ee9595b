"""RLJob: the manifest of a whole training run, on one machine or on Kubernetes.

Invariants: a run depends only on its manifest and on the files that the manifest names. The rules below, which the CRD
repeats, refuse every job that no substrate can run.
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
    f" + {MOST_DETAILS + 4} + 4 * (self.algorithm.credit == 'turn' && has(self.environment)"
    f" ? self.environment.maxTurns : 1) + {ENTRY_BYTES} * {_TASKS_CEL})"
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
    """The reward."""
    environment: EnvironmentSpec | None = None
    """The environment that answers a turn of the model. Absent: a response has one turn."""
    algorithm: AlgorithmSpec
    """The algorithm."""
    sampling: SamplingSpec
    """Sampling of responses."""
    schedule: ScheduleSpec = Field(default_factory=ScheduleSpec)
    """Overlap of generation and training."""
    rollout: RolloutSpec = Field(default_factory=RolloutSpec)
    """The rollouts."""
    trainer: TrainerSpec = Field(default_factory=TrainerSpec)
    """The trainer."""
    reference: ReferenceSpec | None = None
    """The reference model as a role of its own. Absent: the trainer computes it."""
    critic: CriticSpec | None = None
    """The critic, for algorithms that have one. Absent: its settings have their defaults."""
    tasks: Annotated[tuple[UserTaskSpec, ...], Field(max_length=5, json_schema_extra=keyed_by("name"))] = ()
    """User-defined tasks: functions over finished responses, each in processes of its own."""
    driver: DriverSpec = Field(default_factory=DriverSpec)
    """The driver."""
    template: TemplateSpec = Field(default_factory=TemplateSpec)
    """Additions to all pods of the job."""
    transfer_queue: QueueSpec = Field(default_factory=QueueSpec)
    """The queue of samples."""
    weight_sync: JobWeightsSpec = Field(default_factory=JobWeightsSpec)
    """The versions of weights."""
    storage: StorageSpec = Field(default_factory=StorageSpec)
    """Durable storage."""
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
    """True: write a checkpoint and end all processes. False again: resume."""
    managed_by: Annotated[str, StringConstraints(pattern=r"^[a-z0-9.-]+/[a-z0-9.-]+$", max_length=253)] | None = None
    """Controller that manages the job instead of this operator, as ``domain/name``."""

    @property
    def longest(self) -> int:
        """Most tokens of one sample, prompt and response together."""
        return self.sampling.max_prompt_tokens + self.sampling.max_tokens

    @property
    def group_sizes(self) -> dict[str, int]:
        """Number of samples of one prompt, by partition: ``train`` or ``eval``."""
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
        """Bytes that the units need together so that the queue never blocks, in whichever order rows are written.

        Training samples keep their bytes until a checkpoint commits them: the samples of ``checkpoints.every`` steps,
        and of the ``schedule.ahead`` steps beyond. Samples of an evaluation are removed as soon as they are scored, so
        they need only the bytes of one part of a put. Each unit adds the bytes of one part: then a part that fits into
        the free bytes of all units together also fits into one unit.
        """
        inputs = 4 * self.sampling.max_prompt_tokens + self.data.max_task_bytes
        row = inputs + sum(self.output_bytes.values())
        part = max(LEAST_BYTES, row * max(self.group_sizes.values()))
        steps = self.storage.checkpoints.every + self.schedule.ahead
        return ceil(row * self.algorithm.samples_per_step * steps) + part * self.transfer_queue.storage_units

    @property
    def task_roles(self) -> dict[RoleName, UserTaskSpec]:
        """The tasks that processes of the job run, by role."""
        return {task_role(task.name): task for task in self.tasks if task.function is not None}

    @property
    def own_tasks(self) -> dict[str, UserTaskSpec]:
        """The tasks that the user's own process runs, by name."""
        return {task.name: task for task in self.tasks if task.function is None}

    def flaws(self) -> Iterator[Flaw]:
        """Yield the errors of the graph of tasks."""
        return flaws(graph_of(self))

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("data.train.source", "trainer.external"),
            ok=lambda job: job.trainer.external or not job.data.train.source.startswith("put://"),
            cel="self.trainer.external || !self.data.train.source.startsWith('put://')",
            why="put:// has no prompts until your own trainer process puts them",
            fix="Set trainer.external: true, or set a source that has prompts",
        ),
        Rule(
            reads=("tasks", "trainer.external"),
            ok=lambda job: job.trainer.external or not job.own_tasks,
            cel="self.trainer.external || !has(self.tasks) || self.tasks.all(t, has(t.function))",
            why="a task without a function needs your own process, which joins like an external trainer",
            fix="Set trainer.external: true, or set the function of the task",
        ),
        Rule(
            reads=("critic.role.replicas", "trainer.replicas"),
            ok=lambda job: (
                job.critic is None or job.critic.role is None or job.critic.role.replicas <= job.trainer.ranks
            ),
            cel="!has(self.critic) || !has(self.critic.role) || self.critic.role.replicas <= self.trainer.replicas"
            " * (has(self.trainer.ranksPerReplica) ? self.trainer.ranksPerReplica"
            " : self.trainer.accelerator.count > 1 ? self.trainer.accelerator.count : 1)",
            why="each rank of the trainer uses one process of the critic; further ones would be idle",
            fix="Set at most the number of ranks of the trainer",
        ),
        Rule(
            reads=("evaluation", "data.eval"),
            ok=lambda job: job.evaluation is None or bool(job.data.held_out),
            cel="!has(self.evaluation) || has(self.data.eval)"
            " || (has(self.data.evalSets) && size(self.data.evalSets) > 0)",
            why="there are no prompts to evaluate on",
            fix="Set data.eval or data.evalSets, or remove evaluation",
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
            why="no evaluation measures which checkpoint is the best",
            fix="Set evaluation (and evaluation.greedy: true for keepBest: greedy), or remove keepBest",
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
            why="the function gym scores prompts of gym:// only; other responses would get 0",
            fix="Use gym:// sources, or another function, e.g. task, math_verify or module:function",
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
            fix="Set at least sampling.maxPromptTokens + sampling.maxTokens",
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
                "algorithm.credit",
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
            why="the storage units cannot hold the samples of one checkpoint interval",
            fix="Set storageUnits * bytesPerUnit >= row * promptsPerStep * groupSize * (checkpoints.every + ahead)"
            " + storageUnits * part, or reduce checkpoints.every. Here row = 4 maxPromptTokens + maxTaskBytes + 16"
            f" maxTokens + {MOST_DETAILS + 8}, plus 4 maxTokens with a reference, maxTokens with an environment, 4 for"
            " each further turn with credit: turn, and 8 for each entry that tasks write; ahead = 1 (quota, update"
            " sync), 2 (quota, delayed), otherwise min(maxStaleness + 1, (1 + stalenessThreshold) * syncEvery); part ="
            " max(1Mi, row * samples of a prompt)",
        ),
        Rule(
            reads=("elasticity.enabled", "rollout.min_replicas", "rollout.max_replicas", "rollout.replicas"),
            ok=lambda job: not job.elasticity.enabled or job.rollout.min_replicas < job.rollout.max_replicas,
            cel="!self.elasticity.enabled"
            " || (has(self.rollout.minReplicas) ? self.rollout.minReplicas : self.rollout.replicas > 0 ? 1 : 0)"
            " < (has(self.rollout.maxReplicas) ? self.rollout.maxReplicas"
            " : self.rollout.replicas > 0 ? self.rollout.replicas : 1)",
            why="minReplicas equals maxReplicas, so there is nothing to scale",
            fix="Set rollout.minReplicas < rollout.maxReplicas",
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
            ok=lambda job: job.schedule.require_batches <= 1 or job.schedule.required_lead <= job.schedule.ahead,
            cel=f"self.schedule.requireBatches <= 1 || double({STEPS_OUT_CEL}) <= {AHEAD_CEL}",
            why="so many batches are never complete: generation may not run so far ahead of the newest weights",
            fix="Set a divisor of syncEvery, or a larger maxStaleness and stalenessThreshold",
        ),
        Rule(
            reads=("weight_sync.stagger", "schedule.update"),
            ok=lambda job: job.weight_sync.stagger is None or job.schedule.update == "staggered",
            cel="!has(self.weightSync.stagger) || (has(self.schedule.update) && self.schedule.update == 'staggered')",
            why="stagger has an effect with update: staggered only",
            fix="Set schedule.update: staggered, or remove stagger",
        ),
        Rule(
            reads=("algorithm.old", "schedule.mode"),
            ok=lambda job: job.algorithm.old != "lagged" or job.schedule.mode == "periodic",
            cel="self.algorithm.old != 'lagged' || self.schedule.mode == 'periodic'",
            why="old: lagged is defined for the mode periodic only",
            fix="Set schedule.mode: periodic, or algorithm.old: behaviour",
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
            why="samples come from older weights, and old: recompute does not correct for them",
            fix="Set algorithm.correction, algorithm.old: behaviour, or schedule.mode: sync or periodic",
        ),
        Rule(
            reads=("algorithm.filter_zero_variance", "schedule.deterministic"),
            ok=lambda job: job.algorithm.filter_zero_variance != "drop" or not job.schedule.deterministic,
            cel="self.algorithm.filterZeroVariance != 'drop' || !self.schedule.deterministic",
            why="the prompts that replace dropped groups depend on arrival times, so the run is not deterministic",
            fix="Set filterZeroVariance: keep, or schedule.deterministic: false",
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
            fix="Set deterministic: false, the engine transformers, or the profile nvidia",
        ),
        Rule(
            reads=("algorithm.epochs", "algorithm.mini_batches", "schedule.mode"),
            ok=lambda job: job.schedule.mode != "periodic" or job.algorithm.epochs * job.algorithm.mini_batches == 1,
            cel="self.schedule.mode != 'periodic' || self.algorithm.epochs * self.algorithm.miniBatches == 1",
            why="the mode periodic trains samples as they arrive, but several updates need all samples of a step",
            fix="Set mode: sync or async, or leave epochs and miniBatches at 1",
        ),
        Rule(
            reads=("reference", "algorithm.kl.coefficient", "algorithm.name"),
            ok=lambda job: (
                job.reference is None or job.algorithm.kl.coefficient > 0 or job.algorithm.name in ("dpo", "ipo")
            ),
            cel="!has(self.reference) || self.algorithm.kl.coefficient > 0.0 || self.algorithm.name in ['dpo', 'ipo']",
            why="only DPO, IPO and the KL penalty use a reference model, and the KL coefficient is 0",
            fix="Set algorithm.kl.coefficient, or remove reference",
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
            why="trainer and critic write a checkpoint together, but ReadWriteOnce mounts the claim on one node",
            fix="Set storage.checkpoints.accessMode: ReadWriteMany, or remove critic.role",
        ),
        Rule(
            reads=("critic.warmup_steps", "algorithm.steps"),
            ok=lambda job: job.critic is None or job.critic.warmup_steps < job.algorithm.steps,
            cel="!has(self.critic) || self.critic.warmupSteps < self.algorithm.steps",
            why="the run ends before the policy is trained",
            fix="Set critic.warmupSteps < algorithm.steps",
        ),
    )
    frozen_fields: ClassVar[tuple[Frozen, ...]] = (
        Frozen(reads="model.source", why="checkpoints and published versions belong to the old model"),
        Frozen(reads="data.train.source", why="the ledger counts serials of the old data"),
        Frozen(reads="data.train.seed", why="the ledger counts serials of the old order"),
        Frozen(reads="environment", why="unfinished samples have the turns and columns of the old one"),
        Frozen(reads="schedule.mode", why="unfinished samples have versions of the old schedule"),
        Frozen(reads="schedule.update", why="unfinished samples have versions of the old schedule"),
        Frozen(reads="schedule.swap_at", why="unfinished samples have versions of the old schedule"),
        Frozen(reads="trainer.backend.name", why="checkpoints belong to the old backend"),
        Frozen(reads="trainer.external", why="checkpoints belong to the old trainer"),
        Frozen(reads="trainer.lora", why="checkpoints and published versions belong to the old adapters"),
        Frozen(reads="storage.ledger.sync", why="the guarantee holds for the whole ledger"),
        Frozen(reads="managed_by", why="two controllers would both manage the job"),
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

    def with_weights(self, section: JobWeightsSpec) -> RLJob:
        """Return this job with another section ``spec.weightSync``."""
        return self.model_copy(update={"spec": self.spec.model_copy(update={"weight_sync": section})})

    def folder(self, default: Path) -> Path:
        """Return the folder at which relative paths and modules start.

        default: the folder of the manifest, for a job without an annotation that names its folder.
        """
        return Path(self.metadata.annotations.get(FOLDER, default))
