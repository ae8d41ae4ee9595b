"""Settings that determine what is learned: model, data, algorithm, sampling, evaluation.

Invariants: no field in this module determines where or when a process runs. Two jobs with equal values of these fields
and with samples of the same versions compute the same gradients.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from asyncflow.api.base import (
    Frozen,
    Name,
    Options,
    PluginName,
    Rule,
    Seed,
    Source,
    Spec,
    Steps,
    Text,
    keyed_by,
)
from asyncflow.api.tasks import CriticRoleSpec

StopText = Annotated[str, StringConstraints(min_length=1, max_length=256)]
FILE_SCHEMES = ("jsonl", "parquet", "dataset")
"""Schemes of data sources that are files or folders: JSON lines, Parquet, and Hugging Face ``datasets`` on disk."""


class ModelSpec(Spec):
    """The model that is trained."""

    source: Source
    """Model source: ``tiny://NAME``, a Hugging Face folder, ``hf://ORG/NAME`` (local cache), ``pvc://CLAIM/PATH``."""


class TrainDataSpec(Spec):
    """Source and format of the training prompts."""

    source: Source
    """``gym://DATASET`` (reasoning-gym), ``tiny://TASK``, or a file: ``jsonl://PATH``, ``parquet://PATH`` (a file or a
    folder of files), ``dataset://PATH`` (written by ``save_to_disk`` of Hugging Face ``datasets``); for training also
    ``put://``: prompts that your own trainer process puts."""
    config: Options = Field(default_factory=dict)
    """Settings of the source. Generated tasks: their difficulty. Files: names of the fields ``prompt``, ``answer``,
    ``meta`` (a list; absent: all others), and ``split``: ``whole`` (all questions, the default) or ``hash`` (three
    quarters of the questions for training, the others for evaluation)."""
    seed: Seed = 0
    """Seed of the order, and of generated prompts."""
    template: Text | None = None
    """Text of a prompt, in which ``{question}`` is replaced. Absent: the question itself."""
    chat: bool = False
    """Apply the tokenizer's chat template."""
    system: Text | None = None
    """System message; needs ``chat``."""
    chat_options: Options | None = None
    """Variables of the chat template, such as ``enable_thinking: false`` or ``tools``. Absent in training: none; in
    evaluation: those of ``data.train``."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("system", "chat"),
            ok=lambda data: data.system is None or data.chat,
            cel="!has(self.system) || self.chat",
            why="only a chat has a system message",
            fix="Set chat: true, or put the text into template",
        ),
        Rule(
            reads=("template",),
            ok=lambda data: data.template is None or "{question}" in data.template,
            cel="!has(self.template) || self.template.contains('{question}')",
            why="the template does not contain the question",
            fix="Add {question} to it",
        ),
    )


class EvalDataSpec(TrainDataSpec):
    """Source and format of the held-out prompts, which never occur in training."""

    size: Annotated[int, Field(ge=1, le=1_000_000)] = 512
    """Number of held-out prompts in one evaluation."""


class EvalSetSpec(EvalDataSpec):
    """A named set of held-out prompts."""

    name: Name
    """Its name in results."""


class DataSpec(Spec):
    """Prompts for training and for evaluation."""

    train: TrainDataSpec
    """Training prompts."""
    eval: EvalDataSpec | None = None
    """Held-out prompts."""
    eval_sets: Annotated[tuple[EvalSetSpec, ...], Field(max_length=16, json_schema_extra=keyed_by("name"))] = ()
    """Further sets of held-out prompts, each with its own results. If ``eval`` is absent, the first is the main set,
    whose results have no name. ``evaluation`` needs ``eval`` or ``evalSets``."""
    max_task_bytes: Annotated[int, Field(ge=256, le=1 << 30)] = 16384
    """Most bytes of one task: question, answer and data of its checker; for a larger one see ``overlong``."""
    overlong: Literal["skip", "refuse"] = "skip"
    """Treatment of a prompt of more than ``sampling.maxPromptTokens`` or ``maxTaskBytes``. ``skip``: it is left out
    and counted; in training the next one takes its place. ``refuse``: the job ends with an error."""

    @property
    def held_out(self) -> dict[str, EvalDataSpec]:
        """The sets of held-out prompts by name, the main set first; ``eval`` has the name ""."""
        unnamed = {"": self.eval} if self.eval is not None else {}
        return {**unnamed, **{each.name: each for each in self.eval_sets}}

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("eval_sets",),
            ok=lambda data: len({each.name for each in data.eval_sets}) == len(data.eval_sets),
            cel="!has(self.evalSets) || self.evalSets.all(a, self.evalSets.exists_one(b, b.name == a.name))",
            why="two sets of held-out prompts have the same name",
            fix="Choose different names",
        ),
    )


class ClipSpec(Spec):
    """Clipping of the probability ratio to [1 - low, 1 + high]."""

    low: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Distance below 1 within which the ratio has a gradient."""
    high: Annotated[float, Field(ge=0, le=100)] = 0.28
    """Distance above 1 within which the ratio has a gradient (clip-higher if above ``low``)."""
    dual: Annotated[float, Field(gt=1, le=100)] | None = None
    """Bound c of dual clipping for negative advantages. Absent: off."""


