"""A plan as tables, and as plain values for JSON.

Invariant: every figure in a table is also in the plain values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from asyncflow.api.job import RLJobSpec
from asyncflow.api.placement import PROFILES
from asyncflow.plan.describe import TextTable
from asyncflow.planner.advice import limiter, seconds_text
from asyncflow.planner.devices import FIGURES, Device
from asyncflow.planner.layouts import gigabytes
from asyncflow.planner.schedules import changes, described
from asyncflow.planner.search import Candidate, Ranked, SplitProblem, processes_of
from asyncflow.planner.work import engine_arguments

_COLUMNS: Final = (
    "generation",
    "training",
    "step",
    "tokens/s/device",
    "idle: generation",
    "trainer",
    "GB a device: generation",
    "trainer",
    "limited by",
)


def splits_table(problem: SplitProblem, choices: Sequence[Candidate], *, title: str) -> TextTable:
    """Return a table with one row per split."""
    return TextTable(title=title, columns=_COLUMNS, rows=tuple(_row(problem, each) for each in choices))


def schedules_table(problem: SplitProblem, choices: Sequence[Candidate], *, own: Candidate) -> TextTable:
    """Return a table with the best split of each schedule, compared with the job's own split ``own``."""
    rows = tuple(
        (
            described(each.schedule) + (" (the job's)" if each.schedule == own.schedule else ""),
            f"{own.step_s / each.step_s:.2f}x",
            *_row(problem, each),
        )
        for each in choices
    )
    return TextTable(title="Schedules, with the best split of each", columns=("schedule", "", *_COLUMNS), rows=rows)


def _row(problem: SplitProblem, choice: Candidate) -> tuple[str, ...]:
    split, outcome = choice.split, choice.outcome
    layout = str(split.trainer.layout) + (", recomputing" if split.trainer.layout.recompute else "")
    return (
        split.generates,
        f"{split.trainer.devices} ({layout})",
        seconds_text(choice.step_s),
        f"{tokens_a_device(problem, choice):,.0f}",
        f"{outcome.generation_idle:.0%}",
        f"{outcome.training_idle:.0%}",
        gigabytes(split.engine.bytes).removesuffix(" GB"),
        gigabytes(split.trainer.memory.bytes).removesuffix(" GB"),
        limiter(problem, choice),
    )


def tokens_a_device(problem: SplitProblem, choice: Candidate) -> float:
    """Return the trained tokens of prompts and responses per second and device (TPSPD of the papers)."""
    work = problem.work
    return (work.samples * work.prompt + work.generated) / choice.step_s / problem.devices


def basis(problem: SplitProblem, *, measured: str, lengths: str) -> list[str]:
    """Return the basis of a plan as lines: model, step, device, and which figures are assumed.

    measured: name of the probe, "" if there is none; lengths: their source.
    """
    shape, device, work = problem.shape, problem.device, problem.work
    responses = work.responses
    experts = f", {_count(shape.used)} for a token" if shape.experts else ""
    cache = shape.cache(dtype=work.engine) / 1024
    lines = [
        f"model     {shape.name}: {_count(shape.parameters)} parameters{experts}, {cache:.0f} KiB of cache a token",
        (
            f"step      {work.prompts} prompts x {work.group}, of {work.prompt:,.0f} tokens each; responses of "
            f"{responses.mean:,.0f} tokens on average, at most {responses.most:,} ({lengths})"
        ),
        (
            f"device    {device.name}: {gigabytes(device.memory)}, {device.flops(work.compute) / 1e12:.3g} TFLOP/s, "
            f"{gigabytes(device.bandwidth)}/s, {device.node} a node, {gigabytes(device.link)}/s inside, "
            f"{gigabytes(device.network)}/s between"
        ),
    ]
    if measured:
        return [*lines, f"measured  by {measured}; other layouts in proportion"]
    return [*lines, f"assumed   {_assumed(device)}: a probe replaces them (--probe)"]


def _count(number: int) -> str:
    return f"{number / 1e9:.3g} B" if number >= 1e8 else f"{number / 1e6:.3g} M"


