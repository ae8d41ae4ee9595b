"""Settings of training, in the trainer's terms; the trainer's role fills them from the manifest.

Invariant: the learning rate of step k is a function of k and of these settings alone, so a resumed run continues on the
same curve.
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
"""Dtypes in which a backend can hold weights, and to which it can round published weights."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW and its learning rate.

    The rate rises linearly over ``warmup_steps``, then stays (``constant``) or falls to ``final_fraction`` of its peak
    at step ``steps`` (``linear``, ``cosine``). Weight decay applies to matrices only, not to biases and norms.
    ``max_grad_norm`` 0 disables clipping.
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
    """Settings of a critic. warmup_steps: number of first steps that train only the critic."""

    optimizer: OptimizerSettings
    warmup_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class BackendSettings:
    """Settings of a backend.

    critic: the critic's settings if the algorithm has one.
    lora: adapters to train in place of the weights, None to train all weights.
    temperature: sampling temperature of the responses, applied to the trainer's logits too.
    compute: dtype of forward and backward.
    weights: dtype in which weights are held. In bfloat16 each update is rounded stochastically; moments and accumulated
        gradients are always float32.
    layout: see ``packing``.
    pack_tokens: most tokens of a rank's part of a slot, computed as one pack; None: the backend chooses.
    longest: most tokens of one sample, None if unknown.
    threads: CPU threads of this rank, 0 for the library's default.
    group_size: samples of one prompt.
    device: torch's device type.
    local_rank: index of this rank's device among the devices that the process sees.
    share: fraction of the device memory that this rank may use.
    host: address at which other ranks reach this one.
    deterministic: whether an accelerator produces the same bits in each run, at a loss of speed; the CPU always does.
    reference_given: whether batches contain the reference's log-probs, so that no reference model is loaded here.
    options: the backend's own options.
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
        """Most tokens that are computed together: those of a sample, or of a pair; 0 if unknown."""
        return (self.longest or 0) * (2 if self.loss.algorithm.pairs else 1)

    @property
    def needs_initial_weights(self) -> bool:
        """True if θ_0 is read at every start, even with a checkpoint: as the reference, or as the base of adapters."""
        return (self.loss.references and not self.reference_given) or self.lora is not None


# This class is in this module, not next to the backend, so that options are checked without importing torch.
class TorchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the backend ``torch``.

    head_tokens: most tokens of a pack whose logits exist at the same time; gradient_checkpointing: recompute the layers
    in the backward pass instead of storing their activations; compile: compile the layers with torch.compile, which
    takes minutes once; collective_timeout_s: time that a rank waits for the other ranks in a collective.
    """

    head_tokens: Annotated[int, msgspec.Meta(ge=1)] = 2048
    gradient_checkpointing: bool = False
    compile: bool = False
    collective_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """Settings of the training loops.

    schedule: number of steps, which of them are published, and which versions later steps need.
    partition: the job's partition of the queue.
    attempt: attempt of this gang, which fences older attempts.
    whole: collect all of D_k before the first gradient (the synchronous loop).
    epochs, mini_batches: passes over D_k, and optimizer updates per pass.
    published: dtype to which published weights are rounded.
    checkpoint_every: steps between checkpoints, 0 for only the last step.
    checkpoint_evaluated: whether evaluated versions have a checkpoint too.
    decided: column that the driver writes, see ``Algorithm.writes``.
    extra_columns: columns to fetch in addition to the usual ones (``loss_mask``, columns of other tasks).
    patience_s: time for which the queue or the driver may be unreachable.
    leave_s: time that the ledger may take to reach the disk after the trainer has begun to leave.
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
