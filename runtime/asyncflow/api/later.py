"""Features that the API names and this version does not implement.

Invariant: whoever makes one of these work deletes its line here; until then ``validate`` refuses it with "not yet".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

from asyncflow.api.base import Spec
from asyncflow.api.paths import place_of
from asyncflow.api.placement import AUTO
from asyncflow.api.problems import Problem


@dataclass(frozen=True)
class _Later:
    """The attribute at ``path`` must not be ``planned``, where ``when`` holds; ``instead`` is what works now."""

    path: str
    planned: Callable[[Any], bool]
    instead: str
    when: Callable[[Any], bool] | None = None


def _is(*values: object) -> Callable[[Any], bool]:
    return lambda value: value in values


def _given(value: object) -> bool:
    return value is not None


def _several(value: int) -> bool:
    return value > 1


def _not_cpu(profile: str) -> bool:
    return profile not in ("cpu", AUTO)


ON_CPU: Final = ("transformers", "simulated", "counting")
"""Engines and back ends that compute on the CPU only."""

_PLANNED: dict[str, tuple[_Later, ...]] = {
    "RLJob": (
        _Later(
            "model.dtype",
            _given,
            "weightSync.dtype for what is published, trainer.backend.precision for the computation",
        ),
        _Later("algorithm.name", _is("ppo", "dapo", "pf-ppo", "dpo"), "grpo"),
        _Later("algorithm.old", _is("lagged"), "behaviour or recompute"),
        _Later(
            "algorithm.old",
            _is("recompute"),
            "behaviour, where samples are of older weights: without a correction for them the ratio would be 1 for all",
            when=lambda spec: spec.schedule.lag > 0,
        ),
        _Later("schedule.update", _is("staggered"), "sync or delayed"),
        _Later("schedule.swap_at", _is("token"), "quota or sequence"),
        _Later("schedule.sync_every", _several, "1", when=lambda spec: spec.schedule.swap_at == "quota"),
        _Later("schedule.require_batches", _several, "0 or 1"),
        _Later("trainer.backend.name", _is("mindspeed", "simulated"), "torch or counting"),
        _Later("reference", _given, "nothing: the trainer computes the reference itself"),
        _Later("critic", _given, "nothing"),
        _Later("transfer_queue.name", _given, "nothing: the job makes its own queue"),
        _Later("weight_sync.transport", _is("mooncake", "nccl", "hccl"), "host"),
        _Later("weight_sync.name", _given, "nothing: the job keeps its own versions"),
        _Later("reward.config", bool, "nothing: a function is given response, prompt, answer and meta"),
        _Later(
            "rollout.accelerator.profile",
            _not_cpu,
            "cpu: the engine computes on the CPU",
            when=lambda spec: spec.rollout.engine.name in ON_CPU,
        ),
        _Later(
            "trainer.accelerator.profile",
            _not_cpu,
            "cpu: the back end counts on the CPU",
            when=lambda spec: spec.trainer.backend.name in ON_CPU,
        ),
        _Later("schedule.update", _is("sync"), "delayed", when=lambda spec: spec.schedule.mode == "async"),
        _Later(
            "schedule.deterministic",
            bool,
            "false, or the engine transformers: vLLM has batch-invariant kernels on NVIDIA GPUs only",
            when=lambda spec: spec.rollout.engine.name == "vllm" and spec.rollout.accelerator.profile != "nvidia",
        ),
        _Later("algorithm.filter_zero_variance", _is("drop"), "keep", when=lambda spec: spec.schedule.deterministic),
        _Later("reward.on_timeout", _is("drop"), "zero", when=lambda spec: spec.schedule.deterministic),
    ),
    "TransferQueue": (),
    "WeightSync": (_Later("transport", _is("mooncake", "nccl", "hccl"), "host"),),
}


def all_planned(kind: str) -> list[tuple[str, str]]:
    """Return everything that objects of ``kind`` can ask for and that may not work yet: path, and what works now."""
    return [(".".join(("spec", *place_of(later.path))), later.instead) for later in _PLANNED[kind]]


def planned(kind: str, spec: Spec) -> Iterator[Problem]:
    """Yield a problem for everything that ``spec`` of an object of ``kind`` asks for and that does not work yet."""
    for later in _PLANNED[kind]:
        value = attrgetter(later.path)(spec)
        if later.planned(value) and (later.when is None or later.when(spec)):
            yield Problem(
                place=("spec", *place_of(later.path)),
                value=value.model_dump(exclude_defaults=True) if isinstance(value, Spec) else value,
                reason="not yet: it is planned, and this version does not do it",
                fix=f"What works is {later.instead}",
                later=True,
            )
