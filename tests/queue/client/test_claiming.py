"""Claims on their way: what of a claim is said again, and for how long."""

import sys
from pathlib import Path

import pytest

from asyncflow.errors import DeadlineExceeded, PeerLost
from asyncflow.queue.client.claiming import Claimer
from asyncflow.queue.client.verbs_control import GRACE_S, PARK_S, ControlVerbs
from asyncflow.queue.protocol.calls import Claimed, ClaimRows
from asyncflow.queue.protocol.lot import Lot

sys.path.insert(0, str(Path(__file__).parent))
import by_hand

ROW = 1 << 44 | 1 << 32
REQUEST = ClaimRows("p", "t", "w", "k", 8, None, None, [], 0.0)


def test_a_claim_that_is_made_again_keeps_its_ticket_and_gives_the_ids_of_its_rows():
    rows, now, said = list(range(ROW, ROW + 100)), 0.0, []
    lot = Lot(partition="p", purpose="open", lease="1", until=1.0, rows=rows, serials=rows, units=[3] * 100)
    parked, lost = Claimed(None, False), PeerLost("it broke")
    answers = [parked, lost, lost, parked, Claimed(lot.shrunk(), False)]

    def answer(ask):
        nonlocal now
        said.append(ask.request)
        if isinstance(answers[0], PeerLost):
            raise answers.pop(0)
        now += PARK_S if answers[0] == parked else 0.0
        return answers.pop(0), []

    claimer = Claimer(ControlVerbs(units=list, worker="w", clock=lambda: now))
    claimed = by_hand.carry_out(claimer.claim(REQUEST, timeout=60), answer, lambda _: None)
    assert [(request.ticket, request.wait_s) for request in said] == [("k", PARK_S)] * 5
    assert claimed.lot.rows == rows


def test_no_call_of_a_claim_outlasts_its_time_and_the_grace_whatever_was_lost():
    now, ends = 0.0, []

    def lost(ask):
        nonlocal now
        ends.append(now + ask.timeout)
        now += 0.9
        raise PeerLost("it broke")

    claimer = Claimer(ControlVerbs(units=list, worker="w", clock=lambda: now))
    verb = claimer.claim(REQUEST, timeout=1.0)
    with pytest.raises(DeadlineExceeded, match="it broke"):
        by_hand.carry_out(verb, lost, lambda _: None)
    assert len(ends) > 2
    assert 1.0 < max(ends) < 1.01 + GRACE_S