class KlTargetSpec(Spec):
    """Adaptive coefficient: after each step it is multiplied by 1 + clip(KL / value - 1, ±0.2) / horizon."""

    value: Annotated[float, Field(gt=0, le=1000)]
    """Target of the KL from the reference, a mean over tokens."""
    horizon: Annotated[float, Field(ge=1, le=1e6)] = 10.0
    """Steps in which a KL far from the target changes the coefficient by about a fifth."""


class KlSpec(Spec):
    """Penalty for distance from the reference model."""

    coefficient: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Weight of the penalty; 0 needs no reference model."""
    estimator: Literal["k1", "k2", "k3", "k3+"] = "k3+"
    """Estimator of the divergence; ``k3+`` has the value of k3 and the gradient of k2."""
    place: Literal["loss", "reward"] = "loss"
    """``loss``: the penalty is a term of each token's loss. ``reward``: it is subtracted from each token's reward,
    under the old policy; training then starts when all samples of a step are complete."""
    target: KlTargetSpec | None = None
    """Adaptive coefficient, which starts at ``coefficient``. Absent: it is constant."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("estimator", "coefficient", "place"),
            ok=lambda kl: kl.coefficient == 0 or kl.estimator != "k1" or kl.place == "reward",
            cel="self.coefficient == 0.0 || self.estimator != 'k1' || self.place == 'reward'",
            why="the gradient of k1 has mean zero, so it is only noise in the loss",
            fix="Set estimator: k2 or k3+, place: reward, or coefficient: 0",
        ),
        Rule(
            reads=("target", "coefficient"),
            ok=lambda kl: kl.target is None or kl.coefficient > 0,
            cel="!has(self.target) || self.coefficient > 0.0",
            why="a coefficient of 0 stays 0 when it is adapted by a factor",
            fix="Set the initial coefficient, or remove target",
        ),
    )


