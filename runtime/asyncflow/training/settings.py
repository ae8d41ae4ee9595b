"""Settings of training, in the trainer's own terms; the trainer's role fills them from the manifest.

Invariant: the learning rate of step k is a function of k and of these settings alone, so that a resumed run continues
on the same curve.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from asyncflow.algorithms.loss import Loss
from asyncflow.api.workers import LoraSpec
from asyncflow.flow.schedule import Schedule
from asyncflow.training.packing import LayoutName

WeightsDtype = Literal["float32", "bfloat16"]
"""The dtypes in which a backend holds weights, and to which it rounds them when they leave it."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW and its learning rate.

    The rate rises linearly over ``warmup_steps``, then stays (``constant``) or falls to ``final_fraction`` of itself at
    step ``steps`` (``linear``, ``cosine``). Weight decay acts on matrices only, not on biases and norms.
    ``max_grad_norm`` 0 is no clipping.
    """

    learning_rate: float
    steps: int
    warmup_steps: int = 0
    curve: Literal["constant", "linear", "cosine"] = "constant"
    final_fraction: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    def rate(self, step: int) -> float:
        """Return the learning rate of optimizer step ``step`` >= 1."""
        if step <= self.warmup_steps:
            return self.learning_rate * step / self.warmup_steps
        if self.curve == "constant":
            return self.learning_rate
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        left = 1 - progress if self.curve == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.learning_rate * (self.final_fraction + (1 - self.final_fraction) * left)


@dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """Settings of a critic. warmup_steps: first steps, which train it alone."""

    optimizer: OptimizerSettings
    warmup_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class BackendSettings:
    """Settings of a backend.

    critic: the model beside the policy of an algorithm that has one; lora: adapters to train in place of the weights,
    None for all weights; temperature: of the sampling that made the responses, applied to the trainer's logits too;
    compute: dtype of forward and backward; weights: dtype in which weights are held (bfloat16: each update is rounded
    stochastically; moments and the sum of gradients are always float32); layout: see ``packing``; pack_tokens: most
    tokens of a rank's part of a slot, which is computed as one pack (None: the backend's choice); longest: most tokens
    of one sample (None: not known); threads: of this rank, 0 = the library's choice; group_size: samples of one prompt;
    device: torch's name of the kind of device; local_rank: which of the devices that this process sees is its own;
    share: part of its memory that this rank may use; host: the address at which other ranks reach this one;
    deterministic: the same bits again on an accelerator too, which costs speed (the CPU gives them always);
    reference_given: whether batches bring the reference's log-probs, so that no reference model is held here; options:
    the backend's own.
    """

    optimizer: OptimizerSettings
    loss: Loss = field(default_factory=Loss)
    critic: CriticSettings | None = None
    lora: LoraSpec | None = None
    temperature: float = 1.0
    compute: Literal["float32", "bfloat16"] = "float32"
    weights: WeightsDtype = "float32"
    layout: LayoutName = "separate"
    pack_tokens: int | None = None
    longest: int | None = None
    threads: int = 0
    group_size: int = 1
    seed: int = 0
    device: str = "cpu"
    local_rank: int = 0
    share: float = 1.0
    host: str = "127.0.0.1"
    deterministic: bool = False
    reference_given: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def longest_part(self) -> int:
        """Most tokens that are computed together: those of a sample, or of a pair; 0 where that is not known."""
        return (self.longest or 0) * (2 if self.loss.algorithm.pairs else 1)

    @property
    def needs_initial_weights(self) -> bool:
        """True where θ_0 is read at every start, also beside a checkpoint: as the reference, or under adapters."""
        return (self.loss.references and not self.reference_given) or self.lora is not None


# Beside the backend it could not be checked without importing torch.
class TorchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the backend ``torch``.

    head_tokens: most tokens of a pack whose logits exist at once; gradient_checkpointing: compute the layers again in
    the backward pass instead of keeping what they computed; compile: compile the layers with torch.compile, which takes
    minutes once; collective_timeout_s: how long a rank waits for the others in a collective.
    """

    head_tokens: Annotated[int, msgspec.Meta(ge=1)] = 2048
    gradient_checkpointing: bool = False
    compile: bool = False
    collective_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """Settings of the training loops.

    schedule: how many steps, which of them are published, and which versions later steps need; partition: the job's
    rows; attempt: of this gang, which fences older ones; whole: collect all of D_k before the first gradient (the
    synchronous loop); epochs, mini_batches: passes over D_k, and optimizer updates of each; published: what weights are
    rounded to when they are published; checkpoint_every: steps between checkpoints, 0 = the last one only;
    checkpoint_evaluated: whether versions that are evaluated have one too; decided: column that the driver writes, see
    ``Algorithm.writes``; extra_columns: fetched beside the usual ones (``loss_mask``, what other tasks wrote);
    patience_s: how long the queue or the driver may be away; leave_s: how long the ledger may take to be on disk once
    the trainer is leaving.
    """

    schedule: Schedule
    partition: str
    attempt: int
    whole: bool = False
    epochs: int = 1
    mini_batches: int = 1
    published: WeightsDtype = "float32"
    checkpoint_every: int = 10
    checkpoint_evaluated: bool = False
    decided: str = "advantage"
    extra_columns: tuple[str, ...] = ()
    patience_s: float = 120.0
    leave_s: float = 2.0
