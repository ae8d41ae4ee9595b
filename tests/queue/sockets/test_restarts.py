"""Controllers and units that go and come back, in this process."""

import asyncio

import pytest

from asyncflow.errors import Fenced, Refused, StaleHandle
from asyncflow.identity import RowPlace
from asyncflow.queue.controller.controller import Controller
from asyncflow.queue.ledger.log import newest
from asyncflow.queue.protocol.calls import Done
from asyncflow.queue.protocol.unit_calls import (
    Admit,
    Announce,
    Cells,
    EntryResult,
    Hello,
    LostRows,
    NewRows,
    Session,
    Welcome,
)
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.columns import Jagged

P = "train"


async def test_a_restarted_controller_knows_everything_again(cluster):
    async with cluster() as queue:
        await queue.client.open_step(partition=P, step=1, groups=3, group_size=2, timeout=10)
        await queue.client.begin(partition=P, attempt=0, step=0, world=1, timeout=10)
        await queue.create(0, 1, 2)
        await queue.create(0, purpose="eval", partition="eval")
        rows = await queue.claim("rollout", rows=2)
        await queue.complete(rows, "response", tags=[{"tokens": 9}] * 2)
        await queue.complete(await queue.claim("score"), "reward")
        await queue.complete(await queue.claim("advantage"), "advantage")
        first = await queue.slot(1, 0)
        held = await queue.claim("rollout", rows=2)
        parked = asyncio.create_task(queue.claim("score"))
        await asyncio.sleep(0)
        epoch = queue.controller.table.controller
        await queue.stop_controller()
        put = asyncio.create_task(queue.complete(held, "response"))
        creation = asyncio.create_task(queue.create(3, step=2))
        await asyncio.sleep(0)
        await queue.start_controller()
        assert queue.controller.table.controller > epoch
        assert await put == [True, True]
        assert await creation == [True, True]
        assert {row.meta.serial for row in await parked} == {held[0].meta.serial}
        assert await queue.slot(1, 0) == first
        assert await queue.create(0, 1, 2, 3) == [False] * 8
        stats = await queue.client.stats(timeout=10)
        assert stats.ready["train/rollout"] == 4
        snapshot = await queue.client.snapshot(partition="eval", timeout=10)
        assert snapshot.next_serial == 1
        assert (await queue.client.audit(timeout=10)).ok


async def test_a_unit_that_starts_again_has_its_samples_made_again(cluster):
    async with cluster() as queue:
        await queue.create(0, 1, 2, 3)
        known = (await queue.client.wanted(partition=P, known=-1, timeout=10)).revision
        watching = asyncio.create_task(queue.client.wanted(partition=P, known=known, timeout=10))
        rows = await queue.claim("rollout", rows=8)
        await queue.units[1].close()
        await queue.start_unit(1)
        wanted = await watching
        assert [meta.serial for meta in wanted.keys] == [1, 1, 3, 3]
        mine = [row for row in rows if row.unit == 1]
        with pytest.raises(StaleHandle, match="was lost"):
            await queue.client.fetch(mine, ["prompt"], timeout=10)
        ok = await queue.complete(rows, "response")
        assert [verdict for verdict, row in zip(ok, rows, strict=True) if row.unit == 1] == [False] * 4
        assert await queue.create(0, 1, 2, 3) == [False, False, True, True] * 2
        assert {row.meta.serial for row in await queue.claim("rollout")} == {1, 3}


async def test_a_unit_that_stays_away_is_given_up(cluster, monkeypatch):
    monkeypatch.setattr("asyncflow.queue.controller.controller._STOPPED_S", 0.25)  # if all stand still, none is silent
    async with cluster(unit_lost_s=0.5) as queue:
        await queue.create(0, 1)
        known = (await queue.client.wanted(partition=P, known=-1, timeout=10)).revision
        gone, queue.units[0] = queue.units[0], None
        await gone.close()
        wanted = await queue.client.wanted(partition=P, known=known, timeout=10)
        assert [meta.serial for meta in wanted.keys] == [0, 0]
        assert await queue.create(0) == [True, True]
        assert {row.unit for row in await queue.claim("rollout")} == {1}


async def test_units_that_the_queue_has_not_any_more_are_not_waited_for_when_it_starts(cluster):
    async with cluster(units=3) as queue:
        for serial in (0, 1, 2):
            await queue.create(serial)
        (last,) = {row.meta.serial for row in await queue.claim("rollout") if row.unit == 2}
        await queue.stop_controller()
        for index in (0, 2):
            gone, queue.units[index] = queue.units[index], None
            await gone.close()
        queue.options["units"] = 2
        await queue.start_controller()
        async with asyncio.timeout(10):
            while not (wanted := await queue.client.wanted(partition=P, known=-1, timeout=0)).keys:
                await asyncio.sleep(0.05)
        assert {meta.serial for meta in wanted.keys} == {last}, "the unit 0 may come back, and is waited for"


