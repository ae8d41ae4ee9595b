"""Idle shares: between 0 and 1, only of the window that counts, weighted by how long an instance lived; time counts
while anybody was there, and all of it survives the driver."""

import msgspec
import pytest
from count_work import bytecodes
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.api.status import RecentFigures
from asyncflow.driver.lives import LAP_S, Laps, Life, Lives


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


def test_a_role_that_tells_nothing_of_its_work_is_not_idle_but_there() -> None:
    lives = Lives(opened=0.0)
    lives.observe("driver", role="driver", started=0.0, now=10.0)
    assert lives.idle_shares(10.0) == {}
    assert lives.up_s(0.0, 20.0) == 10.0


def test_tokens_of_the_last_evaluation_count_although_the_window_is_closed() -> None:
    lives = Lives(opened=0.0, closed=5.0)
    lives.observe("a", role="rollout", started=0.0, busy_s=1.0, tokens=7, now=9.0)
    assert lives.tokens_generated == 7


spans = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted)


@given(st.lists(spans, max_size=8), spans)
def test_the_job_was_up_while_anybody_was_there(lived: list[list[int]], asked: list[int]) -> None:
    lives = Lives()
    for number, (started, seen) in enumerate(lived):
        lives.observe(str(number), role="rollout", started=started, now=seen)
    since, until = asked
    by_hand = sum(any(a <= second < b for a, b in lived) for second in range(since, until))
    assert lives.up_s(since, until) == by_hand


def test_what_the_next_driver_hears_is_added_to_what_the_last_one_knew() -> None:
    before = Lives(opened=0.0)
    before.observe("gone", role="rollout", started=0.0, busy_s=5.0, tokens=40, now=10.0)
    before.observe("stays", role="rollout", started=0.0, busy_s=5.0, tokens=50, now=10.0)
    after = Lives(opened=0.0)
    after.restore(msgspec.json.decode(msgspec.json.encode(before.dump()), type=dict[str, Life]))
    assert after.idle_shares(10.0) == before.idle_shares(10.0)
    after.observe("stays", role="rollout", started=0.0, busy_s=15.0, tokens=90, now=20.0)
    assert after.tokens_generated == 130
    assert after.idle_shares(20.0) == {"rollout": pytest.approx(1 - 20 / 30)}
    assert after.up_s(0.0, 20.0) == 20.0
    assert bytecodes(after.dump) < 10 * len(after.dump()), "it is called every few seconds, with each life of the run"


def figures(recent: RecentFigures | None) -> tuple[int, float, float]:
    assert recent is not None
    return recent.since, round(recent.wait_share, 6), round(recent.busy_share, 6)


COUNTS = {"samples": 8, "tokens": 240}


class Course:
    """Steps of two rollouts, and what they and the trainer tell of them."""

    def __init__(self) -> None:
        self.lives = Lives(opened=0.0)
        self.laps = Laps(self.lives)
        self.now = 0.0
        self.number = 0
        self.held = {"a": 0.0, "b": 0.0}
        self.tell()

    def tell(self) -> None:
        for name, held_s in self.held.items():
            self.lives.observe(name, role="rollout", started=-100.0, now=self.now, busy_s=held_s, held_s=held_s)

    def step(self, *, wall_s: float, wait: float = 0.0, busy: float = 1.0, attempt: int = 0) -> RecentFigures | None:
        self.now += wall_s
        self.number += 1
        self.held = {name: held_s + busy * wall_s for name, held_s in self.held.items()}
        self.tell()
        self.laps.step({"step": self.number, "attempt": attempt, "wall_s": wall_s, "wait_s": wait * wall_s} | COUNTS)
        return self.laps.recent()


def test_the_policy_goes_by_the_last_laps_and_by_the_least_that_they_agree_on() -> None:
    course = Course()
    assert [course.step(wall_s=60.0, wait=0.9, busy=0.1) for _ in range(3)] == [None, None, None]
    early = course.step(wall_s=60.0, wait=0.5, busy=0.2)
    assert figures(early) == (1, 0.5, 0.2)
    for wait, busy in ((0.3, 0.4), (0.0, 0.9), (0.2, 0.5)):
        late = course.step(wall_s=60.0, wait=wait, busy=busy)
    assert figures(late) == (4, 0.0, 0.9)


def test_short_steps_make_one_lap_together() -> None:
    course = Course()
    for _ in range(1 + 3 * 10):
        recent = course.step(wall_s=LAP_S / 10, wait=0.25, busy=0.5)
    assert figures(recent) == (1, 0.25, 0.5)


def test_a_trainer_that_begins_again_begins_the_laps_again() -> None:
    course = Course()
    for _ in range(4):
        assert course.step(wall_s=60.0) is not None or course.number < 4
    assert course.step(wall_s=600.0, wait=0.9, busy=0.0, attempt=1) is None
    for _ in range(3):
        recent = course.step(wall_s=60.0, attempt=1)
    assert figures(recent) == (5, 0.0, 1.0)


def test_a_rollout_that_loads_its_first_weights_is_neither_busy_nor_idle() -> None:
    course = Course()
    for _ in range(4):
        course.lives.observe("new", role="rollout", started=-100.0, now=course.now, busy_s=0.0)
        recent = course.step(wall_s=60.0, busy=1.0)
    assert figures(recent) == (1, 0.0, 1.0)
