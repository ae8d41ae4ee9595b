import asyncio
import random
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow_operator.worklist import FIRST_BACKOFF_S, LONGEST_BACKOFF_S, Worklist


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(cooldown_s: float = 0.0) -> tuple[Worklist[str], Clock, list[float]]:
    clock, waits = Clock(), []
    return Worklist(clock=clock, waited=waits.append, rng=random.Random(1), cooldown_s=cooldown_s), clock, waits


def test_marks_of_one_key_are_one() -> None:
    worklist, _, _ = make()
    for _ in range(5):
        worklist.mark("a")
    assert worklist.next() == "a"
    assert worklist.next() is None


def test_a_key_in_work_is_not_taken_twice_and_comes_again_if_marked() -> None:
    worklist, _, _ = make()
    worklist.mark("a")
    assert worklist.next() == "a"
    worklist.mark("a")
    assert worklist.next() is None
    worklist.finish("a")
    assert worklist.next() == "a"


def test_the_key_longest_due_goes_first() -> None:
    worklist, clock, waits = make()
    for key in ("a", "b", "c"):
        worklist.mark(key)
        clock.now += 1
    worklist.mark("a")
    assert [worklist.next(), worklist.next(), worklist.next()] == ["a", "b", "c"]
    assert waits == [3.0, 2.0, 1.0]


def test_a_late_turn_that_was_brought_forward_leaves_nothing_behind() -> None:
    worklist, clock = make()[:2]
    key = "-".join(("RLJob", "quickstart"))
    held = sys.getrefcount(key)
    for _ in range(1000):
        worklist.mark(key)
        clock.now += 1
        assert worklist.next() is key
        worklist.finish(key, again_in_s=100_000.0)
    assert sys.getrefcount(key) < held + 100, "a key that waits is held a few times"
    clock.now += 100_000
    assert [worklist.next(), worklist.next()] == [key, None]


def test_a_busy_key_does_not_starve_the_others() -> None:
    worklist, clock, _ = make()
    worklist.mark("busy")
    worklist.mark("quiet")
    taken = []
    for _ in range(4):
        key = worklist.next()
        assert key is not None
        taken.append(key)
        clock.now += 0.01
        worklist.mark("busy")
        worklist.finish(key)
    assert taken[:2] == ["busy", "quiet"]


def test_a_mark_that_is_due_after_another_does_not_put_it_off() -> None:
    worklist, clock, _ = make()
    worklist.mark("a", after_s=5.0)
    worklist.mark("a", after_s=60.0)
    assert worklist.next() is None
    clock.now += 5.0
    assert worklist.next() == "a"


def test_a_burst_during_the_cooldown_is_one_reconcile() -> None:
    worklist, clock, _ = make(cooldown_s=0.2)
    worklist.mark("a")
    assert worklist.next() == "a"
    worklist.finish("a")
    worklist.mark("a")
    assert worklist.next() is None
    clock.now += 0.2
    assert worklist.next() == "a"


def test_a_broken_key_is_tried_at_most_ten_times_a_minute_however_often_it_is_marked() -> None:
    worklist, clock, _ = make()
    worklist.mark("a")
    tries = 0
    for _ in range(600):
        if worklist.next() is not None:
            tries += 1
            worklist.finish("a", failed=True)
        worklist.mark("a")
        clock.now += 0.1
    assert 5 <= tries <= 10


def test_a_renewed_key_does_not_wait_for_its_backoff() -> None:
    worklist, _, _ = make()
    worklist.mark("a")
    for _ in range(6):
        worklist.renew("a")
        assert worklist.next() == "a"
        worklist.finish("a", failed=True)
    assert worklist.next() is None
    worklist.renew("a")
    assert worklist.next() == "a"


def test_backoff_doubles_with_jitter_up_to_its_limit_and_ends_with_success() -> None:
    worklist, clock, _ = make()
    worklist.mark("a")
    backoffs = []
    for _ in range(12):
        assert worklist.next() == "a"
        backoffs.append(worklist.finish("a", failed=True))
        clock.now += LONGEST_BACKOFF_S
    assert 0.75 * FIRST_BACKOFF_S <= backoffs[0] <= FIRST_BACKOFF_S
    assert all(backoff <= LONGEST_BACKOFF_S for backoff in backoffs)
    assert backoffs[-1] >= 0.75 * LONGEST_BACKOFF_S
    assert worklist.next() == "a"
    assert worklist.finish("a") == 0.0
    worklist.mark("a")
    assert worklist.next() == "a"


def test_work_is_stuck_where_keys_are_due_and_none_is_begun_or_ended() -> None:
    worklist, clock, _ = make()
    for key in "ab":
        worklist.mark(key)
    clock.now += 200
    assert worklist.next() == "a"
    clock.now += 190
    assert (worklist.oldest_s(), worklist.stuck_s()) == (390, 190)
    worklist.finish("a", again_in_s=10_000)
    assert worklist.stuck_s() == 0
    worklist.next()
    clock.now += 5000
    assert worklist.stuck_s() == 0, "nothing is due"


def test_a_forgotten_key_is_not_taken() -> None:
    worklist, _, _ = make()
    worklist.mark("a")
    worklist.forget("a")
    assert worklist.next() is None
    assert len(worklist) == 0


async def test_take_wakes_at_a_mark_and_at_a_time() -> None:
    worklist: Worklist[str] = Worklist(cooldown_s=0.0)
    waiting = asyncio.create_task(worklist.take())
    await asyncio.sleep(0)
    worklist.mark("a")
    assert await asyncio.wait_for(waiting, 5) == "a"
    worklist.mark("b", after_s=0.01)
    assert await asyncio.wait_for(worklist.take(), 5) == "b"


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("mark"), st.sampled_from("abc"), st.floats(0, 3)),
            st.tuples(st.just("take"), st.just(""), st.just(0.0)),
            st.tuples(st.just("finish"), st.sampled_from(["ok", "failed"]), st.just(0.0)),
            st.tuples(st.just("wait"), st.just(""), st.floats(0, 2)),
        ),
        max_size=60,
    )
)
def test_whatever_happens_each_mark_is_followed_by_a_reconcile_and_none_runs_twice_at_a_time(
    steps: list[tuple[str, str, float]],
) -> None:
    worklist, clock, _ = make(cooldown_s=0.1)
    working: list[str] = []
    owed: set[str] = set()
    for step, word, number in steps:
        if step == "mark":
            worklist.mark(word, after_s=number)
            owed.add(word)
        elif step == "take":
            key = worklist.next()
            if key is not None:
                assert key not in working
                working.append(key)
                owed.discard(key)
        elif step == "finish" and working:
            key = working.pop(0)
            worklist.finish(key, failed=word == "failed")
            if word == "failed":
                owed.add(key)
        elif step == "wait":
            clock.now += number
    for key in working:
        worklist.finish(key)
    clock.now += 2 * LONGEST_BACKOFF_S
    left = set()
    while (key := worklist.next()) is not None:
        left.add(key)
    assert owed <= left
    assert worklist.oldest_s() == 0.0
