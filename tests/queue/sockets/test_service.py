"""The queue on sockets: controller, units and clients together, without faults of processes."""

import asyncio

import numpy as np
import pytest

from asyncflow.errors import Fenced, Refused, StaleHandle
from asyncflow.identity import RowPlace
from asyncflow.local.issuer import Issuer
from asyncflow.queue.partition import Partition
from asyncflow.queue.protocol.messages import Samples
from asyncflow.rpc.columns import Jagged
from asyncflow.rpc.shm import SHARED_MEMORY_ENV

P = "train"


async def test_a_sample_from_its_creation_to_its_commit(cluster):
    async with cluster() as queue:
        await queue.client.open_step(partition=P, step=1, groups=4, group_size=2, timeout=10)
        await queue.client.begin(partition=P, attempt=0, step=0, world=2, timeout=10)
        assert await queue.create(0, 1, 2, 3) == [True] * 8
        assert await queue.create(0, 1) == [False] * 4
        await queue.through()
        slots = [await queue.slot(1, 0, rank=rank) for rank in (0, 1)]
        assert [len(slot.rows) for slot in slots] == [4, 4]
        assert all(slot.last and slot.totals.samples == 8 for slot in slots)
        columns = await queue.client.fetch(slots[1].rows, ["advantage", "prompt"], timeout=10)
        assert [list(columns["advantage"].row(i)) for i in range(4)] == [list(row.meta.key) for row in slots[1].rows]
        for rank in (0, 1):
            await queue.client.step_done(partition=P, attempt=0, step=1, rank=rank, timeout=10)
        snapshot = await queue.client.snapshot(partition=P, timeout=10)
        alone = await queue.client.snapshot(partition=P, step=1, timeout=10)
        assert alone.steps == {1: snapshot.steps[1]}
        assert (await queue.client.snapshot(partition=P, step=9, timeout=10)).steps[9].serials == []
        assert (snapshot.last_staged_step, snapshot.last_committed_step, snapshot.next_serial) == (1, 0, 4)
        assert sum(unit.holdings.budget.used for unit in queue.units.values()) == 8 * (32 + 3 * 8)
        await queue.client.commit(partition=P, attempt=0, step=1, timeout=10)
        await queue.client.close_partition(partition=P, step=1, timeout=10)
        async with asyncio.timeout(10):
            while any(unit.holdings.budget.used for unit in queue.units.values()):
                await asyncio.sleep(0.01)
        report = await queue.client.audit(timeout=10)
        assert report.ok
        assert (report.trained, report.closed) == (8, True)
        stats = await queue.client.stats(timeout=10)
        assert (stats.live, stats.committed, stats.units) == (0, 8, 2)


async def test_every_dtype_comes_back_bit_by_bit(cluster):
    async with cluster() as queue:
        columns = {
            "prompt": Jagged.from_rows([[1.5, np.nan, -np.inf], [], [0.0]], "float32"),
            "half": Jagged.from_rows([[1], [2, 3], []], "float16"),
            "brain": Jagged.from_rows([[0x3F80], [0x7FC0], [1, 2]], "bfloat16"),
            "flag": Jagged.from_rows([[True], [False, True], []], "bool"),
            "big": Jagged.from_rows([[2**62], [], [-1]], "int64"),
        }
        assert all((await queue.client.put(P, columns, samples=Samples(serials=[0, 1, 2], step=1), timeout=10)).new)
        rows = await queue.claim("rollout", rows=3)
        rows += await queue.claim("rollout", rows=3, timeout=0) if len(rows) < 3 else []
        order = sorted(range(3), key=lambda index: -rows[index].meta.serial)
        backwards = [rows[index] for index in order]
        got = await queue.client.fetch(backwards, list(columns), timeout=10)
        wanted = {name: column.take([row.meta.serial for row in backwards]) for name, column in columns.items()}
        assert got == wanted


