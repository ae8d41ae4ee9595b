"""Calls whose callers have gone: they take nothing, and others lose nothing by them."""

import asyncio
from types import SimpleNamespace

from asyncflow.errors import Refused
from asyncflow.identity import RowPlace
from asyncflow.queue.controller.parking import deliver
from asyncflow.queue.controller.sessions import Sessions
from asyncflow.queue.protocol.calls import Claimed, ClaimRows, ClaimTicket
from asyncflow.queue.protocol.unit_calls import Hello, Session, Watch
from asyncflow.queue.table.table import Table

P = "train"


def park(controller, worker):
    """Park a claim for both rows of a group, as a call that is read does."""
    return controller.claim(ClaimRows(P, "rollout", worker, f"ticket of {worker}", max_rows=2, min_rows=2, wait_s=60))


async def test_a_parked_claim_that_is_cancelled_is_granted_nothing(cluster):
    """Rows come in the same turn of the loop as the cancellation, before any callback of its future."""
    async with cluster() as queue:
        controller, claims = queue.controller, queue.controller.table.claims
        await queue.create(0)
        held = controller.claim(ClaimRows(P, "rollout", "holder", "first", max_rows=2))
        assert isinstance(held, Claimed)
        gone, waits = park(controller, "gone"), park(controller, "waits")
        gone.cancel()
        claims.abandon("holder", "first")
        controller.settle()
        leases = controller.table.state.leases
        assert [len(leases.of_worker(worker)) for worker in ("holder", "gone", "waits")] == [0, 0, 1]
        assert len((await waits).rows) == 2
        await asyncio.sleep(0)
        assert (len(controller.parking.waiters), controller.parking._claims, claims.parked()) == (0, {}, {})


async def test_what_a_dead_worker_held_goes_at_once_to_who_waits(cluster):
    async with cluster() as queue:
        await queue.create(0)
        assert queue.controller.claim(ClaimRows(P, "rollout", "dead", "first", max_rows=2)).rows
        waits = park(queue.controller, "waits")
        queue.controller.handlers.expire("dead")
        assert len(waits.result().rows) == 2


async def test_a_parked_call_that_is_cancelled_is_not_tried_again(cluster):
    async with cluster() as queue:
        controller, tried = queue.controller, []
        controller.until(P, lambda: None, 60, list).cancel()
        await asyncio.sleep(0)
        assert not controller.parking.waiters
        parked = controller.until(P, lambda: tried.append(1), 60, list)
        controller.table.state.changed.add(P)
        controller.settle()
        assert tried == [1, 1]
        park(controller, "waits").cancel()  # a claim that finds no rows changes nothing for other calls
        controller.settle()
        assert tried == [1, 1]
        parked.cancel()
        controller.table.state.changed.add(P)
        controller.settle()
        assert tried == [1, 1]
        await asyncio.sleep(0)
        assert len(controller.parking.waiters) == 0


async def test_a_parked_call_ends_once_whatever_comes_together(cluster):
    """Its time is over, its answer is found and it is withdrawn in one turn of the loop."""
    async with cluster() as queue:
        controller = queue.controller
        for _ in range(3):
            parked = park(controller, "waits")
            controller.parking.withdraw("waits", "ticket of waits")
            controller.parking.withdraw("waits", "ticket of waits")
            controller.table.state.changed.add(P)
            controller.settle()
            assert (await parked).withdrawn
        short = controller.claim(ClaimRows(P, "rollout", "waits", "short", wait_s=0.01))
        assert not (await asyncio.wait_for(short, 10)).rows
        assert (len(controller.parking.waiters), controller.table.claims.parked()) == (0, {})


async def test_an_answer_to_who_has_gone_keeps_nobody_else_waiting():
    gone, waits = (asyncio.get_running_loop().create_future() for _ in range(2))
    gone.cancel()
    deliver([(gone, 1), (waits, 2)], None, broken=Refused)
    assert waits.result() == 2


async def test_a_claim_that_is_abandoned_waits_no_more_although_its_connection_seems_to_be_there(cluster):
    """It came by one that broke for its caller alone, so this side has not noticed its end."""
    async with cluster() as queue:
        controller = queue.controller
        _, abandon = controller.handlers.routes()["queue.abandon"]
        parked = park(controller, "gone")
        abandon(ClaimTicket("gone", "ticket of gone"))
        await queue.create(0)
        assert not (await parked).rows
        assert controller.table.state.leases.of_worker("gone") == []


def greeted(sessions, unit):
    """A session with a unit, and a row that lies there."""
    welcome = sessions.greet(Hello(unit, "one", 1000), 0.0)
    row = RowPlace(welcome.epoch, unit, 0).row
    return Session(unit, welcome.controller, welcome.epoch), SimpleNamespace(row=row, moved=0)


async def test_orders_leave_after_the_results_that_wait_for_the_same_ledger():
    """A unit passes over rows whose result it has not heard: told to free them first, it would keep them for ever."""
    sessions, sent, loop = Sessions(Table(), lost_s=30), [], asyncio.get_running_loop()
    session, row = greeted(sessions, 0)
    ledger, result = loop.create_future(), loop.create_future()
    orders = sessions.orders(Watch(session, 0, 0, 60), 0.0)
    orders.add_done_callback(lambda _: sent.append("orders"))
    result.add_done_callback(lambda _: sent.append("result"))
    sessions.order([row], after=ledger)
    ledger.add_done_callback(lambda _: result.set_result(None))
    ledger.set_result(None)
    async with asyncio.timeout(10):
        assert (await orders).rows == [row.row]
    assert sent == ["result", "orders"]
