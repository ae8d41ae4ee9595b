"""A unit's side of the conversation, with a controller that is a few lines."""

import asyncio
import gc
import logging

import pytest

from asyncflow.errors import PeerLost, Refused
from asyncflow.queue.protocol.calls import Done
from asyncflow.queue.protocol.unit_calls import (
    EntryResult,
    NewRows,
    Orders,
    Session,
    Welcome,
)
from asyncflow.queue.storage.budget import ByteBudget
from asyncflow.queue.storage.holdings import Holdings
from asyncflow.queue.storage.memory import MemoryBackend
from asyncflow.queue.storage.session import UnitSession
from asyncflow.rpc.columns import Jagged


class Controller:
    """Takes everything, and answers admissions with ``admitted``; breaks the session when told to."""

    def __init__(self, admitted=None):
        self.told, self.sessions, self.admitted = [], asyncio.Queue(), admitted
        self.greeted = []

    async def call(self, method, request, reply, *, timeout):
        if method == "units.hello":
            self.greeted.append(request.epoch)
            return Welcome(controller=1, epoch=7, watch_s=1.0)
        if method == "units.announce":
            return []
        if method == "units.watch":
            broken = asyncio.get_running_loop().create_future()
            self.sessions.put_nowait(broken)
            return await broken
        self.told.append((method, request))
        return await self.answer(method)

    async def answer(self, method):
        return self.admitted if method == "units.admit" else Done()


async def test_rows_lost_between_two_sessions_are_told_in_the_next(caplog):
    caplog.set_level(logging.INFO)
    controller = Controller()
    holdings = Holdings(backend=MemoryBackend(), budget=ByteBudget(100, where="test"), where="test", lost=list)
    session = UnitSession(unit=0, incarnation="me", controller=controller, holdings=holdings)
    session.start()
    async with asyncio.timeout(10):
        (await controller.sessions.get()).set_exception(PeerLost("it was killed"))
        while session.session is not None:
            await asyncio.sleep(0)
        session.lose([5, 6])
        await controller.sessions.get()
    assert [(method, call.rows) for method, call in controller.told] == [("units.lost", [5, 6])]
    assert controller.greeted == [0, 7]
    assert "unit 0 restarts its session: it was killed" in caplog.messages
    await session.close()


class Gone(Controller):
    """Fails all that it was asked at once, as a link that broke does."""

    def __init__(self):
        super().__init__()
        self.asked = []

    async def answer(self, method):
        self.asked.append(asyncio.get_running_loop().create_future())
        return await self.asked[-1]

    async def fail(self, session, *, apart):
        session.set_exception(PeerLost("the connection broke"))
        for _ in range(apart):
            await asyncio.sleep(0)
        for answer in self.asked:
            if not answer.done():
                answer.set_exception(PeerLost("the connection broke"))


@pytest.mark.parametrize("apart", range(4))
async def test_a_connection_that_breaks_leaves_no_error_that_nobody_takes(apart, caplog):
    caplog.set_level(logging.ERROR, logger="asyncflow.queue.storage.session")  # a record would hold the error
    unheard = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context["message"]))
    for _ in range(5):
        await break_a_session(apart)
        gc.collect()
    assert unheard == []


async def break_a_session(apart):
    controller = Gone()
    holdings = Holdings(backend=MemoryBackend(), budget=ByteBudget(100, where="test"), where="test", lost=list)
    session = UnitSession(unit=0, incarnation="me", controller=controller, holdings=holdings)
    session.start()
    async with asyncio.timeout(10):
        broken = await controller.sessions.get()
        session.lose([5])
        while not controller.asked:
            await asyncio.sleep(0)
        await controller.fail(broken, apart=apart)
        await controller.sessions.get()
    await session.close()


async def test_each_put_learns_what_was_decided_about_it():
    refused = Refused("no", where="test").to_wire()
    controller = Controller([EntryResult([True]), EntryResult([], refused)])
    holdings = Holdings(backend=MemoryBackend(), budget=ByteBudget(1000, where="test"), where="test", lost=list)
    session = UnitSession(unit=0, incarnation="me", controller=controller, holdings=holdings)
    column, puts = {"x": Jagged.from_rows([[7]], "int64")}, []
    for number in (5, 6):
        blob = await holdings.store(column, new=1, outputs={}, timeout=0)
        entry = NewRows("p", b"a client", number, 1, [number], blob.cells, [])
        puts.append(holdings.propose(entry, blob))
    reporting = asyncio.create_task(session.report(Session(0, 1, 7)))
    assert (await puts[0].decided()).ok == [True]
    with pytest.raises(Refused):
        await puts[1].decided()
    assert (5 in holdings.rows, 6 in holdings.rows) == (True, False)
    assert not reporting.done()
    reporting.cancel()
    await asyncio.wait([reporting])


class Prompt(Controller):
    """Answers what it is told and what it is asked for when the test says so."""

    def __init__(self):
        super().__init__()
        self.asked = asyncio.Queue()

    async def answer(self, method):
        answer = asyncio.get_running_loop().create_future()
        self.asked.put_nowait(answer)
        return await answer


async def test_a_row_that_is_freed_with_the_decision_about_it_leaves_nothing_behind():
    """The controller's two answers come in one read: the decision first, so the order must not come before."""
    controller = Prompt()
    holdings = Holdings(backend=MemoryBackend(), budget=ByteBudget(100, where="test"), where="test", lost=list)
    session = UnitSession(unit=0, incarnation="me", controller=controller, holdings=holdings)
    session.start()
    column = {"x": Jagged.from_rows([[7]], "int64")}
    async with asyncio.timeout(10):
        watch = await controller.sessions.get()
        blob = await holdings.store(column, new=1, outputs={}, timeout=0)
        entry = NewRows("p", b"a client", 1, 1, [5], blob.cells, [])
        put = session.submit(entry, blob)
        admit = await controller.asked.get()
        admit.set_result([EntryResult([True])])
        watch.set_result(Orders(1, [5]))
        assert (await put.decided()).ok == [True]
        await controller.sessions.get()
    assert (5 in holdings.rows, holdings.budget.used) == (False, 0)
    await session.close()


async def test_an_answer_with_too_few_results_begins_a_new_session_that_tells_the_put_again():
    controller = Prompt()
    holdings = Holdings(backend=MemoryBackend(), budget=ByteBudget(100, where="test"), where="test", lost=list)
    session = UnitSession(unit=0, incarnation="me", controller=controller, holdings=holdings)
    failed = session.start()
    async with asyncio.timeout(10):
        await controller.sessions.get()
        blob = await holdings.store({}, new=1, outputs={}, timeout=0)
        put = session.submit(NewRows("p", b"a client", 1, 1, [5], blob.cells, [{}]), blob)
        (await controller.asked.get()).set_result([])
        (await controller.asked.get()).set_result([EntryResult([True])])
        assert (await put.decided()).ok == [True]
    assert not failed.done()
    await session.close()
