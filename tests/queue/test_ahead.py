"""Which claims that were met have their rows sent ahead, and who hears of it first.

It is the rows of the unit that is being answered.
"""

import asyncio
import itertools

import pytest

from asyncflow.identity import RowPlace, home
from asyncflow.net.rpc import wire
from asyncflow.queue.controller.controller import Controller
from asyncflow.queue.protocol.calls import Ahead, ClaimRows, Declare
from asyncflow.queue.protocol.lot import Lot
from asyncflow.queue.protocol.messages import TaskSpec
from asyncflow.queue.protocol.runs import expand
from asyncflow.queue.protocol.sizes import pack
from asyncflow.queue.protocol.unit_calls import Admit, Announce, Cells, FetchRows, Hello, OpenRows, SendAhead, Session
from asyncflow.queue.table.ahead import SentAhead
from asyncflow.queue.table.claims import Claim, Grant

HOME = home(3, 1)


def grant(rows, *, ahead=True, units=()):
    """Give a claim that was met with ``rows``: (epoch, unit, counter)."""
    numbers = [RowPlace(*row).row for row in rows]
    lot = Lot(
        partition="p", purpose="open", lease="1", until=1.0, rows=numbers, serials=[0] * len(rows), units=list(units)
    )
    return Grant(Claim("p", "t", "w", "k", ahead=Ahead(5, 7, ["x", "y"]) if ahead else None), lot)


def test_rows_of_that_unit_are_sent_to_who_takes_them():
    ahead = SentAhead(HOME)
    assert ahead.take(grant([(3, 1, 8)]))
    many = grant([(3, 1, number) for number in range(100)])
    assert ahead.take(many)
    assert ahead.orders[0] == SendAhead(5, 7, FetchRows([RowPlace(3, 1, 8).row], ["x", "y"]))
    assert list(expand(ahead.orders[1].request.rows)) == many.lot.rows


@pytest.mark.parametrize(
    "met",
    [
        grant([(3, 1, 8)], ahead=False),
        grant([(3, 0, 8)]),
        grant([(2, 1, 8)]),
        grant([(3, 1, 8), (3, 0, 9)]),
        grant([(3, 1, 8), (2, 1, 9), (3, 1, 10)]),
        grant([(3, 1, 8)], units=[1]),
    ],
    ids=["who asks", "of another unit", "of its predecessor", "of two units", "of two epochs", "that moved"],
)
def test_other_rows_are_fetched(met):
    ahead = SentAhead(HOME)
    assert not ahead.take(met)
    assert ahead.orders == []


@pytest.mark.parametrize("sync", ["process", "always"])
async def test_the_unit_is_answered_before_the_claims_whose_rows_it_sends(tmp_path, sync):
    controller = Controller(ledger_dir=tmp_path, sync=sync)
    await controller.start()
    answered, calls = [], itertools.count()
    controller.server._send = lambda peer, header, parts: answered.append((peer, header.method))

    async def call(peer, method, request, *, answers=1):
        before, header = len(answered), wire.Call(next(calls), method, 10.0, 0)
        controller.server._deliver(peer, [memoryview(wire.encode(header)), memoryview(wire.encode(request))])
        async with asyncio.timeout(10):
            while len(answered) < before + answers:
                await asyncio.sleep(0.001)
        return answered[before:]

    await call("unit", "units.hello", Hello(0, "u", 1 << 20))
    session = Session(0, controller.table.controller, controller.table.books.units[0].epoch)
    await call("unit", "units.announce", Announce(session, [], last=True))
    await call("anybody", "queue.declare", Declare([TaskSpec(partition="p", name="t", needs=["x"])]))
    claim = ClaimRows("p", "t", "w", "k", 1, None, None, [], wait_s=9.0, ahead=Ahead(5, 7, ["x"]))
    await call("claimer", "queue.claim", claim, answers=0)
    row = RowPlace(session.epoch, 0, 0).row
    put = OpenRows("p", b"a client", 0, 1, [row], Cells(dtypes={"x": "int64"}, sizes={"x": pack([8])}), [])
    told = await call("unit", "units.admit", Admit(session, [put]), answers=2)
    assert told == [("unit", "units.admit"), ("claimer", "queue.claim")]
    await controller.close()
