"""The work of a step: how many samples of which lengths are generated, and what the trainer computes of them.

Lengths are lognormal and cut at the most tokens of a response, as in the simulated engine. A manifest does not say how
long responses are: what is not measured is assumed, and the plan says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from statistics import NormalDist, fmean
from typing import Final

import msgspec

from asyncflow.api.job import RLJobSpec
from asyncflow.planner.shapes import BYTES
from asyncflow.rollout.lengths import Lengths
from asyncflow.sim.scenario import engine_model

_NORMAL: Final = NormalDist()
_TYPICAL: Final = 0.25
"""Assumed median length of a response, and mean length of a prompt, as parts of the most tokens that they may have."""
_SIGMA: Final = 0.8
_POINTS: Final = 2048
_PACK: Final = 8192
_PACK_CPU: Final = 4096
"""Tokens of a micro-batch where a manifest leaves them to the trainer; the second is the trainer's own on the CPU."""


class Responses(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths of responses as they are drawn, cut at ``most`` tokens, and their statistics."""

    lengths: Lengths
    most: int

    def quantile(self, share: float) -> float:
        """Return the length that ``share`` of the responses do not exceed."""
        lengths = self.lengths
        if lengths.quantiles:
            place = share * (len(lengths.quantiles) - 1)
            low = min(int(place), len(lengths.quantiles) - 2) if len(lengths.quantiles) > 1 else 0
            high = min(low + 1, len(lengths.quantiles) - 1)
            length = lengths.quantiles[low] + (place - low) * (lengths.quantiles[high] - lengths.quantiles[low])
        else:
            length = (lengths.tokens or self.most) * math.exp(lengths.sigma * _NORMAL.inv_cdf(share))
        return min(float(self.most), max(1.0, length))

    @property
    def mean(self) -> float:
        """Mean length, tokens."""
        return _mean_and_square(self)[0]

    @property
    def resident(self) -> float:
        """Mean tokens that a running sequence has of its response: E[X ** 2] / (2 E[X]), as long ones run longer."""
        mean, square = _mean_and_square(self)
        return square / (2 * mean)

    @property
    def variation(self) -> float:
        """Standard deviation of the length, divided by its mean."""
        mean, square = _mean_and_square(self)
        return math.sqrt(max(0.0, square / mean**2 - 1))

    def longest(self, samples: float) -> float:
        """Return the typical length of the longest of ``samples``: the quantile of samples / (samples + 1)."""
        return self.quantile(samples / (samples + 1))


@lru_cache(maxsize=256)
def _mean_and_square(responses: Responses) -> tuple[float, float]:
    """Return E[X] and E[X ** 2], over lengths at equal steps of probability: right within 0.1 %."""
    points = [responses.quantile((point + 0.5) / _POINTS) for point in range(_POINTS)]
    return fmean(points), fmean(point * point for point in points)


class StepWork(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one step.

    prompts, group: prompts of a step, and samples of each; prompt: mean tokens of a prompt; longest: most tokens of a
    sample. shared: a group's prompt is trained once; passes: forward passes beside that of training (reference, old
    policy); epochs, updates: passes over the samples, and optimizer updates of each; reference: the trainer holds a
    second model; critic: the trainer trains a second one. compute, holds: dtype of a training pass, and of the
    trainer's weights; engine, published: dtypes of the engine and of what travels. pack: tokens of a micro-batch.
    slots: most sequences of an instance, of each of its data-parallel parts. megatron: the back end divides layers,
    matrices and experts over devices (tensor, pipeline and expert parallel), else parameters alone (FSDP); wide: the
    engine divides experts over devices that are data-parallel in the rest (vLLM's ``enable_expert_parallel``).
    """

    prompts: int
    group: int
    prompt: float
    longest: int
    responses: Responses
    pack: int
    slots: int
    shared: bool = False
    passes: int = 0
    epochs: int = 1
    updates: int = 1
    reference: bool = False
    critic: bool = False
    compute: str = "bfloat16"
    holds: str = "float32"
    engine: str = "bfloat16"
    published: str = "bfloat16"
    recompute: bool | None = None
    megatron: bool = False
    wide: bool = False

    @property
    def samples(self) -> int:
        """Samples of a step."""
        return self.prompts * self.group

    @property
    def generated(self) -> float:
        """Tokens that are generated for a step."""
        return self.samples * self.responses.mean

    @property
    def trained(self) -> float:
        """Tokens of a step in the trainer: prompts, once for each sample or once for each group, and responses."""
        return (self.prompts if self.shared else self.samples) * self.prompt + self.generated

    @property
    def context(self) -> float:
        """Mean tokens to which a running sequence of the engine attends."""
        return self.prompt + self.responses.resident

    @property
    def published_bytes(self) -> int:
        """Bytes of a parameter on its way to the rollouts."""
        return BYTES[self.published]


def work_of(spec: RLJobSpec, *, lengths: Lengths | None = None, prompt: float | None = None) -> StepWork:
    """Return the work of a step of a job.

    lengths, prompt: of responses, and mean tokens of a prompt, where they are known; else a quarter of the most that
    the manifest allows, lengths with a sigma of 0.8.
    """
    algorithm, backend, sampling = spec.algorithm, spec.trainer.backend, spec.sampling
    options = backend.options
    compares = algorithm.kl.coefficient > 0 or algorithm.name in ("dpo", "ipo")
    inside = compares and spec.reference is None
    updates = algorithm.epochs * algorithm.mini_batches
    old = algorithm.old == "lagged" or (algorithm.old == "recompute" and updates > 1)
    narrow = backend.precision != "float32"
    usual_pack = _PACK_CPU if spec.trainer.accelerator.profile == "cpu" else _PACK
    checkpointing = options.get("gradient_checkpointing")
    return StepWork(
        prompts=algorithm.prompts_per_step,
        group=algorithm.group_size,
        prompt=prompt if prompt is not None else max(1.0, _TYPICAL * sampling.max_prompt_tokens),
        longest=spec.longest,
        responses=Responses(lengths=lengths or assumed_lengths(spec), most=sampling.max_tokens),
        pack=backend.tokens_per_micro_batch or max(usual_pack, spec.longest),
        slots=spec.rollout.engine.slots,
        shared=backend.packing == "shared-prompt",
        passes=int(inside) + int(old),
        epochs=algorithm.epochs,
        updates=algorithm.mini_batches,
        reference=inside,
        critic=algorithm.name == "ppo",
        compute="bfloat16" if narrow else "float32",
        holds="bfloat16" if backend.precision == "bf16-stochastic" else "float32",
        engine=spec.rollout.engine.dtype,
        published=spec.published_dtype,
        recompute=checkpointing if isinstance(checkpointing, bool) else None,
        megatron=backend.name not in ("torch", "counting"),
        wide=engine_arguments(spec).get("enable_expert_parallel") is True,
    )


def engine_arguments(spec: RLJobSpec) -> Mapping[str, object]:
    """Return the arguments of ``vllm serve`` that a job gives its engine, by name with underscores; empty for others'.

    Some of them are not for the runtime's engine, whose instance is one process; they say how vLLM divides an instance.
    """
    given = spec.rollout.engine.options.get("args")
    return {name.replace("-", "_"): value for name, value in given.items()} if isinstance(given, Mapping) else {}


def assumed_lengths(spec: RLJobSpec) -> Lengths:
    """Return lengths of responses for want of measured ones: those of the simulated engine, or usual ones."""
    engine = spec.rollout.engine
    if engine.name == "simulated":
        return engine_model(engine.options, slots=engine.slots).lengths
    return Lengths(tokens=max(1.0, _TYPICAL * spec.sampling.max_tokens), sigma=_SIGMA)
