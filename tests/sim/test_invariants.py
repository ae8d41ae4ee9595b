"""Tests of what holds in every simulated run, whatever the schedule, the sizes, the times and the kills."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from track_flaws import flaw_of

from asyncflow.errors import AsyncFlowError, ManifestError
from asyncflow.rollout.lengths import Lengths
from asyncflow.sim import (
    Colocation,
    EngineModel,
    EvaluationLoad,
    LinkModel,
    RewardTimes,
    RolloutEvent,
    Scenario,
    StorageModel,
    TrainerModel,
    simulate,
)
from asyncflow.sim.run import World
from asyncflow.timeline.causes import attribute, shares

from .scenarios import scenario

SECONDS = st.sampled_from([0.0, 0.001, 0.05, 0.7, 3.0])


@st.composite
def schedules(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["sync", "periodic", "quota", "sequence", "token", "staggered"]))
    if kind in ("sync", "periodic"):
        return {"mode": kind}
    if kind == "quota":
        return {"mode": "async", "schedule": {"require_batches": draw(st.integers(0, 2))}}
    every = draw(st.integers(1, 3))
    return {
        "mode": "async",
        "schedule": {
            "swap_at": draw(st.sampled_from(["sequence", "token"])) if kind == "staggered" else kind,
            "update": "staggered" if kind == "staggered" else "delayed",
            "sync_every": every,
            "max_staleness": every + draw(st.integers(0, 3)),
            "staleness_threshold": draw(st.sampled_from([0.0, 0.3, 1.0])),
            "require_batches": draw(st.integers(0, 1)),
            "fill": draw(st.sampled_from(["order", "completion"])),
            "max_inflight": draw(st.sampled_from([None, 3])),
        },
    }


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    rollouts = draw(st.integers(1, 3))
    events = draw(
        st.lists(
            st.builds(
                RolloutEvent,
                at=st.floats(0.5, 20),
                what=st.sampled_from(["kill", "join", "leave"]),
                index=st.integers(1, 4),
            ),
            max_size=4,
        )
    )
    return scenario(
        **draw(schedules()),
        engine=EngineModel(
            slots=draw(st.integers(1, 6)),
            token_s=0.01,
            share_s=draw(st.sampled_from([0.0, 0.002])),
            load_s=draw(SECONDS),
            recompute_s=draw(st.sampled_from([0.0, 0.001])),
            lengths=Lengths(tokens=50, sigma=draw(st.sampled_from([0.0, 1.0])), rho=0.3),
        ),
        trainer=TrainerModel(
            slot_s=draw(SECONDS),
            token_s=draw(st.sampled_from([0.0, 0.001])),
            copy_s=draw(SECONDS),
            publish_s=draw(SECONDS),
            checkpoint_s=draw(SECONDS),
        ),
        link=LinkModel(pull_s=draw(SECONDS), hop_s=draw(SECONDS)),
        storage=StorageModel(
            put_s=draw(SECONDS), claim_s=draw(SECONDS), write_s=draw(SECONDS), byte_s=draw(st.sampled_from([0.0, 1e-5]))
        ),
        reward=RewardTimes(seconds=draw(SECONDS), sigma=0.5, workers=2),
        steps=draw(st.integers(1, 6)),
        prompts_per_step=draw(st.integers(1, 5)),
        group_size=draw(st.integers(1, 3)),
        rollouts=rollouts,
        ranks=draw(st.integers(1, 2)),
        slot_tokens=draw(st.sampled_from([60, 1 << 24])),
        checkpoint_every=2,
        evaluation=draw(st.sampled_from([None, EvaluationLoad(every=2, prompts=3, group_size=2)])),
        events=tuple(events),
    )


@settings(max_examples=60, deadline=None)
@given(scenarios(), st.integers(0, 3))
def test_every_prompt_is_trained_once_and_none_too_late(given_: Scenario, seed: int) -> None:
    world = World(given_, seed=seed, spans=True)
    trained: Counter[tuple[int, int]] = Counter()
    offer = world.trainer.offer

    def offered(group: Any) -> None:
        trained.update((group.serial, row.sample) for row in group.rows)
        offer(group)

    world.trainer.offer = offered  # type: ignore[method-assign]
    made = world.run()
    prompts, size = given_.steps * given_.prompts_per_step, given_.group_size
    assert trained == Counter({(serial, sample): 1 for serial in range(prompts) for sample in range(size)})
    assert [step.samples for step in made.steps] == [given_.prompts_per_step * size] * given_.steps
    assert max(step.staleness_start_max for step in made.steps) <= given_.schedule.lag
    assert all(0 <= step.staleness_end_mean <= step.staleness_start_mean for step in made.steps)
    assert all(-1e-9 <= step.staleness_token_mean <= step.staleness_start_max + 1e-9 for step in made.steps)
    assert made.timeline is not None
    assert [flaw_of(track) for track in made.timeline.tracks if flaw_of(track)] == []
    for share in shares(attribute(made.timeline)).values():
        assert "" not in share.idle, "each idle second has a cause"
        assert share.seconds == pytest.approx(sum(share.kinds.values()) + sum(share.idle.values()))
    for step in made.steps:
        parts = step.wait_s + step.compute_s + step.optimizer_s + step.publish_s + step.checkpoint_s
        assert parts == pytest.approx(step.wall_s)
    assert made == simulate(given_, seed=seed)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.01, 2.0), st.sampled_from([0.0, 0.5, 1.0]))
def test_periodic_is_at_most_twice_as_fast_and_delayed_at_least_as_fast(
    seed: int, balance: float, sigma: float
) -> None:
    engine = EngineModel(slots=4, token_s=0.01, lengths=Lengths(tokens=100, sigma=sigma))
    trainer = TrainerModel(sample_s=balance * 0.1)
    walls = {mode: simulate(scenario(mode, engine=engine, trainer=trainer), seed=seed, spans=False).wall_s
             for mode in ("sync", "periodic", "async")}  # fmt: skip
    assert walls["async"] <= walls["periodic"] + 1e-6
    assert walls["periodic"] <= walls["sync"] + 1e-6 <= 2 * walls["periodic"] + 1e-5


def test_spans_change_nothing_but_the_timeline() -> None:
    given_ = scenario(
        "periodic", engine=EngineModel(slots=4, token_s=0.01), trainer=TrainerModel(sample_s=0.01), max_tokens=9
    )
    with_spans, without = simulate(given_, seed=1), simulate(given_, seed=1, spans=False)
    assert with_spans.timeline is not None
    assert without.timeline is None
    assert (with_spans.steps, with_spans.idle, with_spans.spent) == (without.steps, without.idle, without.spent)
    window = with_spans.timeline.end - with_spans.timeline.begin
    assert sum(with_spans.spent["trainer"].values()) == pytest.approx(window)
    assert sum(with_spans.spent["rollout"].values()) == pytest.approx(2 * window)


def test_a_run_without_rollouts_says_what_it_waits_for() -> None:
    given_ = scenario(
        "sync", engine=EngineModel(slots=4, token_s=0.01), trainer=TrainerModel(), rollouts=0, max_tokens=9
    )
    with pytest.raises(AsyncFlowError, match=r"stands still at 0\.000 s in step 1: 8 prompts are out, 0 rollouts"):
        simulate(given_, seed=1)
    with pytest.raises(ManifestError, match="cannot generate while it trains"):
        replace(given_, schedule=scenario("periodic", engine=EngineModel(), trainer=TrainerModel()).schedule,
                colocated=Colocation())  # fmt: skip
