"""The elastic policy: bounded, patient, and quiet where nothing is to be gained."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.flow.scaling import Elasticity, Signals, Wish

POLICY = Elasticity(least=1, most=16, wait_share=0.1, queued_steps=2.0, lag=1.0, stabilization_s=60.0)


def signals(**changes: float) -> Signals:
    usual = {"rollouts": 4, "ready": 4, "wait_share": 0.05, "queued_steps": 0.5, "lag": 1.0}
    return Signals(**(usual | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, 4),
        ({"wait_share": 0.28}, 5),
        ({"wait_share": 0.5}, 8),
        ({"wait_share": 0.4}, 6),
        ({"wait_share": 1.0}, 8),
        ({"wait_share": 0.5, "queued_steps": 1.0}, 4),
        ({"wait_share": 0.5, "ready": 3}, 4),
        ({"queued_steps": 2.5}, 3),
        ({"queued_steps": 1.5, "lag": 2.0}, 3),
        ({"queued_steps": 0.5, "lag": 2.0}, 4),
        ({"rollouts": 1, "ready": 1, "queued_steps": 9.0}, 1),
        ({"rollouts": 12, "ready": 12, "wait_share": 0.9}, 16),
        ({"rollouts": 40, "ready": 40}, 16),
    ],
)
def test_what_suits(changes: dict[str, float], wanted: int) -> None:
    assert POLICY.wanted(signals(**changes)) == wanted


def test_from_none_at_all_it_starts_with_one_or_two() -> None:
    from_zero = Elasticity(least=0, most=4, wait_share=0.1, queued_steps=2.0, lag=1.0, stabilization_s=0.0)
    assert from_zero.follow(signals(rollouts=0, ready=0, wait_share=1.0), wish=None, now=0.0) == (2, None)


def test_a_wish_is_followed_when_it_has_lasted() -> None:
    starving = signals(wait_share=0.5)
    current, wish = POLICY.follow(starving, wish=None, now=100.0)
    assert (current, wish) == (4, Wish("more", 100.0))
    assert POLICY.follow(starving, wish=wish, now=159.0) == (4, wish)
    assert POLICY.follow(starving, wish=wish, now=160.0) == (8, None)


def test_a_wish_that_turns_or_ends_begins_anew() -> None:
    wish = Wish("more", 100.0)
    assert POLICY.follow(signals(), wish=wish, now=150.0) == (4, None)
    assert POLICY.follow(signals(queued_steps=5.0), wish=wish, now=500.0) == (4, Wish("fewer", 500.0))


figures = st.builds(
    Signals,
    rollouts=st.integers(0, 40),
    ready=st.integers(0, 40),
    wait_share=st.floats(0, 1),
    queued_steps=st.floats(0, 100),
    lag=st.floats(0, 10),
)


@given(
    least=st.integers(0, 8),
    more=st.integers(0, 20),
    stabilization_s=st.floats(0, 100),
    seen=st.lists(st.tuples(st.floats(0, 50), figures), max_size=40),
)
def test_bounds_patience_and_pace_hold_whatever_is_seen(
    least: int, more: int, stabilization_s: float, seen: list[tuple[float, Signals]]
) -> None:
    policy = Elasticity(
        least=least, most=least + more, wait_share=0.1, queued_steps=2.0, lag=1.0, stabilization_s=stabilization_s
    )
    now, rollouts, wish, wished_since = 0.0, least, None, 0.0
    for passed, each in seen:
        now += passed
        before = wish
        moved, wish = policy.follow(
            Signals(
                rollouts=rollouts,
                ready=each.ready,
                wait_share=each.wait_share,
                queued_steps=each.queued_steps,
                lag=each.lag,
            ),
            wish=wish,
            now=now,
        )
        if wish is not None and wish != before:
            wished_since = now
        if moved != rollouts:
            assert wish is None
            assert now - (wished_since if before is not None else now) >= stabilization_s
            assert rollouts - 1 <= moved <= max(2 * rollouts, 2)
        assert policy.least <= moved <= policy.most
        rollouts = moved