async def test_rows_of_a_prompt_lie_on_one_unit(cluster):
    async with cluster() as queue:
        await queue.create(0, 1, 2)
        rows = [row for _ in range(3) for row in await queue.claim("rollout", rows=2)]
        assert {(row.meta.serial, row.unit) for row in rows} == {(0, 0), (1, 1), (2, 0)}
        assert all(RowPlace.of(row.row).unit == row.unit for row in rows)


async def test_a_parked_claim_is_woken_and_delays_nobody(cluster):
    async with cluster() as queue:
        other = queue.connect("other")
        parked = [asyncio.create_task(queue.claim("rollout", client=other, rows=2)) for _ in range(20)]
        await asyncio.sleep(0)
        assert await queue.create(0) == [True] * 2
        done, waiting = await asyncio.wait(parked, return_when=asyncio.FIRST_COMPLETED, timeout=10)
        assert len(done) == 1
        assert len(await done.pop()) == 2
        stats = await queue.client.stats(timeout=10)
        assert stats.parked == {"train/rollout": 19}
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        assert await queue.claim("rollout", timeout=0) == []


async def test_what_a_cancelled_claim_was_given_comes_back_at_once(cluster):
    async with cluster() as queue:
        claims = queue.controller.table.claims
        serve = claims.serve
        claim = asyncio.create_task(queue.claim("rollout"))

        def serve_and_cancel(now):
            if grants := serve(now):
                claim.cancel()
            return grants

        claims.serve = serve_and_cancel
        await queue.create(0)
        await asyncio.wait([claim])
        assert claim.cancelled()
        claims.serve = serve
        assert [row.attempt for row in await queue.claim("rollout", timeout=5)] == [1, 1]


async def test_a_claim_that_is_withdrawn_ends_at_once_and_keeps_what_it_was_granted(cluster):
    """However withdrawal and rows cross, no row is given back, so none is delivered twice."""
    async with cluster() as queue:
        got = []
        for serial in range(20):
            ticket = f"claim-{serial}"
            claim = asyncio.create_task(queue.claim("rollout", timeout=60, ticket=ticket))
            await asyncio.sleep(0.01)
            putting = asyncio.create_task(queue.create(serial))
            for _ in range(serial):
                await asyncio.sleep(0)
            async with asyncio.timeout(10):
                await queue.client.withdraw(ticket, partition=P, task="rollout", timeout=10)
                got += await claim
            assert all(await putting)
        got += await queue.claim("rollout", timeout=0.5)
        assert sorted(row.meta.key for row in got) == [(serial, sample) for serial in range(20) for sample in (0, 1)]
        assert all(row.attempt == 0 for row in got)
        assert (await queue.client.audit(timeout=10)).redeliveries == 0


async def test_a_withdrawal_of_no_claim_does_nothing(cluster):
    async with cluster() as queue:
        await queue.create(0)
        ticket = "withdrawn"
        rows = await queue.claim("rollout", ticket=ticket)
        await queue.client.withdraw(ticket, partition=P, task="rollout", timeout=10)
        assert all(await queue.complete(rows, "response"))


async def test_a_late_write_is_refused_and_leaves_no_bytes(cluster):
    async with cluster() as queue:
        await queue.create(0)
        late = await queue.claim("rollout")
        await queue.client.expire(worker="test", timeout=10)
        other = queue.connect("other")
        rows = await queue.claim("rollout", client=other, timeout=5)
        assert [row.attempt for row in rows] == [1, 1], "at once, not when the lease ends after 10 s"
        held = sum(unit.holdings.budget.used for unit in queue.units.values())
        assert await queue.complete(late, "response") == [False, False]
        assert sum(unit.holdings.budget.used for unit in queue.units.values()) == held
        assert await queue.client.renew([late[0].lease, rows[0].lease], timeout=10) == [rows[0].lease]
        assert await queue.complete(rows, "response") == [True, True]
        assert await queue.complete(rows, "response") == [True, True]
        assert sum(unit.holdings.budget.used for unit in queue.units.values()) == held + 16
        assert (await queue.client.stats(timeout=10)).fenced == 2


