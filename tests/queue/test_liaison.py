"""A unit's side of the conversation, with a controller that is a few lines."""

import asyncio
import gc
import logging

import pytest

from asyncflow.errors import PeerLost, Refused
from asyncflow.net.jagged import Jagged
from asyncflow.queue.backends.memory import MemoryBackend
from asyncflow.queue.protocol.calls import Done
from asyncflow.queue.protocol.unit_calls import (
    Admitted,
    OpenRows,
    Session,
    Strangers,
    Verdict,
    Welcome,
)
from asyncflow.queue.unit.budget import Budget
from asyncflow.queue.unit.holdings import Holdings
from asyncflow.queue.unit.liaison import Liaison
from asyncflow.queue.unit.telling import Telling


class Controller:
    """Takes everything, and answers admissions with ``admitted``; breaks the session when told to."""

    def __init__(self, admitted=None):
        self.told, self.sessions, self.admitted = [], asyncio.Queue(), admitted

    async def call(self, method, request, reply, *, timeout):
        if method == "units.hello":
            return Welcome(controller=1, epoch=7, watch_s=1.0)
        if method == "units.announce":
            return Strangers([])
        broken = asyncio.get_running_loop().create_future()
        self.sessions.put_nowait(broken)
        return await broken

    def ask(self, method, request, reply, *, timeout, done):
        self.told.append((method, request))
        done(self.admitted if method == "units.admit" else Done())


async def test_rows_lost_between_two_sessions_are_told_in_the_next():
    controller = Controller()
    holdings = Holdings(backend=MemoryBackend(), budget=Budget(100, where="test"), where="test", lost=list)
    liaison = Liaison(unit=0, incarnation="me", controller=controller, holdings=holdings)
    liaison.start()
    async with asyncio.timeout(10):
        (await controller.sessions.get()).set_exception(PeerLost("it was killed"))
        while liaison.session is not None:
            await asyncio.sleep(0)
        liaison.lose([5, 6])
        await controller.sessions.get()
    assert [(method, call.rows) for method, call in controller.told] == [("units.lost", [5, 6])]
    await liaison.close()


class Gone(Controller):
    """Fails all that it was asked at once, as a link that broke does."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def ask(self, method, request, reply, *, timeout, done):
        self.asked.append(done)

    async def fail(self, session, *, apart):
        session.set_exception(PeerLost("the connection broke"))
        for _ in range(apart):
            await asyncio.sleep(0)
        for done in self.asked:
            done(PeerLost("the connection broke"))


@pytest.mark.parametrize("apart", range(4))
async def test_a_connection_that_breaks_leaves_no_error_that_nobody_takes(apart, caplog):
    caplog.set_level(logging.ERROR, logger="asyncflow.queue.unit.liaison")  # a record would hold the error
    unheard = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context["message"]))
    for _ in range(5):
        await break_a_session(apart)
        gc.collect()
    assert unheard == []


async def break_a_session(apart):
    controller = Gone()
    holdings = Holdings(backend=MemoryBackend(), budget=Budget(100, where="test"), where="test", lost=list)
    liaison = Liaison(unit=0, incarnation="me", controller=controller, holdings=holdings)
    liaison.start()
    async with asyncio.timeout(10):
        session = await controller.sessions.get()
        liaison.lose([5])
        await controller.fail(session, apart=apart)
        await controller.sessions.get()
    await liaison.close()


async def test_each_put_learns_what_was_decided_about_it():
    refused = Refused("no", where="test").to_wire()
    controller = Controller(Admitted([Verdict([True]), Verdict([], refused)]))
    holdings = Holdings(backend=MemoryBackend(), budget=Budget(1000, where="test"), where="test", lost=list)
    telling = Telling(controller=controller, holdings=holdings)
    column, puts = {"x": Jagged.from_rows([[7]], "int64")}, []
    for number in (5, 6):
        parcel = await holdings.store_new(column, rows=1, outputs={}, producer="", timeout=0)
        entry = OpenRows("p", b"a client", number, 1, [number], parcel.cells, [])
        puts.append(holdings.propose(entry, parcel, outputs={}))
    telling.begin(Session(0, 1, 7))
    assert (5 in holdings, 6 in holdings) == (True, False)
    assert puts[0].verdict.result().ok == [True]
    with pytest.raises(Refused):
        puts[1].verdict.result()
