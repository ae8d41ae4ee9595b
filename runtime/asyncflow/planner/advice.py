"""Advice in one sentence: the bottleneck of a step, the number of devices to move, and the gain.

verl compares two idle ratios and moves devices from the side that waits to the side that it waits for. In the same
model the work of a side is its busy seconds times its devices. N devices are in balance if both sides take equally
long, that is if N W_train / (W_generate + W_train) of them train.
"""

from __future__ import annotations

from typing import Final

from asyncflow.planner.layouts import EnginePlan, TrainerPlan
from asyncflow.planner.search import Candidate, SplitProblem

_SAME: Final = 0.02
"""Relative difference below which two times count as equal."""
_IDLE: Final = 0.1
"""Idle share below which a side counts as busy."""
_WAITS: Final = 0.2
"""Idle share of both sides above which neither of them is the bottleneck."""
_LONG: Final = 0.25
"""Share of a step above which its longest response is reported."""
_MORE: Final = 0.25
"""Relative excess of a side's busy time over its bound above which the side is not fully used."""


def balance(choice: Candidate, *, devices: int) -> int:
    """Return the number of ``devices`` that must train so that both sides take equally long."""
    seconds = busy_seconds(choice)
    generates, trains = seconds[0] * choice.split.generating, seconds[1] * choice.split.trainer.devices
    return min(devices - 1, max(1, round(devices * trains / (generates + trains))))


def limiter(problem: SplitProblem, choice: Candidate) -> str:
    """Return the bottleneck of a choice: the busy side with its largest cost, or the reason why both sides wait."""
    outcome, bound = choice.outcome, choice.bound
    if min(outcome.generation_idle, outcome.training_idle) > _WAITS:
        return _both_wait(problem, choice)
    generates, trains = busy_seconds(choice)
    if outcome.training_idle > outcome.generation_idle:
        if generates > bound.generation_s * (1 + _MORE):
            return f"generation: last responses leave slots empty, {1 - bound.generation_s / generates:.0%}"
        return _generation(choice.split.engine)
    if trains > bound.training_s * (1 + _MORE):
        return f"training: ranks wait for each other, {1 - bound.training_s / trains:.0%}"
    return _training(choice.split.trainer)


def busy_seconds(choice: Candidate) -> tuple[float, float]:
    """Return the seconds of a step in which an engine generates, and in which the trainer trains."""
    outcome = choice.outcome
    return (1 - outcome.generation_idle) * choice.step_s, (1 - outcome.training_idle) * choice.step_s


def _both_wait(problem: SplitProblem, choice: Candidate) -> str:
    bound = choice.bound
    if choice.schedule.mode == "sync":
        generates = seconds_text(bound.generation_s + bound.tail_s)
        return f"generation {generates}, then training {seconds_text(bound.training_s)}"
    if bound.limit == "lag":
        return f"lag: {seconds_text(bound.step_s * (choice.schedule.lag + 1))} from a version to the next"
    longest = problem.work.responses.longest(problem.work.samples)
    alone = longest * choice.split.engine.token_s
    if alone > _LONG * choice.step_s:
        return f"longest responses: {longest:,.0f} tokens, alone {seconds_text(alone)}"
    return "each side waits for the other's last samples"


def _training(trainer: TrainerPlan) -> str:
    cost = trainer.cost
    parts = {
        "compute": cost.compute_s,
        "pipeline": cost.bubble_s,
        "tensor parallel": cost.reduce_s,
        "tokens to experts and back": cost.exchange_s,
        "exchange over replicas": cost.gather_s,
        "optimizer": cost.optimizer_s,
    }
    most = max(parts, key=lambda name: parts[name])
    return f"training: {most} {parts[most] / cost.step_s:.0%}"


def _generation(engine: EnginePlan) -> str:
    full = engine.full
    memory_bound = full.read_s >= full.compute_s
    parts = {
        "memory bandwidth" if memory_bound else "compute": max(full.read_s, full.compute_s),
        "tensor parallel": full.reduce_s,
        "tokens to experts and back": full.exchange_s,
        "launches and sampling": full.rest_s,
    }
    most = max(parts, key=lambda name: parts[name])
    slots = f"{engine.slots} slots" + (", memory full" if engine.fitting <= engine.slots else "")
    return f"generation: {most} {parts[most] / full.seconds:.0%}, {slots}"


def advice(problem: SplitProblem, *, now: Candidate | None, best: Candidate) -> str:
    """Return one sentence with its arithmetic. now: the manifest's own split, None if it does not fit."""
    if now is None:
        return _best_split_advice(problem, best)
    idle = now.outcome
    sides = f"generation is idle {idle.generation_idle:.0%} of a step, the trainer {idle.training_idle:.0%}"
    if now.step_s <= best.step_s * (1 + _SAME) and now.split.devices <= problem.devices:
        return (
            f"The manifest's split is as good as any that was found: {sides}, a step takes {seconds_text(now.step_s)}."
        )
    ratio = now.step_s / best.step_s
    gain = f"a step takes {seconds_text(best.step_s)} instead of {seconds_text(now.step_s)} ({ratio:.2f}x)"
    moved = best.split.trainer.devices - now.split.trainer.devices
    if now.split.devices == best.split.devices and moved:
        direction = "generation to the trainer" if moved > 0 else "the trainer to generation"
        return (
            f"In the manifest's split {sides}: {_work(now)}, so {balance(now, devices=problem.devices)} of "
            f"{problem.devices} devices would train in balance; move {abs(moved)} from {direction}, and with "
            f"{best.split.name} {gain}."
        )
    return f"In the manifest's split, {now.split.name}, {sides}; with {best.split.name} {gain}."


def _best_split_advice(problem: SplitProblem, best: Candidate) -> str:
    outcome = best.outcome
    idle = max(outcome.generation_idle, outcome.training_idle)
    which = "generation" if outcome.generation_idle >= outcome.training_idle else "the trainer"
    sentence = f"With {best.split.name} a step takes {seconds_text(best.step_s)}: {_work(best)}"
    if idle < _IDLE:
        return f"{sentence}, and both sides are busy."
    why = limiter(problem, best)
    return f"{sentence}; {which} is idle {idle:.0%} of it, as no division is finer or faster ({why})."


def _work(choice: Candidate) -> str:
    split = choice.split
    generates, trains = busy_seconds(choice)
    generated, trained = generates * split.generating, trains * split.trainer.devices
    return (
        f"generation works {seconds_text(generates)} x {split.generating} devices = {_whole(generated)} "
        f"device-seconds, training {seconds_text(trains)} x {split.trainer.devices} = {_whole(trained)}"
    )


def seconds_text(seconds: float) -> str:
    """Return seconds in three digits: ``43.2 s``, ``1,204 s``, ``63.9 ms``."""
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:,.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


def _whole(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
