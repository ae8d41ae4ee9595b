"""Idle shares: between 0 and 1, only of the window that counts, weighted by how long an instance lived."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.driver.lives import Lives


def test_the_window_begins_with_the_first_dispatch_and_ends_with_the_last_step() -> None:
    lives = Lives(opened=100.0)
    lives.observe("a", role="rollout", started=50.0, busy_s=6.0, now=110.0)
    assert lives.idle_shares(110.0) == {"rollout": pytest.approx(0.4)}
    lives.closed = 110.0
    lives.observe("a", role="rollout", started=50.0, busy_s=6.0, now=200.0)
    assert lives.idle_shares(200.0) == {"rollout": pytest.approx(0.4)}


def test_an_instance_that_lived_half_as_long_weighs_half() -> None:
    lives = Lives(opened=0.0)
    lives.observe("long", role="rollout", started=0.0, busy_s=10.0, now=10.0)
    lives.observe("short", role="rollout", started=5.0, busy_s=0.0, now=10.0)
    assert lives.idle_shares(10.0) == {"rollout": pytest.approx(1 / 3)}


def test_nothing_is_known_before_the_first_dispatch() -> None:
    lives = Lives()
    lives.observe("a", role="trainer", started=0.0, busy_s=1.0, now=2.0)
    assert lives.idle_shares(2.0) == {}


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 100), st.floats(0, 100)), min_size=1, max_size=8))
def test_shares_are_shares(beats: list[tuple[float, float, float]]) -> None:
    lives = Lives(opened=10.0)
    for number, (started, busy, seen) in enumerate(beats):
        lives.observe(str(number), role="trainer", started=started, busy_s=busy, now=started + seen)
    assert all(0.0 <= share <= 1.0 for share in lives.idle_shares(150.0).values())