class CorrectionSpec(Spec):
    """Importance weights, by which the policy loss is multiplied.

    The ratio of a token is its probability under the loss's old policy, divided by its probability under the sampler's.
    """

    kind: Literal["truncate", "mask"] = "truncate"
    """Treatment of a ratio outside the bounds. ``truncate``: it becomes the bound. ``mask``: its tokens add nothing to
    the loss, but count in its divisor. With ``old: behaviour``, whose loss has the ratio already, tokens are only
    masked, by the policy's probability divided by the sampler's."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio that is bounded and used as the weight: of each token, the product over a response, or its geometric
    mean."""
    low: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Least weight; 0: no bound."""
    high: Annotated[float, Field(ge=1, le=1e6)] = 2.0
    """Greatest weight (verl: ``rollout_is_threshold``)."""


_COMPARING = ("grpo", "gspo", "cispo", "dapo", "pf-ppo", "dpo", "ipo")
"""Algorithms that compare a sample with the other samples of its group."""


class AlgorithmSpec(Spec):
    """The learning algorithm. Step k takes promptsPerStep groups of groupSize samples."""

    name: PluginName = "grpo"
    """``grpo``, ``gspo``, ``cispo``, ``dapo``, ``reinforce-plus-plus``, ``ppo``, ``pf-ppo``, ``dpo``, ``ipo``, or an
    algorithm of another installed package."""
    options: Options = Field(default_factory=dict)
    """The algorithm's own options."""
    group_size: Annotated[int, Field(ge=1, le=4096)] = 8
    """Samples of one prompt."""
    prompts_per_step: Annotated[int, Field(ge=1, le=1_000_000)] = 16
    """Prompts of one optimizer step."""
    steps: Annotated[int, Field(ge=1, le=10_000_000)]
    """Steps of the run; each makes epochs * miniBatches optimizer updates and one version of the weights."""
    epochs: Annotated[int, Field(ge=1, le=1024)] = 1
    """Passes over the samples of a step (verl: ``ppo_epochs``)."""
    mini_batches: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Optimizer updates of one pass, of promptsPerStep / miniBatches groups each (verl: ``ppo_mini_batch_size``)."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 1e-6
    """Learning rate of AdamW after the warm-up."""
    warmup_steps: Steps = 0
    """Steps in which the learning rate rises from 0."""
    learning_rate_curve: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or falling to ``finalLearningRate`` at the last step."""
    final_learning_rate: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Learning rate of the last step, if the curve is not constant."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Decoupled weight decay of AdamW."""
    betas: Annotated[tuple[Annotated[float, Field(ge=0, lt=1)], ...], Field(min_length=2, max_length=2)] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Term of AdamW's denominator."""
    max_grad_norm: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """Norm to which the gradient is clipped; 0: off."""
    clip: ClipSpec = Field(default_factory=ClipSpec)
    """Clipping of the probability ratio."""
    aggregation: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"
    ] = "token-mean"
    """Aggregation of token losses into one loss; divisors are counts over the whole step and all ranks."""
    advantage: Literal["grpo", "dr-grpo", "rloo"] = "grpo"
    """Advantage within a group, for algorithms that have one: (R - mean) / std, R - mean, or leave-one-out."""
    credit: Literal["sample", "turn"] = "sample"
    """``sample``: one advantage for all turns of a sample. ``turn``: one for each turn, from its own and later
    rewards."""
    kl: KlSpec = Field(default_factory=KlSpec)
    """Penalty for distance from the reference model."""
    entropy: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Weight of the entropy bonus in the loss; 0: off."""
    old: Literal["behaviour", "recompute", "lagged"] = "behaviour"
    """Log-probs in the denominator of the ratio: of the sampler, of the trainer before the step, or of the weights one
    step before those (mode periodic). ``recompute`` needs ``correction`` if samples may be stale."""
    correction: CorrectionSpec | None = None
    """Correction for samples of another policy than ``old``; with ``old: recompute`` the decoupled objective of AReaL,
    and verl's rollout correction. Absent: none."""
    filter_zero_variance: Literal["keep", "drop"] = "keep"
    """Treatment of groups whose rewards are all equal; dropped groups are counted and replaced."""
    max_filtered_batches: Annotated[int, Field(ge=1, le=100_000)] = 10
    """Most groups that may be dropped for one optimizer step, in batches of ``promptsPerStep``; more end the job with
    an error (verl: ``max_num_gen_batches``)."""
    seed: Seed = 0
    """Seed of all random numbers: sampling is keyed by (seed, prompt, sample, position)."""

    @property
    def samples_per_step(self) -> int:
        """Samples of the groups of one step."""
        return self.prompts_per_step * self.group_size

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("group_size", "name"),
            ok=lambda algorithm: algorithm.name not in _COMPARING or algorithm.group_size >= 2,
            cel=f"!(self.name in {list(_COMPARING)}) || self.groupSize >= 2",
            why="the advantage is relative to the other samples of the group, but a group of 1 has none",
            fix="Set groupSize to at least 2",
        ),
        Rule(
            reads=("mini_batches", "prompts_per_step"),
            ok=lambda algorithm: algorithm.prompts_per_step % algorithm.mini_batches == 0,
            cel="self.promptsPerStep % self.miniBatches == 0",
            why="the groups of a step cannot be divided evenly",
            fix="Set a divisor of promptsPerStep",
        ),
        Rule(
            reads=("correction", "old"),
            ok=lambda algorithm: (
                algorithm.correction is None or algorithm.old != "behaviour" or algorithm.correction.kind == "mask"
            ),
            cel="!has(self.correction) || self.old != 'behaviour' || self.correction.kind == 'mask'",
            why="the ratio to the sampler's log-probs is already the importance weight and would count twice",
            fix="Set correction.kind: mask, or old: recompute",
        ),
        Rule(
            reads=("warmup_steps", "steps"),
            ok=lambda algorithm: algorithm.warmup_steps <= algorithm.steps,
            cel="self.warmupSteps <= self.steps",
            why="the warm-up is longer than the run",
            fix="Set warmupSteps <= steps",
        ),
        Rule(
            reads=("final_learning_rate", "learning_rate"),
            ok=lambda algorithm: algorithm.final_learning_rate <= algorithm.learning_rate,
            cel="self.finalLearningRate <= self.learningRate",
            why="the learning rate would rise after the warm-up",
            fix="Set finalLearningRate <= learningRate",
        ),
        Rule(
            reads=("final_learning_rate", "learning_rate_curve"),
            ok=lambda algorithm: algorithm.final_learning_rate == 0 or algorithm.learning_rate_curve != "constant",
            cel="self.finalLearningRate == 0.0 || self.learningRateCurve != 'constant'",
            why="with learningRateCurve: constant the learning rate does not fall",
            fix="Set learningRateCurve: linear or cosine, or remove finalLearningRate",
        ),
    )
    frozen_fields: ClassVar[tuple[Frozen, ...]] = (
        Frozen(reads="name", why="unfinished samples belong to the old algorithm"),
        Frozen(reads="group_size", why="the ledger counts samples by groups of the old size"),
        Frozen(reads="prompts_per_step", why="every prompt is assigned to a step by it"),
        Frozen(reads="seed", why="random numbers are keyed by it"),
    )


