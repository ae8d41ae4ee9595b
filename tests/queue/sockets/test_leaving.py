"""Units that leave and come while the queue goes on, in this process."""

import asyncio

import msgspec
import pytest
from deadlines import ends_late

from asyncflow.errors import ProtocolError, StaleHandle
from asyncflow.identity import COUNTER_BITS
from asyncflow.queue.partition import Partition
from asyncflow.queue.protocol.unit_calls import PutRows, RowIds, TakeRows
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.columns import Jagged, encode_batch

P = "train"


def rows_of(column):
    return [column.row(index).tolist() for index in range(len(column))]


async def asked(unit, put):
    """Put rows on that unit and on no other."""
    client = RpcClient(name="test", resolve=unit.server.address)
    try:
        numbers, _ = await client.call_frames("unit.put", put, RowIds, timeout=10, frames=encoded(1)[1])
    finally:
        await client.close()
    return msgspec.structs.replace(numbers, rows=list(numbers.rows))


def encoded(rows):
    return encode_batch({"x": Jagged.from_rows([[5]] * rows, "int64")})


def held(queue):
    return {index: len(unit.holdings) for index, unit in queue.units.items() if unit}


def budgets(queue):
    return {index: (u.holdings.budget.used, u.holdings.budget.promised) for index, u in queue.units.items() if u}


async def test_rows_in_every_state_move_and_nobody_notices(cluster, monkeypatch):
    monkeypatch.setattr("asyncflow.queue.controller.sessions._WATCH_S", 60.0)  # or some have told how full they are
    async with cluster(units=3) as queue:
        outputs = {"response": 40, "reward": 16}
        await queue.client.open_step(partition=P, step=1, groups=9, group_size=2, timeout=10)
        await queue.client.begin(partition=P, attempt=0, step=0, world=1, timeout=10)
        await queue.create(*range(9), outputs=outputs)
        before = await queue.claim("rollout", rows=8)
        assert all(await queue.complete(before, "response", tags=[{"tokens": 3}] * 8))
        leased = await queue.claim("rollout", rows=4)
        again = await queue.claim("rollout", rows=2)
        partial = {"response": Jagged.from_rows([[7], [8]], "int32")}
        assert all(await queue.client.give_back(again, reason="test", columns=partial, timeout=10))
        total = [sum(of) for of in zip(*budgets(queue).values(), strict=True)]
        await queue.drain(2)
        assert sum(held(queue).values()) == 18
        assert [sum(of) for of in zip(*budgets(queue).values(), strict=True)] == total
        assert abs(held(queue)[0] - held(queue)[1]) <= 2
        got = await queue.client.fetch(before, ["response", "prompt"], timeout=10)
        assert rows_of(got["response"]) == [[row.meta.serial, row.meta.sample] for row in before]
        assert all(await queue.complete(leased, "response"))
        rest = await queue.claim("rollout")
        back = [row for row in rest if row.attempt]
        assert rows_of((await queue.client.fetch(back, ["response"], timeout=10))["response"]) == [[7], [8]]
        assert all(await queue.complete(rest, "response"))
        await queue.through()
        slot = await queue.slot(1, 0)
        assert len(slot.rows) == 18
        assert {row.unit for row in slot.rows} == {0, 1}
        assert len((await queue.client.fetch(slot.rows, ["advantage"], timeout=10))["advantage"]) == 18
        assert (await queue.client.audit(timeout=10)).ok


