"""Admission: the published accounting of AReaL and verl, and what it promises."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.api.schedule import ScheduleSpec
from asyncflow.flow.admission import BoundedLag, Concurrency, InFlight, StalenessThreshold, admission_by, admit
from asyncflow.flow.schedule import Schedule


def flow(*, published: int = 0, dispatched: int = 0, running: int = 0) -> InFlight:
    return InFlight(published=published, dispatched=dispatched, running=running)


def test_lag_zero_is_synchronous_and_lag_one_is_one_step_ahead() -> None:
    sync = BoundedLag(prompts_per_step=16, lag=0, steps=10)
    ahead = BoundedLag(prompts_per_step=16, lag=1, steps=10)
    assert sync.allowance(flow()) == 16
    assert ahead.allowance(flow()) == 32
    assert ahead.allowance(flow(published=3, dispatched=70)) == 10


def test_nothing_is_dispatched_beyond_the_last_step() -> None:
    assert BoundedLag(prompts_per_step=4, lag=3, steps=5).allowance(flow(published=4, dispatched=20)) == 0


def test_verl_formula_counts_what_was_in_flight_at_the_publication() -> None:
    # verl: R = 32, K = 1, τ = 0.5 gives M = 48; after the first publication 10 prompts were still in flight.
    policy = StalenessThreshold(prompts_per_step=32, sync_every=1, threshold=0.5)
    assert policy.allowance(flow()) == 48
    assert policy.allowance(flow(published=1, dispatched=42)) == 48 - 10
    every_third = StalenessThreshold(prompts_per_step=32, sync_every=3, threshold=0.5)
    assert every_third.allowance(flow(published=3, dispatched=106)) == 144 - 10


def test_admission_is_the_smallest_allowance_and_never_negative() -> None:
    policies = [BoundedLag(prompts_per_step=8, lag=1, steps=10), Concurrency(limit=5)]
    assert admit(policies, flow(running=2)) == 3
    assert admit(policies, flow(running=9)) == 0


@pytest.mark.parametrize(
    ("schedule", "allowed"),
    [
        ({"swap_at": "quota", "staleness_threshold": 0.0}, 16),
        ({"swap_at": "sequence", "max_staleness": 3, "staleness_threshold": 9.0}, 32),
        ({"swap_at": "token", "max_staleness": 3, "staleness_threshold": 0.5}, 12),
        ({"swap_at": "token", "max_staleness": 3, "staleness_threshold": 0.5, "max_inflight": 7}, 5),
    ],
)
def test_each_bound_of_a_manifest_holds(schedule: dict[str, Any], allowed: int) -> None:
    policies = admission_by(ScheduleSpec(**schedule), prompts_per_step=8, steps=10)
    assert admit(policies, flow(running=2)) == allowed


@given(
    lag=st.integers(0, 4),
    batch=st.integers(1, 9),
    steps=st.integers(1, 12),
    choices=st.lists(st.booleans(), max_size=200),
)
def test_no_prompt_leaves_before_its_window_is_published(lag: int, batch: int, steps: int, choices: list[bool]) -> None:
    policy = BoundedLag(prompts_per_step=batch, lag=lag, steps=steps)
    published = dispatched = 0
    for dispatch in choices:
        if dispatch and admit([policy], flow(published=published, dispatched=dispatched)) > 0:
            step = dispatched // batch + 1
            assert step - 1 - lag <= published
            assert step <= steps
            dispatched += 1
        elif dispatched >= (published + 1) * batch:
            published += 1


@given(every=st.integers(1, 4), more=st.integers(0, 3), batch=st.integers(1, 5))
def test_all_steps_up_to_the_next_publication_are_let_out(every: int, more: int, batch: int) -> None:
    steps = 30
    schedule = Schedule(steps=steps, lag=every - 1 + more, exact=False, sync_every=every)
    policy = BoundedLag(prompts_per_step=batch, lag=schedule.lag, steps=steps)
    published = dispatched = 0
    for step in range(1, steps + 1):
        dispatched += admit([policy], flow(published=published, dispatched=dispatched))
        assert dispatched >= step * batch
        assert schedule.window(dispatched // batch).oldest <= published
        published = step if schedule.publishes(step) else published
