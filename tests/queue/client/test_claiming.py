"""Claims on their way: what of a claim is said again, and when rows are expected that nobody has asked for."""

import sys
from pathlib import Path

import pytest

from asyncflow.errors import DeadlineExceeded, PeerLost
from asyncflow.queue.client.claiming import Claimer
from asyncflow.queue.client.verbs import Expect, Farewell, Place, Reserve
from asyncflow.queue.client.verbs_control import GRACE_S, PARK_S, ControlVerbs
from asyncflow.queue.protocol.calls import Ahead, Claimed, ClaimRows
from asyncflow.queue.protocol.lot import Lot
from asyncflow.queue.protocol.unit_calls import FetchRows

sys.path.insert(0, str(Path(__file__).parent))
import by_hand

SEAT = 5
ROW = 1 << 44 | 1 << 32


def lot(count=1):
    rows = list(range(ROW, ROW + count))
    made = Lot(partition="p", purpose="open", lease="1", until=1.0, rows=rows, serials=rows, units=[3] * count)
    return made.shrunk()


class Hand:
    """Runs one claim by hand: ``answers`` come one after another; time passes as claims are parked."""

    def __init__(self, *answers, columns=("x",), places=True):
        self.now = 0.0
        self.said, self.expected = [], []
        self._answers = list(answers)
        self._places = places
        control = ControlVerbs(units=list, worker="w", clock=lambda: self.now)
        self.fresh, claimer = control.fresh, Claimer(control)
        request = ClaimRows("p", "t", "w", "k", 8, None, None, [], 0.0)
        verb = claimer.claim(request, columns=columns, timeout=60)
        self._reserved = 0
        self.claimed = by_hand.carry_out(verb, self._answer, self._other)

    def _answer(self, ask):
        self.said.append(ask.request)
        answer = self._answers.pop(0)
        if isinstance(answer, PeerLost):
            raise answer
        self.now += PARK_S if answer.lot is None else 0.0
        return answer, []

    def _other(self, effect):
        if isinstance(effect, Reserve):
            self._reserved += 1
            return Place(SEAT, self._reserved) if self._places else None
        if isinstance(effect, Expect):
            self.expected.append(effect)
        else:
            assert isinstance(effect, Farewell)
        return None


def test_each_claim_has_a_place_of_its_own_and_says_it_once():
    parked, lost = Claimed(None, False), PeerLost("it broke")
    hand = Hand(parked, lost, lost, parked, Claimed(lot(), False))
    assert [request.ahead for request in hand.said] == [
        Ahead(SEAT, 1, ["x"]),
        Ahead(SEAT, 2, ["x"]),
        None,
        None,
        Ahead(SEAT, 3, ["x"]),
    ]
    assert {request.ticket for request in hand.said} == {"k"}
    assert (hand.claimed.lot, hand.expected) == (lot(), [])


def test_rows_are_expected_that_are_sent_ahead_from_where_they_lie():
    hand = Hand(Claimed(None, False), Claimed(lot(100), False, ahead=True), columns=("x", "y"))
    (promise,) = hand.expected
    assert (promise.unit, promise.place) == (3, Place(SEAT, 2))
    assert hand.fresh.take(3, FetchRows([ROW, -99], ["x", "y"])) == promise.place
    assert hand.claimed.lot.rows == list(range(ROW, ROW + 100))


def test_no_call_of_a_claim_outlasts_its_time_and_the_grace_whatever_was_lost():
    now, ends = 0.0, []

    def lost(ask):
        nonlocal now
        ends.append(now + ask.timeout)
        now += 0.9
        raise PeerLost("it broke")

    claimer = Claimer(ControlVerbs(units=list, worker="w", clock=lambda: now))
    verb = claimer.claim(ClaimRows("p", "t", "w", "k", 8, None, None, [], 0.0), timeout=1.0)
    with pytest.raises(DeadlineExceeded, match="it broke"):
        by_hand.carry_out(verb, lost, lambda _: None)
    assert len(ends) > 2
    assert 1.0 < max(ends) < 1.01 + GRACE_S


def test_nothing_is_expected_by_who_names_no_columns_or_takes_nothing_unasked():
    for hand in (Hand(Claimed(lot(), False), columns=()), Hand(Claimed(lot(), False, ahead=True), places=False)):
        assert ([request.ahead for request in hand.said], hand.expected) == ([None], [])
