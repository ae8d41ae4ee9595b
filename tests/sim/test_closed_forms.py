"""Simulated runs whose time can be said in a line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncflow.identity import SampleKey
from asyncflow.rollout.lengths import Lengths
from asyncflow.sim import (
    Colocation,
    EngineModel,
    EvaluationLoad,
    LinkModel,
    RewardTimes,
    RolloutEvent,
    TrainerModel,
    simulate,
)

from .scenarios import MOST, equal, scenario

ENGINE = EngineModel(slots=16, token_s=0.01, share_s=0.001, load_s=0.3, lengths=equal(100))
GENERATES = 100 * (0.01 + 0.001 * 15)
TRAINER = TrainerModel(sample_s=0.05, optimizer_s=0.2, publish_s=0.4)
TRAINS = 32 * 0.05 + 0.2
PULLS = LinkModel(pull_s=0.7)


def test_sync_is_the_sum_of_all() -> None:
    made = simulate(scenario("sync", engine=ENGINE, trainer=TRAINER, link=PULLS), seed=1)
    assert made.wall_s == pytest.approx(6 * (0.7 + 0.3 + GENERATES + TRAINS) + 5 * 0.4)
    step = made.steps[-1]
    assert (step.compute_s, step.optimizer_s) == pytest.approx((1.6, 0.2))
    assert step.wall_s == pytest.approx(step.wait_s + TRAINS)


def test_colocated_sync_pays_for_resharding_instead_of_a_transfer() -> None:
    turns = Colocation(to_train_s=0.5, to_generate_s=0.25)
    made = simulate(scenario("sync", engine=ENGINE, trainer=TRAINER, link=PULLS, colocated=turns), seed=1)
    assert made.wall_s == pytest.approx(6 * (0.25 + GENERATES + 0.5 + TRAINS))


def test_periodic_trains_from_the_first_group_on_when_training_is_slow() -> None:
    """Periodic Asynchrony, equation 13: the start-up is the time of the first group."""
    lengths = Lengths(tokens=100, sigma=0.5)
    engine = EngineModel(slots=16, token_s=0.01, lengths=lengths)
    made = simulate(scenario("periodic", engine=engine, trainer=TrainerModel(sample_s=1.0)), seed=3)
    assert [step.wall_s for step in made.steps] == pytest.approx([min(groups(3, step)) + 32 for step in range(6)])


def test_sync_waits_for_the_longest_response() -> None:
    """Periodic Asynchrony, equation 12: the start-up is the time of the last one."""
    engine = EngineModel(slots=16, token_s=0.01, lengths=Lengths(tokens=100, sigma=0.5))
    made = simulate(scenario("sync", engine=engine, trainer=TrainerModel(sample_s=1.0)), seed=3)
    assert [step.wall_s for step in made.steps] == pytest.approx([max(groups(3, step)) + 32 for step in range(6)])


def groups(seed: int, step: int) -> list[float]:
    """Return the seconds of each group of a step, all of whose sequences run alone."""
    lengths = Lengths(tokens=100, sigma=0.5)
    serials = range(8 * step, 8 * step + 8)
    return [max(lengths.of(SampleKey(serial, j), seed=seed, most=MOST) for j in range(4)) / 100 for serial in serials]


@pytest.mark.parametrize("sample_s", [0.02, 0.2])
def test_delayed_takes_the_longer_of_the_two(sample_s: float) -> None:
    trainer = TrainerModel(sample_s=sample_s, publish_s=0.1)
    made = simulate(scenario("async", engine=ENGINE, trainer=trainer, link=PULLS, steps=8), seed=1)
    assert made.step_s(without=3) == pytest.approx(max(GENERATES + 0.3, 32 * sample_s))
    assert {step.staleness_start_max for step in made.steps[1:]} == {1}


def test_verl_without_a_lead_takes_turns_and_with_a_cycle_the_longer_is_all() -> None:
    token = {"swap_at": "token", "max_staleness": 1000, "sync_every": 2, "require_batches": 1, "fill": "completion"}
    sizes = {
        "engine": EngineModel(slots=32, token_s=0.1, share_s=0.01, lengths=equal(100)),
        "steps": 12,
        "group_size": 2,
        "rollouts": 1,
    }
    turns = scenario("async", trainer=TrainerModel(slot_s=3.0), schedule={**token, "staleness_threshold": 0}, **sizes)
    cycle = 100 * (0.1 + 0.01 * 31) + 6
    assert simulate(turns, seed=0).step_s(without=4) == pytest.approx(cycle / 2)
    ahead = scenario("async", trainer=TrainerModel(slot_s=30.0), schedule={**token, "staleness_threshold": 1}, **sizes)
    assert simulate(ahead, seed=0).step_s(without=4) == pytest.approx(30)


def test_what_runs_at_a_publication_stands_still_while_its_cache_is_computed() -> None:
    token = {"swap_at": "token", "max_staleness": 2, "staleness_threshold": 1}
    walls = []
    for recompute_s, prefix in ((0.0, "recompute"), (0.001, "recompute"), (0.001, "keep")):
        engine = EngineModel(slots=16, token_s=0.01, recompute_s=recompute_s, lengths=Lengths(tokens=100, sigma=1))
        made = simulate(
            scenario(
                "async",
                engine=engine,
                trainer=TrainerModel(sample_s=0.01),
                schedule={**token, "prefix": prefix},
                steps=12,
            ),
            seed=2,
        )
        walls.append(made.wall_s)
    assert walls[1] > walls[0] + 0.5
    assert walls[2] == walls[0]


def test_the_last_reward_is_waited_for() -> None:
    reward = RewardTimes(seconds=2.0, workers=99)
    made = simulate(scenario("sync", engine=ENGINE, trainer=TRAINER, link=PULLS, reward=reward), seed=1)
    assert made.wall_s == pytest.approx(6 * (0.7 + 0.3 + GENERATES + 2.0 + TRAINS) + 5 * 0.4)
    assert made.spent["rollout"]["idle", "reward"] == pytest.approx(2 * 6 * 2.0)
    queued = RewardTimes(seconds=1.0, workers=4)
    made = simulate(scenario("sync", engine=ENGINE, trainer=TRAINER, link=PULLS, reward=queued), seed=1)
    assert made.wall_s == pytest.approx(6 * (0.7 + 0.3 + GENERATES + 4.0 + TRAINS) + 5 * 0.4)


def test_versions_spread_over_a_tree() -> None:
    assert [LinkModel(pull_s=1, hop_s=0.5).seconds(place) for place in range(7)] == [1, 1.5, 1.5, 2, 2, 2, 2]
    assert LinkModel(pull_s=1, hop_s=0.5, fanout=1).seconds(3) == 2.5


def test_the_last_evaluation_is_after_the_last_step() -> None:
    load = EvaluationLoad(every=3, prompts=4, group_size=4)
    made = simulate(scenario("periodic", engine=ENGINE, trainer=TRAINER, evaluation=load), seed=1)
    assert made.timeline is not None
    driver = next(track for track in made.timeline.tracks if track.role == "driver")
    assert [span.step for span in driver.background if span.kind == "evaluation"] == [0, 3, 6]
    assert made.ended > made.timeline.end


@pytest.mark.parametrize(("what", "wall_s", "redone"), [("leave", 1.5, 0), ("kill", 2.0, 16 * 50)])
def test_what_a_rollout_made_is_handed_on_when_it_leaves_and_lost_when_it_is_killed(
    what: str, wall_s: float, redone: int
) -> None:
    engine = EngineModel(slots=16, token_s=0.01, lengths=equal(100))
    gone = (RolloutEvent(at=0.505, what=what, index=1),)
    made = simulate(scenario("sync", engine=engine, trainer=TrainerModel(), steps=1, events=gone), seed=1)
    assert made.wall_s == pytest.approx(wall_s)
    assert made.redone == redone
    assert made.timeline is not None
    assert [(mark.what, mark.of) for mark in made.timeline.marks] == [(what, "rollout-1")]
    lives = [track for track in made.timeline.tracks if track.name == "rollout-1"]
    assert [track.killed for track in lives] == ([True, False] if what == "kill" else [False])


def test_one_more_rollout_makes_its_share() -> None:
    engine = EngineModel(slots=4, token_s=0.01, lengths=equal(100))
    joins = (RolloutEvent(at=0.5, what="join"),)
    two = scenario("sync", engine=engine, trainer=TrainerModel(), group_size=1, steps=1, prompts_per_step=32)
    assert simulate(two, seed=1).wall_s == pytest.approx(4.0)
    assert simulate(replace(two, events=joins), seed=1).wall_s == pytest.approx(3.0)
