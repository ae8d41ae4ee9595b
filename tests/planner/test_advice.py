"""Advice: which side waits, how many devices to move, and the words for what limits a step."""

from dataclasses import replace

import pytest
from planner_problems import job_of, problem_of

from asyncflow.planner.advice import advice, balance, busy_seconds, limiter
from asyncflow.planner.bounds import bound_of
from asyncflow.planner.costs import EngineLayout, TrainerLayout
from asyncflow.planner.search import Candidate, Predicted, SplitProblem

SPEC = job_of("schedule={mode: async, update: delayed}").spec
PROBLEM = replace(problem_of(model="Qwen2.5-7B"), devices=16)


def candidate(
    problem: SplitProblem, *, instances: int, trains: int, step_s: float, idle: tuple[float, float]
) -> Candidate:
    layout = TrainerLayout(dp=trains, recompute=True)
    split = problem.split(instance=EngineLayout(tp=1), instances=instances, layout=layout)
    return Candidate(
        split=split,
        schedule=SPEC.schedule,
        bound=bound_of(problem.work, SPEC.schedule, split),
        outcome=Predicted(step_s=step_s, generation_idle=idle[0], training_idle=idle[1]),
    )


def test_devices_move_to_the_side_that_is_waited_for() -> None:
    now = candidate(PROBLEM, instances=12, trains=4, step_s=10.0, idle=(0.6, 0.0))
    best = candidate(PROBLEM, instances=8, trains=8, step_s=6.0, idle=(0.0, 0.2))
    assert busy_seconds(now) == (4.0, 10.0)
    assert balance(now, devices=16) == round(16 * 40 / (48 + 40))
    assert advice(PROBLEM, now=now, best=best) == (
        "In the manifest's split generation is idle 60% of a step, the trainer 0%: generation works 4 s x 12 devices = "
        "48 device-seconds, training 10 s x 4 = 40, so 7 of 16 devices would train in balance; move 4 from generation "
        "to the trainer, and with 8 (8 x TP1) + 8 (DP8) a step takes 6 s instead of 10 s (1.67x)."
    )


def test_a_split_that_is_as_good_is_left_alone() -> None:
    now = candidate(PROBLEM, instances=8, trains=8, step_s=6.05, idle=(0.05, 0.02))
    best = candidate(PROBLEM, instances=7, trains=9, step_s=6.0, idle=(0.0, 0.1))
    assert advice(PROBLEM, now=now, best=best).startswith("The manifest's split is as good as any that was found")
    fewer = replace(PROBLEM, devices=8)
    half = candidate(fewer, instances=4, trains=4, step_s=12.0, idle=(0.0, 0.1))
    assert advice(fewer, now=now, best=half).endswith("a step takes 12 s instead of 6.05 s (0.50x).")


@pytest.mark.parametrize(
    ("idle", "words"),
    [
        ((0.5, 0.0), "training: "),
        ((0.0, 0.5), "generation: "),
        ((0.4, 0.4), "lag: 3.03 s from a version to the next"),
    ],
)
def test_words_for_what_limits(idle: tuple[float, float], words: str) -> None:
    even = PROBLEM.split(instance=EngineLayout(tp=1), instances=8, layout=TrainerLayout(dp=8))
    usual = bound_of(PROBLEM.work, SPEC.schedule, even)
    busy = max(usual.generation_s, usual.training_s)
    found = candidate(PROBLEM, instances=8, trains=8, step_s=busy, idle=idle)
    assert limiter(PROBLEM, found).startswith(words)


def test_a_trainer_that_works_longer_than_its_tokens_take_waits_for_ranks() -> None:
    even = candidate(PROBLEM, instances=8, trains=8, step_s=1.0, idle=(0.5, 0.0)).bound.training_s
    found = candidate(PROBLEM, instances=8, trains=8, step_s=2 * even, idle=(0.5, 0.0))
    assert limiter(PROBLEM, found) == "training: ranks wait for each other, 50%"