async def test_a_bound_row_moves_and_is_trained_and_freed(cluster):
    async with cluster() as queue:
        await queue.client.open_step(partition=P, step=1, groups=4, group_size=2, timeout=10)
        await queue.client.begin(partition=P, attempt=0, step=0, world=1, timeout=10)
        await queue.create(*range(4))
        await queue.through()
        slot = await queue.slot(1, 0)
        await queue.drain(0)
        assert len((await queue.client.fetch(slot.rows, ["advantage"], timeout=10))["advantage"]) == 8
        await queue.client.step_done(partition=P, attempt=0, step=1, rank=0, timeout=10)
        await queue.client.commit(partition=P, attempt=0, step=1, timeout=10)
        async with asyncio.timeout(10):
            while queue.units[1].holdings.budget.used:
                await asyncio.sleep(0.01)
        report = await queue.client.audit(timeout=10)
        assert (report.ok, report.trained) == (True, 8)


async def test_a_restarted_controller_knows_where_rows_have_moved(cluster):
    async with cluster(units=3, compact_bytes=1 << 10) as queue:
        await queue.create(*range(6))
        rows = await queue.claim("rollout", rows=12)
        await queue.drain(1)
        await queue.stop_controller()
        await queue.start_controller()
        assert len((await queue.client.fetch(rows, ["prompt"], timeout=10))["prompt"]) == 12
        assert all(await queue.complete(rows, "response"))
        assert {row.unit for row in await queue.claim("score")} == {0, 2}
        assert (await queue.client.stats(timeout=10)).wanted == 0
        assert (await queue.client.audit(timeout=10)).ok


async def test_a_unit_told_to_leave_while_the_controller_is_away_goes_on_when_it_is_back(cluster):
    async with cluster() as queue:
        await queue.create(*range(4))
        await queue.stop_controller()
        leaving = asyncio.create_task(queue.drain(0))
        await asyncio.sleep(0.2)
        assert held(queue)[0] == 4
        await queue.start_controller()
        await leaving
        assert held(queue) == {1: 8}


async def test_the_only_unit_does_not_leave_unless_another_comes(cluster):
    async with cluster(units=1) as queue:
        await queue.create(0, 1)
        assert not await queue.units[0].leave(patient=False)
        leaving = asyncio.create_task(queue.drain(0))
        await queue.start_unit(1)
        await leaving
        assert held(queue) == {1: 4}
        assert len(await queue.claim("rollout")) == 4


async def test_rows_wait_for_room_and_those_that_find_none_stay(cluster):
    async with cluster(limit=250, units=2) as queue:
        await queue.create(0, 1, 2, length=6)
        assert sorted(held(queue).values()) == [2, 4]
        with pytest.raises(TimeoutError):
            await queue.drain(0, within_s=0.5)
        assert sum(held(queue).values()) == 6
        leaving = asyncio.create_task(queue.drain(0))
        rows = await queue.claim("rollout", rows=2)
        assert len((await queue.client.fetch(rows, ["prompt"], timeout=10))["prompt"]) == 2
        await queue.client.drop(rows, reason="test", timeout=10)
        await leaving
        assert budgets(queue) == {1: (192, 0)}


async def test_new_rows_go_past_a_unit_that_leaves_and_come_to_one_that_came(cluster):
    async with cluster(units=2) as queue:
        await queue.create(*range(10))
        leaving = asyncio.create_task(queue.drain(0))
        await asyncio.sleep(0)
        assert all(await queue.create(*range(10, 20)))
        await leaving
        assert held(queue) == {1: 40}
        await queue.start_unit(2)
        await queue.create(*range(20, 40))
        assert held(queue) == {1: 60, 2: 20}


async def test_a_unit_whose_row_ids_are_used_up_takes_no_new_rows_and_says_so(cluster):
    async with cluster(units=2) as queue:
        queue.units[0]._session.ids_used = (1 << COUNTER_BITS) - 1
        await queue.create(*range(3))
        assert held(queue) == {0: 0, 1: 6}
        queue.units[1]._session.ids_used = (1 << COUNTER_BITS) - 1
        await ends_late(
            lambda timeout: queue.client.put("open", {"x": Jagged.from_rows([[1]], "int64")}, timeout=timeout),
            says=r"unit [01]: its row ids are used up\..* when it was drained",
        )
        assert budgets(queue)[0] == (0, 0)
        assert len(await queue.claim("rollout", rows=6)) == 6


