"""Bounds of a step's time, worked out by hand: 32 responses of 50 to 150 tokens, on four engines unless it is said."""

import math
from typing import Any

import msgspec
import pytest
from planner_problems import job_of

from asyncflow.api.schedule import ScheduleSpec
from asyncflow.planner.bounds import Bound, Split, bound_of, slack
from asyncflow.planner.costs import Decoding, EngineLayout, Memory, TrainerLayout, TrainingCost
from asyncflow.planner.layouts import EnginePlan, TrainerPlan
from asyncflow.planner.work import Responses, work_of
from asyncflow.rollout.lengths import Lengths

WORK = work_of(job_of().spec, lengths=Lengths(quantiles=(50, 150)))
SKEWED = msgspec.structs.replace(WORK, responses=Responses(lengths=Lengths(quantiles=(10, 10, 10, 10, 500)), most=512))
LONGEST = 50 + 100 * 32 / 33
SLACK = 1 - 0.03 - 3 * 100 / math.sqrt(12) / 100 / math.sqrt(3 * 32)
TAIL = 0.016 * (LONGEST + 5 - 105)
"""Seconds of the longest response after the others, where the mean one takes as long as 105 tokens with its prompt."""
WAY = 0.02 * LONGEST + 0.1 + 0.5
EXPOSED = 0.4 + 1.0 + 0.5


def split(*, instances: int = 4, slots: int = 16, compute_s: float = 3.2) -> Split:
    engine = EnginePlan(
        layout=EngineLayout(tp=2),
        slots=slots,
        fitting=slots,
        token_s=0.02,
        share_s=0.004,
        prefill_s=0.1,
        recompute_s=0.0,
        swap_s=0.5,
        pull_s=1.0,
        full=Decoding(read_s=0.0, compute_s=0.0, reduce_s=0.0, rest_s=0.0),
        bytes=0.0,
    )
    cost = TrainingCost(compute_s=compute_s, bubble_s=0.0, reduce_s=0.0, gather_s=0.0, optimizer_s=0.3, publish_s=0.4)
    memory = Memory(states=0.0, frozen=0.0, activations=0.0)
    trainer = TrainerPlan(layout=TrainerLayout(dp=3), cost=cost, memory=memory)
    return Split(engine=engine, instances=instances, trainer=trainer)


def bound(of: Split, *, work: Any = WORK, **schedule: Any) -> Bound:
    return bound_of(work, ScheduleSpec.model_validate(schedule), of)


def test_a_split_has_the_devices_of_all_engines_and_of_the_trainer() -> None:
    assert (split().generating, split().devices, split().name) == (8, 11, "8 (4 x TP2) + 3 (DP3)")


def test_lengths_may_be_shorter_by_three_deviations_of_their_mean() -> None:
    assert slack(WORK) == pytest.approx(SLACK, rel=1e-4)


def test_a_synchronous_step_takes_generation_training_and_the_update_in_turn() -> None:
    found = bound(split(), mode="sync")
    assert found.generation_s == pytest.approx(0.016 * 105 + 0.004 * 8 * 105)
    assert found.tail_s == pytest.approx(TAIL)
    assert (found.training_s, found.update_s, found.limit) == (3.5, EXPOSED, "both in turn")
    assert found.step_s == pytest.approx(SLACK * (found.generation_s + TAIL + 3.5 + EXPOSED), rel=1e-4)
    crowded = bound(split(slots=4), mode="sync")
    assert (crowded.generation_s, crowded.tail_s) == (pytest.approx(0.016 * 210 + 0.004 * 8 * 105), 0.0)


@pytest.mark.parametrize(
    ("compute_s", "work", "limit"),
    [(3.2, WORK, "generation"), (30.0, WORK, "training"), (3.2, SKEWED, "longest response")],
)
def test_a_periodic_step_takes_the_longer_of_them_and_the_update(compute_s: float, work: Any, limit: str) -> None:
    found = bound(split(compute_s=compute_s), work=work, mode="periodic")
    longer = max(found.generation_s + found.tail_s, compute_s + 0.3)
    assert (found.step_s, found.limit) == (pytest.approx(slack(work) * (longer + EXPOSED)), limit)


@pytest.mark.parametrize(
    ("of", "schedule", "step_s", "limit"),
    [
        (split(), {}, 0.016 * 52.5 + 0.004 * 8 * 105 + 0.5, "generation"),
        (split(), {"syncEvery": 2, "swapAt": "sequence"}, 0.016 * 52.5 + 0.004 * 8 * 105 + 0.25, "generation"),
        (split(compute_s=30.0), {}, 30.3, "training"),
        (split(instances=32, compute_s=0.64), {}, (WAY + 0.02 + 0.3) / 2, "lag"),
        (split(instances=32, compute_s=0.64), {"swapAt": "token"}, 0.016 * 52.5 + 0.004 * 105 + 0.5, "generation"),
    ],
)
def test_an_asynchronous_step_takes_the_longest_of_three_ways(
    of: Split, schedule: dict[str, Any], step_s: float, limit: str
) -> None:
    found = bound(of, mode="async", **schedule)
    assert (found.step_s, found.limit) == (pytest.approx(SLACK * step_s, rel=1e-4), limit)
    assert (found.tail_s, found.update_s) == (0.0, 0.5 / schedule.get("syncEvery", 1))


def test_who_is_done_first_is_idle_for_the_rest_of_the_step() -> None:
    found = Bound(step_s=10.0, generation_s=4.0, tail_s=0.0, training_s=12.0, update_s=0.0, limit="training")
    assert (found.generation_idle, found.training_idle) == (pytest.approx(0.6), 0.0)
    turned = msgspec.structs.replace(found, generation_s=12.0, training_s=4.0)
    assert (turned.generation_idle, turned.training_idle) == (0.0, pytest.approx(0.6))
