"""Which answers that were promised may still be taken, with a clock of the test's own."""

import pytest

from asyncflow.errors import Refused
from asyncflow.queue.client.fresh import FRESH_S, Fresh
from asyncflow.queue.client.verbs import Place
from asyncflow.queue.protocol.unit_calls import FetchRows

HERE = Place(1, 7)


def rows(first=1):
    return FetchRows([first, 2], ["x"])


@pytest.fixture
def now():
    return [100.0]


@pytest.fixture
def fresh(now):
    return Fresh(lambda: now[0])


def test_what_was_promised_is_taken_once(fresh):
    fresh.note(fresh.since(), 0, rows(), HERE)
    assert (fresh.take(1, rows()), fresh.take(0, rows(5))) == (None, None)
    assert (fresh.take(0, rows()), fresh.take(0, rows())) == (HERE, None)


def test_a_lane_is_promised_one_thing(fresh):
    fresh.note(fresh.since(), 0, rows(), HERE)
    fresh.note(fresh.since(), 0, rows(3), Place(2, 7))
    fresh.note(fresh.since(), 0, rows(5), Place(1, 8))
    assert fresh.take(0, rows()) is None
    assert (fresh.take(0, rows(3)), fresh.take(0, rows(5))) == (Place(2, 7), Place(1, 8))


@pytest.mark.parametrize(("age", "found"), [(0.99 * FRESH_S, HERE), (FRESH_S, None)])
def test_what_is_old_is_not_taken(fresh, now, age, found):
    fresh.note(fresh.since(), 0, rows(), HERE)
    now[0] += age
    assert fresh.take(0, rows()) == found


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_taken_that_was_promised_or_claimed_before_a_write_was_done(fresh, fails):
    def write():
        yield "call"
        if fails:
            raise Refused("no", where="here")
        return 5

    before, verb = fresh.since(), fresh.changing(write())
    assert next(verb) == "call"
    during = fresh.since()
    fresh.note(before, 0, rows(), HERE)
    with pytest.raises(Refused if fails else StopIteration):
        next(verb)
    fresh.note(during, 0, rows(3), Place(2, 7))
    assert (fresh.take(0, rows()), fresh.take(0, rows(3))) == (None, None)
    fresh.note(fresh.since(), 0, rows(), HERE)
    assert fresh.take(0, rows()) == HERE
