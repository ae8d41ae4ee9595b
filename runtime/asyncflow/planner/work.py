"""The work of a step: the number and lengths of the generated samples, and the trainer's computation on them.

Lengths are lognormal and limited to the maximum tokens of a response, as in the simulated engine. A manifest does not
contain the lengths of responses: without a measurement they are assumed, and the plan says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from statistics import NormalDist, fmean
from typing import Final

import msgspec

from asyncflow.algorithms.base import algorithm_of
from asyncflow.api.job import RLJobSpec
from asyncflow.planner.shapes import BYTES
from asyncflow.rollout.lengths import Lengths
from asyncflow.sim.scenario import engine_model

_NORMAL: Final = NormalDist()
_TYPICAL: Final = 0.25
"""Assumed median length of a response, and mean length of a prompt, as shares of their maximum numbers of tokens."""
_SIGMA: Final = 0.8
_POINTS: Final = 2048
_PACK: Final = 8192
_PACK_CPU: Final = 4096
"""Tokens of a micro-batch if the manifest does not set them; the second is the trainer's own default on the CPU."""


class Responses(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of response lengths, limited to ``most`` tokens, and its statistics."""

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
        """Mean response tokens of a running sequence: E[X ** 2] / (2 E[X]), because long sequences run longer."""
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
    """Return E[X] and E[X ** 2], from quantiles at equal steps of probability; accurate within 0.1 %."""
    points = [responses.quantile((point + 0.5) / _POINTS) for point in range(_POINTS)]
    return fmean(points), fmean(point * point for point in points)


class StepWork(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one step.

    prompts, group: prompts of a step, and samples of each; prompt: mean tokens of a prompt; longest: maximum tokens of
    a sample. shared: whether a group's prompt is trained once; passes: forward passes in addition to training's
    (reference, old policy, values); epochs, updates: passes over the samples, and optimizer updates of each; reference:
    whether the trainer holds a second model; critic: whether it trains a second one. lora: rank of the adapters that
    are trained in place of the weights, 0 for none. compute, holds: dtypes of a training pass, and of the trainer's
    weights; engine, published: dtypes of the engine, and of the weights that it loads. pack: tokens of a micro-batch.
    slots: maximum sequences of an instance, or of each of its data-parallel parts. recompute: whether
    layers are recomputed in the backward pass, None for either. megatron: whether the backend divides layers, matrices
    and experts over devices (tensor, pipeline and expert parallel) instead of only parameters (FSDP); wide: whether the
    engine divides experts over devices that are otherwise data-parallel (vLLM's ``enable_expert_parallel``).
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
    lora: int = 0
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
        """Tokens generated for a step."""
        return self.samples * self.responses.mean

    @property
    def trained(self) -> float:
        """Tokens of a step in the trainer: responses, and prompts once per sample, or once per group if shared."""
        return (self.prompts if self.shared else self.samples) * self.prompt + self.generated

    @property
    def context(self) -> float:
        """Mean tokens to which a running sequence of the engine attends."""
        return self.prompt + self.responses.resident

    @property
    def attended(self) -> float:
        """Mean tokens to which a token of the trainer attends: half of its sequence, weighted by sequence length."""
        prompts = self.trained - self.generated
        return (prompts * self.prompt / 2 + self.generated * self.context) / self.trained

    @property
    def published_bytes(self) -> int:
        """Bytes of a parameter that an engine loads."""
        return BYTES[self.published]


def work_of(spec: RLJobSpec, *, lengths: Lengths | None = None, prompt: float | None = None) -> StepWork:
    """Return the work of a step of a job.

    lengths, prompt: of responses, and mean tokens of a prompt, if known. Otherwise they are a quarter of the manifest's
    maximum, lengths with a sigma of 0.8.
    """
    algorithm, backend, sampling = spec.algorithm, spec.trainer.backend, spec.sampling
    options, lora = backend.options, spec.trainer.lora
    compares = algorithm.kl.coefficient > 0 or algorithm.name in ("dpo", "ipo")
    reference_in_trainer = compares and spec.reference is None
    updates = algorithm.epochs * algorithm.mini_batches
    old = algorithm.old == "lagged" or (algorithm.old == "recompute" and updates > 1)
    critic_in_trainer = algorithm_of(spec).critic and (spec.critic is None or spec.critic.role is None)
    is_16_bit = backend.precision != "float32"
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
        passes=int(reference_in_trainer) + int(old) + int(critic_in_trainer),
        epochs=algorithm.epochs,
        updates=algorithm.mini_batches,
        reference=reference_in_trainer and lora is None,
        critic=critic_in_trainer,
        lora=lora.rank if lora is not None else 0,
        compute="bfloat16" if is_16_bit else "float32",
        holds="bfloat16" if backend.precision == "bf16-stochastic" else "float32",
        engine=spec.rollout.engine.dtype,
        published=spec.published_dtype,
        recompute=checkpointing if isinstance(checkpointing, bool) else None,
        megatron=backend.name not in ("torch", "counting"),
        wide=engine_arguments(spec).get("enable_expert_parallel") is True,
    )


def engine_arguments(spec: RLJobSpec) -> Mapping[str, object]:
    """Return the ``vllm serve`` arguments of a job's engine, by name with underscores; empty for other engines.

    The runtime's own engine, whose instance is one process, does not support all of them: some only describe how vLLM
    divides an instance.
    """
    args = spec.rollout.engine.options.get("args")
    return {name.replace("-", "_"): value for name, value in args.items()} if isinstance(args, Mapping) else {}


def assumed_lengths(spec: RLJobSpec) -> Lengths:
    """Return assumed lengths of responses: those of the simulated engine's options, or default ones."""
    engine = spec.rollout.engine
    if engine.name == "simulated":
        return engine_model(engine.options, slots=engine.slots).lengths
    return Lengths(tokens=max(1.0, _TYPICAL * spec.sampling.max_tokens), sigma=_SIGMA)