async def test_unfinished_columns_go_to_the_next_holder(cluster):
    async with cluster() as queue:
        await queue.create(0)
        rows = await queue.claim("rollout")
        so_far = Jagged.from_rows([[7], [8, 9]], "int32")
        await queue.client.give_back(rows, reason="drain", columns={"response": so_far}, timeout=10)
        again = await queue.claim("rollout")
        assert [row.bytes["response"] for row in again] == [4, 8]
        assert (await queue.client.fetch(again, ["response"], timeout=10))["response"] == so_far
        await queue.complete(again, "response")
        scored = await queue.claim("score")
        assert [row.bytes["response"] for row in scored] == [8, 8]
        assert sum(unit.holdings.budget.used for unit in queue.units.values()) == 2 * (32 + 8)
        await queue.client.give_back(scored, reason="no use", timeout=10)
        assert len(await queue.claim("score")) == 2


async def test_what_a_holder_saves_goes_to_the_next_and_nothing_that_comes_later(cluster):
    async with cluster() as queue:
        await queue.create(0)
        rows = await queue.claim("rollout")
        for length in (1, 3):
            so_far = {"response": Jagged.from_rows([[7] * length] * 2, "int32")}
            assert await queue.client.save(rows, so_far, timeout=10) == [True, True]
        held = sum(unit.holdings.budget.used for unit in queue.units.values())
        await queue.stop_controller()
        await queue.start_controller()
        await queue.client.expire(worker="test", timeout=10)
        again = await queue.claim("rollout", client=queue.connect("other"))
        assert [(row.attempt, row.bytes["response"]) for row in again] == [(1, 12), (1, 12)]
        assert (await queue.client.fetch(again, ["response"], timeout=10))["response"] == so_far["response"]
        late = {"response": Jagged.from_rows([[8]] * 2, "int32")}
        assert await queue.client.save(rows, late, timeout=10) == [False, False]
        assert sum(unit.holdings.budget.used for unit in queue.units.values()) == held
        assert (await queue.client.fetch(again, ["response"], timeout=10))["response"] == so_far["response"]


async def test_what_is_saved_takes_no_room_that_others_wait_for(cluster):
    async with cluster(units=1, limit=300) as queue:
        await queue.create(0, outputs={"response": 8})
        rows = await queue.claim("rollout")
        columns = {"response": Jagged.from_rows([[7] * 8] * 2, "int32")}
        budget = queue.units[0].holdings.budget
        large = {"text": Jagged.from_rows([[1] * (budget.limit - budget.used - budget.promised + 1)], "uint8")}
        waiting = asyncio.create_task(queue.client.put("other", large, timeout=60))
        async with asyncio.timeout(10):
            while not len(budget):
                await asyncio.sleep(0.01)
        assert await queue.client.save(rows, columns, timeout=60) == [False, False], "at once"
        assert all(await queue.complete(rows, "response"))
        waiting.cancel()


async def test_tags_are_merged_and_travel(cluster):
    async with cluster() as queue:
        await queue.create(0)
        rows = await queue.claim("rollout")
        await queue.complete(rows, "response", tags=[{"reward": 0.5, "tokens": 3}] * 2)
        rows = await queue.claim("score")
        await queue.complete(rows, "reward", tags=[{"flag": "timeout", "tokens": 4}] * 2)
        rows = await queue.claim("advantage")
        assert [row.meta.tags for row in rows] == [{"reward": 0.5, "tokens": 4, "flag": "timeout"}] * 2


async def test_handles_to_what_is_gone_are_refused(cluster):
    async with cluster() as queue:
        await queue.create(0)
        rows = await queue.claim("rollout")
        with pytest.raises(Refused, match="no column 'nonsense'"):
            await queue.client.fetch(rows, ["nonsense"], timeout=10)
        await queue.client.drop(rows, reason="test", timeout=10)
        async with asyncio.timeout(10):
            while queue.units[0].holdings.budget.used:
                await asyncio.sleep(0.01)
        with pytest.raises(StaleHandle, match="is not on this unit"):
            await queue.client.fetch(rows, ["prompt"], timeout=10)
        assert await queue.complete(rows, "response") == [False, False]