async def test_a_replaced_unit_does_not_take_its_place_back(cluster):
    async with cluster() as queue:
        old = queue.units[1]
        await queue.start_unit(1)
        await queue.create(0, 1)
        with pytest.raises(Fenced, match="another incarnation"):
            await asyncio.wait_for(asyncio.shield(old.failed), 10)
        assert {(row.meta.serial, row.unit) for row in await queue.claim("rollout")} == {(0, 0), (1, 1)}
        assert (await queue.client.wanted(partition=P, known=-1, timeout=0)).keys == []
        await old.close()


async def test_what_was_put_is_there_after_a_restart_whenever_the_ledger_was_compacted(cluster):
    async with cluster(units=1, compact_bytes=1) as queue:
        before, rows = newest(queue.folder), []
        for number in range(30):
            values = {"x": Jagged.from_rows([[number]], "int64")}
            rows += (await queue.client.put("open", values, timeout=10)).rows
        assert newest(queue.folder) > before
        assert list(queue.controller.table.state.rows) == rows
        await queue.stop_controller()
        await queue.start_controller()
        assert list(queue.controller.table.state.rows) == rows
        found = await queue.client.fetch(rows, ["x"], timeout=10)
        assert found["x"].values.tolist() == list(range(30))


class Unit:
    """The calls of a storage unit to its controller."""

    def __init__(self, client, session):
        self.client = client
        self.session = session

    @classmethod
    async def greet(cls, client, index, incarnation="i"):
        hello = Hello(index, incarnation, 1 << 30, "")
        welcome = await client.call("units.hello", hello, Welcome, timeout=10)
        unit = cls(client, Session(index, welcome.controller, welcome.epoch))
        await unit.announce()
        return unit

    async def announce(self):
        await self.client.call("units.announce", Announce(self.session, [], last=True), list[int], timeout=10)

    def row(self, number):
        return RowPlace(self.session.epoch, 0, number).row

    async def put(self, first, size):
        cells = Cells(dtypes={"x": "int64"}, sizes={"x": [8] * size})
        entry = NewRows("open", b"a client", 0, size, [self.row(first + i) for i in range(size)], cells, [])
        admit = Admit(self.session, [entry])
        (result,) = await self.client.call("units.admit", admit, list[EntryResult], timeout=10)
        return result

    async def lose(self, *rows):
        await self.client.call("units.lost", LostRows(self.session, list(rows)), Done, timeout=10)


@pytest.fixture
async def greeted(tmp_path):
    controller = Controller(ledger_dir=tmp_path)
    client = RpcClient(name="unit", resolve=await controller.start())
    try:
        yield controller, await Unit.greet(client, 0)
    finally:
        await client.close()
        await controller.close()


@pytest.mark.parametrize("lost", [False, True])
async def test_a_put_that_comes_again_in_other_groups_is_refused_and_the_ledger_can_be_read(greeted, tmp_path, lost):
    controller, unit = greeted
    assert (await unit.put(0, 2)).each(2) == [True, True]
    if lost:
        await unit.lose(unit.row(0))
    assert "has 2 rows, not 4" in (await unit.put(10, 4)).error["what"]
    assert (await unit.put(20, 2)).each(2) == [lost, False]
    rows = list(controller.table.state.rows)
    await controller.close()
    again = Controller(ledger_dir=tmp_path)
    await again.start()
    assert list(again.table.state.rows) == rows
    await again.close()


async def test_a_unit_loses_no_rows_but_those_that_lie_there(greeted):
    controller, unit = greeted
    await unit.put(0, 2)
    other = await Unit.greet(unit.client, 1)
    await other.lose(unit.row(0), unit.row(7))
    assert controller.stats().wanted == 0
    await unit.lose(unit.row(0), unit.row(7))
    assert controller.stats().wanted == 1


async def test_nothing_is_taken_of_a_session_that_is_over(greeted):
    controller, unit = greeted
    await unit.put(0, 2)
    await Unit.greet(unit.client, 0, "its successor")
    told = [unit.put(10, 2), unit.lose(unit.row(0)), unit.announce()]
    assert [type(why) for why in await asyncio.gather(*told, return_exceptions=True)] == [Fenced] * 3
    assert controller.stats().wanted == 2


async def test_more_rows_than_can_be_told_of_are_refused_and_leave_nothing(cluster, monkeypatch):
    monkeypatch.setattr("asyncflow.queue.storage.unit.MOST_ROWS", 3)
    async with cluster(units=1) as queue:
        with pytest.raises(Refused, match="4 rows came in one put"):
            await queue.client.put("open", {"x": Jagged.from_rows([[1]] * 4, "int64")}, timeout=10)
        assert queue.units[0].holdings.budget.used == 0
        assert len((await queue.client.put("open", {"x": Jagged.from_rows([[1]] * 3, "int64")}, timeout=10)).rows) == 3