def _assumed(device: Device) -> str:
    names = [name for name in FIGURES if device.source(name).startswith("assumed")]
    return ", ".join(f"{name} {getattr(device, name):.3g}" for name in names) or "nothing"


def settings(problem: SplitProblem, best: Candidate, *, spec: RLJobSpec) -> list[str]:
    """Return the ``--set`` arguments that apply a choice to a job."""
    split, device = best.split, problem.device
    instance, layout = split.engine.layout, split.trainer.layout
    facts = PROFILES[device.profile]
    on_cpu = device.profile == "cpu"
    ranks = split.trainer.devices
    replicas, count = (ranks, 0) if on_cpu else processes_of(ranks, device=device, legal=facts.gang_counts)
    each = min(instance.devices, device.node)
    rollouts = split.generating // each
    values = [
        f"rollout.replicas={rollouts}",
        f"rollout.maxReplicas={rollouts}",
        f"rollout.engine.slots={split.engine.slots // instance.dp}",
        f"trainer.replicas={replicas}",
    ]
    if not on_cpu:
        values += [f"rollout.accelerator.count={each}", f"trainer.accelerator.count={count}"]
    if instance.dp > 1 or "data_parallel_size" in engine_arguments(spec):
        parts = {"tensor_parallel_size": instance.tp, "data_parallel_size": instance.dp}
        values += [f"rollout.engine.options.args.{name}={number}" for name, number in parts.items()]
    if problem.work.megatron:
        values += [
            f"trainer.backend.options.tensor_parallel={layout.tp}",
            f"trainer.backend.options.pipeline_parallel={layout.pp}",
        ]
        if problem.shape.experts:
            values.append(f"trainer.backend.options.expert_parallel={layout.ep}")
    elif problem.work.recompute is None and layout.recompute:
        values.append("trainer.backend.options.gradient_checkpointing=true")
    return [*values, *changes(spec, best.schedule)]


def unmet(choice: Candidate) -> str:
    """Return a sentence about the feature that the runtime lacks for a choice, "" if it lacks none."""
    layout = choice.split.engine.layout
    if layout.dp == 1:
        return ""
    return (
        f"this version has no engine with data-parallel parts: it cannot run {layout}, and `asyncflow validate` "
        "refuses rollout.engine.options.args.data_parallel_size"
    )


def plain(problem: SplitProblem, choice: Candidate) -> dict[str, Any]:
    """Return a choice as values for JSON: seconds, bytes, shares, devices."""
    split, layout, outcome, bound = choice.split, choice.split.trainer.layout, choice.outcome, choice.bound
    return {
        "schedule": choice.schedule.model_dump(by_alias=True, mode="json", exclude_none=True),
        "generation": {
            "devices": split.generating,
            "instances": split.instances,
            "tensor_parallel": split.engine.layout.tp,
            "data_parallel": split.engine.layout.dp,
            "expert_parallel": split.engine.layout.ep,
            "slots": split.engine.slots,
            "slots_that_fit": split.engine.fitting,
            "token_s": split.engine.token_s,
            "share_s": split.engine.share_s,
            "step_s": bound.generation_s,
            "idle": outcome.generation_idle,
            "bytes": split.engine.bytes,
        },
        "training": {
            "devices": split.trainer.devices,
            "data_parallel": layout.dp,
            "tensor_parallel": layout.tp,
            "pipeline_parallel": layout.pp,
            "expert_parallel": layout.ep,
            "recompute": layout.recompute,
            "step_s": bound.training_s,
            "idle": outcome.training_idle,
            "bytes": split.trainer.memory.bytes,
        },
        "step_s": choice.step_s,
        "bound_s": bound.step_s,
        "tokens_per_second_and_device": tokens_a_device(problem, choice),
        "limited_by": limiter(problem, choice),
    }


def summary(ranked: Ranked) -> str:
    """Return the extent of a search in one line."""
    certain = "no other can be better" if ranked.proven else "the others are expected to be slower"
    return f"{ranked.tried} simulations, {ranked.possible} divisions that fit; {certain}"