async def test_a_question_about_a_partition_that_nobody_made_makes_none(cluster):
    async with cluster() as queue:
        made, none = await queue.client.partitions(timeout=10), Partition(queue.client, "none")
        assert not (await none.rows()).rows
        assert (await none.produced(["x"])).rows == 0
        assert (await queue.client.show("none", timeout=10)).rows == 0
        assert not (await queue.client.snapshot(partition="none", timeout=10)).steps
        assert await queue.client.partitions(timeout=10) == made


async def test_a_dtype_conflict_is_refused_before_anything_is_visible(cluster):
    async with cluster() as queue:
        await queue.create(0, 2)
        rows = await queue.claim("rollout", rows=2)
        await queue.complete(rows, "response")
        more = await queue.claim("rollout")
        wrong = Jagged.from_rows([[0.5]] * 2, "float32")
        held = queue.units[0].holdings.budget.used
        with pytest.raises(Refused, match="response holds int32, not float32"):
            await queue.client.complete(more, {"response": wrong}, timeout=10)
        assert queue.units[0].holdings.budget.used == held
        assert await queue.complete(more, "response") == [True, True]


async def test_slots_are_parked_and_fenced_where_they_are_parked(cluster):
    async with cluster() as queue:
        await queue.client.open_step(partition=P, step=1, groups=2, group_size=2, timeout=10)
        await queue.client.begin(partition=P, attempt=0, step=0, world=1, timeout=10)
        assert await queue.slot(1, 0, timeout=0) is None
        parked = asyncio.create_task(queue.slot(1, 0))
        await queue.create(0)
        await queue.through()
        assert len((await parked).rows) == 2
        parked = asyncio.create_task(queue.slot(1, 1))
        async with asyncio.timeout(10):
            while not queue.controller.parking.waiters:
                await asyncio.sleep(0.01)
        await queue.client.begin(partition=P, attempt=1, step=0, world=1, timeout=10)
        with pytest.raises(Fenced, match="attempt 0 is over"):
            await parked


@pytest.mark.parametrize("shared_memory", ["on", "off"])
async def test_with_certificates(cluster, tmp_path, monkeypatch, shared_memory):
    monkeypatch.setenv(SHARED_MEMORY_ENV, shared_memory)
    async with cluster(issuer=Issuer(tmp_path / "tls")) as queue:
        await queue.create(0)
        rows = await queue.claim("rollout")
        assert await queue.complete(rows, "response") == [True, True]


async def test_an_eval_partition_is_cleared_and_filled_again(cluster):
    async with cluster() as queue:
        for _ in range(2):
            assert await queue.create(0, 1, purpose="eval", partition="eval") == [True] * 4
            await queue.client.clear_partition(partition="eval", timeout=10)
        async with asyncio.timeout(10):
            while any(unit.holdings.budget.used for unit in queue.units.values()):
                await asyncio.sleep(0.01)
        assert (await queue.client.audit(timeout=10)).dispatched == 0


async def test_the_task_of_a_gang_cannot_be_claimed(cluster):
    async with cluster() as queue:
        with pytest.raises(Refused, match="task of a gang"):
            await queue.claim("train")


async def test_groups_must_be_whole(cluster):
    async with cluster() as queue:
        prompt = {"prompt": Jagged.from_rows([[1]] * 2, "int64")}
        for size, serials in ((4, [0]), (2, [0, 1]), (1, [0, 0]), (1, [0, 1, 2])):
            with pytest.raises(Refused, match=r"make no groups of 4|2 rows in . groups came with . serials"):
                await queue.client.put(P, prompt, group_size=size, samples=Samples(serials=serials, step=1), timeout=10)