class CriticSpec(Spec):
    """The critic, a value model that is trained together with the policy by algorithms that have one.

    It starts from the model's weights and a last layer of zeros. AdamW trains it like the policy, but with a learning
    rate of its own, which follows the same curve as the policy's.
    """

    learning_rate: Annotated[float, Field(gt=0, le=10)] = 1e-5
    """Learning rate of AdamW after the warm-up of ``algorithm.warmupSteps``."""
    warmup_steps: Steps = 0
    """First steps of the run, which train the critic alone; each still makes a version, with unchanged weights."""
    role: CriticRoleSpec | None = None
    """The critic as a role of its own. Absent: it is part of the trainer, sharded over its ranks."""


class SamplingSpec(Spec):
    """Sampling of responses in training."""

    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Divisor of the logits, in the engine and in the trainer's log-probs."""
    max_tokens: Annotated[int, Field(ge=1, le=1_048_576)]
    """Most tokens of a response, of all turns and observations together."""
    max_prompt_tokens: Annotated[int, Field(ge=1, le=1_048_576)] = 512
    """Most tokens of a prompt, held out or not; for a longer one see ``data.overlong``."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus; 1: off."""
    top_k: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Number of most probable tokens to sample from; 0: off."""
    stop: Annotated[tuple[StopText, ...], Field(max_length=16)] = ()
    """Texts that end a response and remain in it: special tokens by name, other texts in any tokenization."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("top_p",),
            ok=lambda sampling: sampling.top_p == 1,
            cel="self.topP == 1.0",
            why="the trainer cannot recompute log-probs of a truncated distribution",
            fix="Leave topP at 1",
        ),
        Rule(
            reads=("top_k",),
            ok=lambda sampling: sampling.top_k == 0,
            cel="self.topK == 0",
            why="the trainer cannot recompute log-probs of a truncated distribution",
            fix="Leave topK at 0",
        ),
    )


class EvaluationSpec(Spec):
    """Evaluation of single versions on held-out prompts: of θ_0, of the last version, and at regular steps between."""

    every: Steps = 10
    """Optimizer steps between evaluations; 0: only the first and the last evaluation."""
    samples: Annotated[int, Field(ge=1, le=1024)] = 1
    """Samples of each prompt; accuracy is the share of samples that pass (an estimate of pass@1)."""
    pass_at: Annotated[tuple[Annotated[int, Field(ge=1, le=1024)], ...], Field(max_length=8)] = ()
    """Numbers k for which pass@k is estimated: the chance that at least one of k samples of a prompt passes."""
    pass_reward: Annotated[float, Field(ge=-1e9, le=1e9)] = 1.0
    """Least reward of a sample that passes."""
    greedy: bool = True
    """Also evaluate greedy decoding."""
    temperature: Annotated[float, Field(gt=0, le=10)] | None = None
    """Temperature of the samples. Absent: ``sampling.temperature``."""

    @property
    def group_size(self) -> int:
        """Samples of one held-out prompt, the greedy one included."""
        return self.samples + int(self.greedy)

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("pass_at", "samples"),
            ok=lambda evaluation: all(k <= evaluation.samples for k in evaluation.pass_at),
            cel="!has(self.passAt) || self.passAt.all(k, k <= self.samples)",
            why="pass@k cannot be estimated from fewer than k samples of a prompt",
            fix="Set samples to at least the largest k of passAt",
        ),
    )
