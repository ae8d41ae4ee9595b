"""Sessions with storage units: orders until they were carried out, silence, and who may come back."""

import math

import pytest

from asyncflow.errors import Fenced
from asyncflow.queue.controller.sessions import Sessions
from asyncflow.queue.protocol.calls import Drain
from asyncflow.queue.protocol.unit_calls import AskMove, Hello, Orders, Session, Watch


class Told:
    """The controller's side of a session with the unit of ``queue``, and rows that may be freed."""

    def __init__(self, queue):
        self.sessions = Sessions(queue.table, lost_s=8.0)
        self.welcome = self.sessions.greet(Hello(0, "unit-a", 1 << 20, "here"), 0.0)
        self.session = Session(0, self.welcome.controller, self.welcome.epoch)
        queue.create(0, 1)
        self.rows = list(queue.table.state.rows.values())
        self.ids = list(queue.table.state.rows)

    def watch(self, done, *, now=0.0):
        return self.sessions.orders(Watch(self.session, done=done, used=24, wait_s=60.0, held=3), now)

    def ask(self, session):
        """Ask what moves next, with all rows that there are."""
        return self.sessions.next_order(AskMove(session, self.ids, 4, nbytes=60), 0.0)

    def greet_other(self, index, *, used, limit=100, held=0):
        """Begin a session with one more unit, which has told all that it holds."""
        welcome = self.sessions.greet(Hello(index, f"unit-{index}", limit), 0.0)
        session = Session(index, welcome.controller, welcome.epoch)
        self.sessions.synced(session)
        self.sessions.orders(Watch(session, done=0, used=used, wait_s=60.0, held=held), 0.0)
        return session


async def test_a_unit_is_told_what_to_free_until_it_has_said_that_it_has(queue, monkeypatch):
    told = Told(queue)
    told.sessions.order(told.rows[:2])
    assert told.watch(0) == told.watch(0) == Orders(2, told.ids[:2])
    told.sessions.order(told.rows[2:3])
    for done in (2, 2, 1, 9, -1):
        assert told.watch(done) == Orders(3, told.ids[2:3])
    for _ in range(2):
        assert told.sessions.greet(Hello(0, "unit-a", 1 << 20), 0.0) == told.welcome
    assert told.watch(2) == Orders(3, told.ids[2:3])
    waiting = told.watch(3)
    assert not waiting.done()
    told.sessions.order(told.rows[3:])
    assert await waiting == told.watch(3) == Orders(4, told.ids[3:])
    monkeypatch.setattr("asyncflow.queue.controller.sessions._ORDERS", 1)
    told.sessions.order(told.rows[:2])
    assert [told.watch(done) for done in (4, 5)] == [Orders(5, told.ids[:1]), Orders(6, told.ids[1:2])]


async def test_a_unit_is_lost_when_it_was_silent_for_long_while_the_controller_ran(queue):
    told = Told(queue)
    told.watch(0, now=1.0).cancel()
    assert told.sessions.next_deadline <= 9.0
    (view,) = told.sessions.views(1.0)
    assert (view.unit, view.state, view.rows, view.bytes, view.limit) == (0, "away", 3, 24, 1 << 20)
    told.sessions.synced(told.session)
    assert [told.sessions.views(now)[0].state for now in (1.0, 4.0, 4.1)] == ["serving", "serving", "silent"]
    told.sessions.lose_silent(8.5)
    assert told.sessions.next_deadline == 9.0
    told.sessions.excuse(8.5)
    told.sessions.lose_silent(9.0)
    assert not queue.table.wanted("train").keys
    told.sessions.lose_silent(16.5)
    assert len(queue.table.wanted("train").keys) == 4
    assert (told.sessions.views(17.0), told.sessions.next_deadline) == ([], math.inf)
    told.sessions.order(told.rows)
    with pytest.raises(Fenced, match="this session is over"):
        told.watch(0, now=17.0)
    again = Hello(0, "unit-a", 1 << 20, epoch=told.welcome.epoch)
    assert told.sessions.greet(again, 17.0) == told.sessions.greet(again, 17.0) != told.welcome


@pytest.mark.parametrize(("units", "lost"), [(None, 28.0), (1, 28.0), (0, 22.0)])
async def test_a_started_controller_waits_for_the_units_that_the_queue_has(queue, units, lost):
    queue.create(0)
    sessions = Sessions(queue.table, lost_s=8.0, units=units)
    sessions.start(20.0)
    assert sessions.next_deadline == lost
    for now in (lost - 0.1, lost):
        assert not queue.table.wanted("train").keys
        sessions.lose_silent(now)
    assert len(queue.table.wanted("train").keys) == 2


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("restarts", [False, True])
async def test_orders_for_rows_of_an_earlier_incarnation_reach_nobody_and_it_stays_out(queue, lost, restarts):
    told = Told(queue)
    if lost:
        told.sessions.lose_silent(9.0)
    welcome = told.sessions.greet(Hello(0, "unit-b", 1 << 20), 9.0)
    if restarts:
        told.sessions = Sessions(queue.table, lost_s=8.0)
        told.sessions.start(9.0)
    told.sessions.order(told.rows)
    told.session, before = Session(0, welcome.controller, welcome.epoch), told.session
    assert not told.watch(0).done()
    with pytest.raises(Fenced, match="another incarnation has replaced this one"):
        told.sessions.greet(Hello(0, "unit-a", 1 << 20, epoch=told.welcome.epoch), 9.0)
    controller, epoch = welcome.controller, welcome.epoch
    for session in (before, Session(0, controller + 1, epoch), Session(7, controller, epoch)):
        with pytest.raises(Fenced, match="this session is over"):
            told.sessions.check(session, 2.0)
        with pytest.raises(Fenced, match="this session is over"):
            told.ask(session)


async def test_a_unit_that_leaves_is_told_at_once_and_its_rows_go_where_there_is_room(queue):
    told = Told(queue)
    for index, used, held in ((1, 60, 1), (2, 30, 2), (3, 0, 0)):
        empty = told.greet_other(index, used=used, held=held)
    told.sessions.greet(Hello(4, "has not told what it holds", 100), 0.0)
    watching = told.watch(0)
    told.sessions.drain(Drain(3, "unit-3"))
    assert not watching.done()
    told.sessions.drain(Drain(0, "unit-a"))
    assert watching.result() == Orders(0, [], leave=True)
    order = told.ask(told.session)
    assert (order.unit, order.over, set(order.rows) <= set(told.ids)) == (2, False, True)
    assert told.sessions.next_order(AskMove(empty, [], 0, 0), 0.0).over
    views = {view.unit: (view.state, view.rows) for view in told.sessions.views(0.0)}
    assert views == {0: ("leaving", 3), 1: ("serving", 1), 2: ("serving", 2 + len(order.rows)), 4: ("away", 0)}