async def test_old_handles_of_open_rows_find_their_rows(cluster):
    async with cluster(units=3) as queue:
        client, rows = queue.client, Partition(queue.client, "open")
        numbers = []
        for n in range(9):
            put = await client.put("open", {"x": Jagged.from_rows([[n, n]], "int64")}, keys=[f"k{n}"], timeout=10)
            numbers += put.rows
        bare = [(await client.put("open", {}, tags=[{"n": n}], timeout=10)).rows[0] for n in range(3)]
        moving = [n for n, number in enumerate(numbers) if number >> 32 & 0xFFF == 1]
        assert len(moving) == 3
        cleared = numbers[moving[0]]
        await rows.clear([cleared], timeout=10)
        await queue.drain(1)
        left = [number for number in numbers if number != cleared]
        got = await client.fetch(left, ["x"], timeout=10)
        assert rows_of(got["x"]) == [[n, n] for n in range(9) if n != moving[0]]
        with pytest.raises(StaleHandle):
            await client.fetch(numbers, ["x"], timeout=10)
        with pytest.raises(StaleHandle):
            await client.write([cleared], {"y": Jagged.from_rows([[1]], "int64")}, timeout=10)
        await client.write(left, {"y": Jagged.from_rows([[n] for n in range(8)], "int64")}, timeout=10)
        assert (await rows.get(["k4", "k8"], ["x"], timeout=10))["x"].tolist() == [[4, 4], [8, 8]]
        again = await rows.put({"x": Jagged.from_rows([[70, 70]], "int64")}, keys=["k4"], timeout=10)
        assert again == [numbers[4]]
        await queue.start_unit(1)
        assert rows_of((await client.fetch(left, ["y"], timeout=10))["y"]) == [[n] for n in range(8)]
        assert rows_of((await client.fetch([numbers[4]], ["x"], timeout=10))["x"]) == [[70, 70]]
        assert await rows.clear([*left, *bare], timeout=10) == 8 + 3
        async with asyncio.timeout(10):
            while any(used for used, _ in budgets(queue).values()):
                await asyncio.sleep(0.01)
        assert not any(held(queue).values())


async def test_a_creation_that_comes_again_to_another_unit_is_known_and_releases_its_bytes(cluster):
    async with cluster(units=2) as queue:
        assert await queue.create(0) == [True, True]
        assert held(queue) == {0: 2, 1: 0}
        other = queue.connect("first")  # a name with which the second unit comes first
        assert await queue.create(0, client=other) == [False, False]
        assert queue.units[1].put_bytes > 0
        assert budgets(queue)[1] == (0, 0)
        put = PutRows("open", b"a client", 0, 1, encoded(1)[0], [], {}, 5.0)
        numbers = [await asked(queue.units[index], put) for index in (0, 1)]
        assert numbers[0].rows == numbers[1].rows
        assert (numbers[0].new, numbers[1].new) == ([], [False])
        assert held(queue) == {0: 3, 1: 0}
        assert budgets(queue)[1] == (0, 0)


async def test_rows_that_come_twice_in_one_move_are_refused_and_leave_nothing(cluster):
    async with cluster(units=1) as queue:
        unit = queue.units[0]
        header, frames = encoded(2)
        known = {"partial": [], "tokens": [0, 0], "tags": [{}, {}], "outputs": {}, "wait_s": 1.0}
        call = TakeRows(source=7, ticket=1, rows=[5, 5], header=header, **known)
        client = RpcClient(name="test", resolve=unit.server.address)
        try:
            with pytest.raises(ProtocolError, match="2 rows, of which 1 differ"):
                await client.call("unit.take", call, list[bool], timeout=10, frames=frames)
        finally:
            await client.close()
        assert (held(queue), budgets(queue)) == ({0: 0}, {0: (0, 0)})
