"""How a process waits: it looks on only while that is of use."""

from asyncflow.net.lookout import ANSWER_S, SOON_S, Lookout

NEVER = 1 << 30
SHORT, LONG = SOON_S / 2, 2 * SOON_S


class Waiting:
    """One who waits, and what for: what was slept for is there."""

    def __init__(self, looks: int = 10) -> None:
        self.now = 0.0
        self.lookout = Lookout(looks=looks, clock=lambda: self.now)

    def wait(self, *, looks: int, seconds: float, each: float = 0.0) -> tuple[int, int]:
        """Wait for what comes after so many vain looks, or ``seconds`` of sleep; give how often it looked, slept.

        each: seconds that a look takes.
        """
        looked, slept = 0, 0

        def look() -> str:
            nonlocal looked
            looked += 1
            self.now += each
            return "there" if looked > looks else ""

        def sleep() -> str:
            nonlocal slept
            slept += 1
            self.now += seconds
            return "there"

        assert self.lookout.wait(look, sleep) == "there"
        return looked, slept


def test_what_is_there_already_costs_one_look_and_no_sleep() -> None:
    assert Waiting().wait(looks=0, seconds=LONG) == (1, 0)


def test_at_first_it_sleeps_and_after_a_short_sleep_it_looks_on() -> None:
    waiting = Waiting()
    assert waiting.wait(looks=5, seconds=SHORT) == (1, 1)
    assert waiting.wait(looks=5, seconds=LONG) == (6, 0)
    assert waiting.wait(looks=10, seconds=LONG) == (11, 0)


def test_what_does_not_come_is_slept_for_and_after_a_long_sleep_it_sleeps_at_once() -> None:
    waiting = Waiting()
    waiting.wait(looks=NEVER, seconds=SHORT)
    assert waiting.wait(looks=NEVER, seconds=LONG) == (11, 1)
    assert waiting.wait(looks=5, seconds=LONG) == (1, 1)
    assert waiting.wait(looks=5, seconds=SHORT) == (1, 1)
    assert waiting.wait(looks=5, seconds=SHORT) == (6, 0)


def test_who_asked_for_it_looks_for_longer_once() -> None:
    waiting = Waiting()
    waiting.lookout.expect()
    assert waiting.wait(looks=500, seconds=LONG, each=ANSWER_S / 1000) == (501, 0)
    waiting.lookout.expect()
    assert waiting.wait(looks=NEVER, seconds=LONG, each=ANSWER_S / 4) == (6, 1)
    assert waiting.wait(looks=NEVER, seconds=LONG, each=ANSWER_S / 4) == (1, 1)


def test_who_may_not_look_on_sleeps_always() -> None:
    waiting = Waiting(looks=0)
    waiting.lookout.expect()
    assert [waiting.wait(looks=2, seconds=SHORT) for _ in range(3)] == [(1, 1)] * 3


def test_nothing_is_given_where_nothing_came_in_the_time_to_sleep() -> None:
    assert Lookout().wait(list, list) == []
