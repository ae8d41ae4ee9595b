import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.telemetry.busy import BusyClock

EVENTS = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(["forward", "backward", "sequence"]), st.booleans()), max_size=30
)


class Ticks:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@given(EVENTS)
def test_every_tick_counts_once_for_each_cause_that_runs_and_once_in_all(events: list[tuple[int, str, bool]]) -> None:
    ticks = Ticks()
    busy = BusyClock(ticks)
    running: list[str] = []
    expected: dict[str, int] = {}
    any_running = 0
    for wait, cause, begin in events:
        for name in set(running):
            expected[name] += wait
        any_running += wait if running else 0
        ticks.now += wait
        if begin:
            expected.setdefault(cause, 0)
            running.append(cause)
            busy.begin(cause)
        elif cause in running:
            running.remove(cause)
            busy.end(cause)
        assert busy.seconds() == expected
        assert busy.total() == any_running
        assert all(seconds <= busy.total() <= ticks.now for seconds in busy.seconds().values())


def test_sections_nest_and_end_with_errors() -> None:
    ticks = Ticks()
    busy = BusyClock(ticks)

    def step() -> None:
        with busy("step"):
            ticks.now += 1
            with busy("forward"), busy("forward"):
                ticks.now += 2
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        step()
    ticks.now += 4
    assert busy.seconds() == {"step": 3, "forward": 2}
    assert busy.total() == 3


def test_a_section_that_shows_late_counts_from_its_beginning() -> None:
    ticks = Ticks()
    busy = BusyClock(ticks)
    ticks.now = 7
    busy.begin("receive", since=5)
    ticks.now = 9
    assert busy.seconds() == {"receive": 4}
    busy.end("receive")
    assert busy.total() == 4


@pytest.mark.parametrize("used", [False, True])
def test_an_end_without_a_begin_is_an_error(used: bool) -> None:
    busy = BusyClock()
    if used:
        with busy("forward"):
            pass
    with pytest.raises(ValueError, match="no section 'forward'"):
        busy.end("forward")


def test_threads_may_share_a_clock() -> None:
    busy = BusyClock()

    def work() -> None:
        for _ in range(2000):
            with busy("forward"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = busy.total()
    assert busy.seconds() == {"forward": total}
    assert busy.total() == total
