"""The windows of versions follow the papers, and no window ever allows more lag than was promised."""

from count_work import bytecodes
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.flow.schedule import Schedule
from asyncflow.identity import NEWEST


def test_delayed_with_quota_is_asyncflow_4_2_1() -> None:
    schedule = Schedule(steps=6, lag=1, exact=True)
    assert [schedule.window(k) for k in range(1, 6)] == [(0, 0), (0, 0), (1, 1), (2, 2), (3, 3)]


def test_sync_generates_each_step_from_the_weights_before_it() -> None:
    schedule = Schedule(steps=6, lag=0, exact=True)
    assert [schedule.window(k).oldest for k in range(1, 6)] == [0, 1, 2, 3, 4]


def test_sequence_allows_newer_versions() -> None:
    assert Schedule(steps=9, lag=2, exact=False).window(7) == (4, NEWEST)


def test_evaluations_are_the_first_the_last_and_each_nth() -> None:
    assert Schedule(steps=25, lag=1, exact=True, eval_every=10).evaluations() == [0, 10, 20, 25]
    assert Schedule(steps=25, lag=1, exact=True).evaluations() == [0, 25]
    every_second = Schedule(steps=25, lag=1, exact=False, sync_every=2, eval_every=5)
    assert every_second.evaluations() == [0, 10, 20, 25], "of those that are published"
    assert all(map(every_second.evaluates, every_second.evaluations()))
    many = Schedule(steps=100_000, lag=1, exact=True, eval_every=20_000)
    assert bytecodes(many.evaluations) < 1000, "the driver asks for them whenever a group is finished"


def test_each_nth_version_is_published_and_the_last() -> None:
    schedule = Schedule(steps=7, lag=2, exact=False, sync_every=3)
    assert [step for step in range(8) if schedule.publishes(step)] == [0, 3, 6, 7]


def test_steps_that_are_complete_together_are_blocks_of_as_many_as_are_required() -> None:
    schedule = Schedule(steps=5, lag=1, exact=False, require_batches=2)
    assert [list(schedule.together(step)) for step in range(1, 6)] == [[1, 2], [1, 2], [3, 4], [3, 4], [5]]
    assert list(Schedule(steps=5, lag=1, exact=False).together(3)) == [3]


@given(more=st.integers(0, 4), every=st.integers(1, 4), step=st.integers(1, 100))
def test_a_window_names_published_versions_and_keeps_the_lag(more: int, every: int, step: int) -> None:
    schedule = Schedule(steps=100, lag=every - 1 + more, exact=True, sync_every=every)
    oldest, newest = schedule.window(step)
    assert schedule.publishes(oldest)
    assert newest == oldest
    assert 0 <= (step - 1) - oldest <= schedule.lag


@given(lag=st.integers(0, 3), unfinished=st.sets(st.integers(1, 50)))
def test_required_versions_are_those_of_unfinished_steps(lag: int, unfinished: set[int]) -> None:
    exact = Schedule(steps=50, lag=lag, exact=True)
    assert exact.required(unfinished) == {max(0, k - 1 - lag) for k in unfinished}
    assert Schedule(steps=50, lag=lag, exact=False).required(unfinished) == set()
