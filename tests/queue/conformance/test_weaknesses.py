"""Tests of what the peer does wrong (W1 to W21 of its facts), one by one, and this queue does not."""

import asyncio
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from asyncflow.errors import DeadlineExceeded, Refused, StaleHandle
from asyncflow.identity import RowPlace
from asyncflow.queue.blocking import BlockingPartition, BlockingQueue
from asyncflow.queue.client import QueueClient
from asyncflow.queue.peers import GRACE_S
from asyncflow.queue.values import encode_columns


async def test_w01_who_waits_delays_nobody(two_units, scores):
    await scores.declare("grade", ["score"])
    waiting = [
        asyncio.create_task(two_units.partition("scores", worker=f"w{n}").claim("grade", 4, timeout=60))
        for n in range(20)
    ]
    await two_units.until(lambda: two_units.controller.stats().parked == {"scores/grade": 20})
    rows = await scores.put({"text": ["a", "b"]}, timeout=5)
    assert (await scores.get(rows, ["text"], timeout=5))["text"] == ["a", "b"]
    assert not any(task.done() for task in waiting)
    await scores.write(rows, {"score": np.zeros(2)}, timeout=5)
    done, rest = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=10)
    assert [row.row for row in done.pop().result()] == rows
    for task in rest:
        task.cancel()
    await asyncio.wait(rest)


async def test_w02_rows_of_a_dead_consumer_are_handed_out_again(two_units, scores):
    await scores.declare("grade", ["text"], lease_s=0.3)
    rows = await scores.put({"text": ["a", "b", "c", "d"]})
    dead = two_units.partition("scores", worker="dead")
    held = await dead.claim("grade", 4, timeout=5)
    await scores.declare("grade", ["text"], lease_s=60.0)
    assert not (await scores.consumed("grade")).all
    again = await scores.claim("grade", 8, timeout=10)
    assert [(row.row, row.attempt) for row in again] == [(row, 1) for row in rows]
    assert await dead.complete(held) == [False] * 4
    assert all(await scores.complete(again))
    assert (await scores.consumed("grade")).all


async def test_w02_what_a_dead_consumer_saved_goes_to_the_next_and_its_late_save_is_refused(two_units, scores):
    await scores.declare("grade", ["text"], writes=["score"])
    await scores.put({"text": ["a", "b"]})
    dead = two_units.partition("scores", worker="dead")
    held = await dead.claim("grade", 2, timeout=5)
    for score in (1, 2):
        assert all(await dead.queue.save(held, encode_columns({"score": np.full(2, score)}), timeout=10))
    await scores.queue.expire(worker="dead", timeout=10)
    again = await scores.claim("grade", 2, timeout=10)
    assert await dead.queue.save(held, encode_columns({"score": np.full(2, 3)}), timeout=10) == [False] * 2
    assert (await scores.get(again, ["score"]))["score"].tolist() == [2, 2]
    assert all(await scores.complete(again, {"score": np.full(2, 4)}))
    assert (await scores.get(again, ["score"]))["score"].tolist() == [4, 4]


async def test_w03_calls_to_a_dead_controller_end_in_time_and_handles_still_read(two_units, scores):
    await scores.declare("grade", ["text"])
    rows = await scores.put({"text": ["a", "b"]})
    leased = await scores.claim("grade", 1, timeout=5)
    await two_units.controller.close()
    two_units.controller = None
    began = time.monotonic()
    ended = await asyncio.gather(
        scores.put({"text": ["c"]}, timeout=0.3),
        scores.write(rows, {"note": ["c", "d"]}, timeout=0.3),
        scores.rows(timeout=0.3),
        scores.tag(rows, [{}, {}], timeout=0.3),
        scores.clear(rows, timeout=0.3),
        two_units.client.renew(["1"], timeout=0.3),
        scores.claim("grade", 1, timeout=0.3),
        scores.complete(leased, timeout=0.3),
        scores.complete(leased, {"score": np.zeros(1)}, timeout=0.3),
        return_exceptions=True,
    )
    assert {type(error) for error in ended} == {DeadlineExceeded}, ended
    assert time.monotonic() - began < 30
    assert (await scores.get(rows, ["text"], timeout=5))["text"] == ["a", "b"]


async def test_w03_calls_to_a_stopped_controller_end_soon_after_their_own_time(served):
    await served.partition.declare("grade", ["text"])
    await served.partition.put({"text": ["a", "b"]})
    leased = await served.partition.claim("grade", 1, timeout=5)
    blocking = BlockingPartition(BlockingQueue(lambda: QueueClient(**served.peers, worker="blocking")), "scores")
    assert len(await asyncio.to_thread(blocking.claim, "grade", 1, timeout=5)) == 1
    served.process.suspend()

    async def ends_in_time(call):
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await call
        assert 0.5 <= time.monotonic() - began < 0.5 + GRACE_S + 2

    await asyncio.gather(
        ends_in_time(served.partition.claim("grade", 1, timeout=0.5)),
        ends_in_time(asyncio.to_thread(blocking.claim, "grade", 1, timeout=0.5)),
        ends_in_time(served.partition.complete(leased, timeout=0.5)),
        ends_in_time(served.partition.peek("grade", timeout=0.5)),
    )
    served.process.resume()
    assert await served.partition.complete(leased, timeout=20) == [True]
    blocking.queue.close()


async def test_w04_a_dead_unit_costs_its_rows_and_bounded_time(two_units, scores):
    await scores.declare("grade", ["n"])
    rows = [row for n in range(6) for row in await scores.put({"n": np.array([n])})]
    dead = [row for row in rows if RowPlace.of(row).unit == 0]
    alive = [row for row in rows if RowPlace.of(row).unit == 1]
    assert dead
    assert alive
    await two_units.stop_unit(0)
    with pytest.raises(DeadlineExceeded):
        await scores.get(rows, ["n"], timeout=0.5)
    assert len((await scores.get(alive, ["n"], timeout=5))["n"]) == len(alive)
    more = await scores.put({"n": np.arange(3)}, timeout=10)
    assert {RowPlace.of(row).unit for row in more} == {1}
    await two_units.start_unit(0)
    with pytest.raises(StaleHandle):
        await scores.get(dead, ["n"], timeout=5)
    assert sorted(row.row for row in await scores.claim("grade", 100, timeout=5)) == sorted(alive + more)


async def test_w05_a_put_that_failed_leaves_the_partition_whole_and_a_full_store_recovers(queue):
    async with queue(units=1, limit=1 << 20) as made:
        partition = made.partition()
        rows = await partition.put({"blob": [bytes(400_000)] * 2}, keys=["a", "b"])
        with pytest.raises(Refused, match="never fit"):
            await partition.put({"blob": [bytes(2_000_000)]}, timeout=10)
        with pytest.raises(DeadlineExceeded):
            await partition.put({"blob": [bytes(400_000)]}, timeout=0.5)
        assert (await partition.produced(["blob"])).all
        assert (await partition.rows()).rows == rows
        late = asyncio.create_task(partition.put({"blob": [bytes(400_000)]}, timeout=30))
        await asyncio.sleep(0.1)
        assert not late.done()
        await partition.clear(rows[:1])
        await late
        budget = made.units[0].holdings.budget
        assert budget.waits >= 2
        assert len(budget) == 0
        assert budget.waited_s > 0.5
        await partition.clear()
        await made.until(lambda: made.held == 0)


async def test_w05_of_a_large_put_that_failed_nothing_is_visible(queue):
    mib = 1 << 20
    async with queue(units=2, limit=32 * mib) as made:
        partition = made.partition()
        rows = [(await partition.put({"blob": [bytes(size * mib)]}))[0] for size in (10, 24)]
        with pytest.raises(DeadlineExceeded):
            await partition.put({"blob": [bytes(mib)] * 24}, timeout=1)
        assert (await partition.rows()).rows == rows
        await made.until(lambda: made.held == 34 * mib)
        with pytest.raises(Refused, match="never fit"):
            await partition.put({"blob": [bytes(mib)] * 40}, timeout=10)
        assert (await partition.rows()).rows == rows


async def test_w05_a_producer_that_dies_while_it_waits_leaves_nothing_behind(queue):
    async with queue(units=1, limit=1 << 20) as made:
        partition = made.partition()
        rows = await partition.put({"blob": [bytes(900_000)]})
        dying = asyncio.create_task(partition.put({"blob": [bytes(400_000)]}, timeout=30))
        await asyncio.sleep(0.1)
        dying.cancel()
        await asyncio.wait([dying])
        await partition.clear(rows)
        await made.until(lambda: made.held == 0)
        assert (await partition.rows()).rows == []
        assert len(await partition.put({"blob": [bytes(900_000)]})) == 1


async def test_w06_another_dtype_is_refused_before_anything_is_visible(two_units, scores):
    await scores.declare("grade", ["n"])
    rows = await scores.put({"n": np.array([1.5], np.float32)})
    held = two_units.held
    with pytest.raises(Refused, match="float32"):
        await scores.put({"n": np.array([16777217])})
    with pytest.raises(Refused, match="float32"):
        await scores.write(rows, {"n": np.array([16777217])})
    assert (await scores.rows()).rows == rows
    assert (await scores.get(rows, ["n"]))["n"].tolist() == [1.5]
    assert [row.row for row in await scores.claim("grade", 8, timeout=5)] == rows
    await two_units.until(lambda: two_units.held == held)


async def test_w07_a_handle_of_a_cleared_row_neither_reads_nor_writes(two_units, scores):
    rows = await scores.put({"n": np.arange(4)})
    await scores.clear(rows)
    other = two_units.partition("other")
    strangers = await other.put({"n": np.arange(4) + 100})
    with pytest.raises(StaleHandle):
        await scores.write(rows, {"n": np.arange(4)})
    await two_units.until(lambda: two_units.held == 4 * 8)
    with pytest.raises(StaleHandle):
        await scores.get(rows, ["n"])
    assert (await other.get(strangers, ["n"]))["n"].tolist() == [100, 101, 102, 103]


_PRODUCER = """
import sys
import numpy as np
from asyncflow.queue.blocking import BlockingPartition, BlockingQueue
from asyncflow.queue.client import QueueClient
controller, *units = sys.argv[1:]
peers = {
    "find": lambda role, index: controller if role == "controller" else units[index],
    "units": lambda: range(len(units)),
}
queue = BlockingQueue(lambda: QueueClient(**peers, worker="producer"))
print(*BlockingPartition(queue, "scores").put({"n": np.arange(8)}))
queue.close()
"""


async def test_w08_rows_outlive_the_process_that_put_them(two_units, scores):
    addresses = [server.server.address for server in (two_units.controller, *two_units.units.values())]
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", _PRODUCER, *addresses, stdout=subprocess.PIPE)
    out, _ = await child.communicate()
    assert child.returncode == 0
    assert (await scores.get([int(row) for row in out.split()], ["n"]))["n"].tolist() == list(range(8))


async def test_w09_a_group_is_what_was_put_together_however_late_a_row_of_it(scores):
    await scores.declare("advantage", ["score"], groups=True)
    rows = await scores.put({"text": [str(n) for n in range(6)]}, group_size=3)
    await scores.write(rows[1:], {"score": np.zeros(5)})
    assert [row.row for row in await scores.claim("advantage", 8, timeout=5)] == rows[3:]
    assert await scores.claim("advantage", 8, timeout=0) == []
    await scores.write(rows[:1], {"score": np.zeros(1)})
    assert [row.row for row in await scores.claim("advantage", 8, timeout=5)] == rows[:3]


async def test_w11_any_number_of_loaders_get_every_row_once(two_units, scores):
    await scores.declare("train", ["n"])
    rows = await scores.put({"n": np.arange(200)})
    blocking, seen = two_units.blocking("scores"), []

    def load():
        while part := blocking.claim("train", 5, timeout=0.3):
            seen.extend(row.row for row in part)
            assert all(blocking.complete(part))

    loaders = [threading.Thread(target=load) for _ in range(4)]
    for loader in loaders:
        loader.start()
    for loader in loaders:
        await asyncio.to_thread(loader.join)
    blocking.queue.close()
    assert sorted(seen) == sorted(rows)


async def test_w12_tags_of_many_writers_are_all_kept(two_units, scores):
    (row,) = await scores.put({"n": np.zeros(1)}, keys=["k"], tags=[{"status": "running"}])
    writers = [two_units.partition("scores", worker=f"w{n}") for n in range(8)]

    async def write(index, partition):
        for turn in range(10):
            if index % 2:
                await partition.tag([row], [{f"tag{index}": turn}])
            else:
                await partition.write([row], {f"c{index}": np.array([turn])}, tags=[{f"tag{index}": turn}])

    await asyncio.gather(*(write(index, partition) for index, partition in enumerate(writers)))
    await scores.tag([row], [{"status": "finished"}])
    await scores.write([row], {"late": np.zeros(1)})
    assert await scores.keys() == {"k": {"status": "finished"} | {f"tag{index}": 9 for index in range(8)}}


async def test_w13_a_read_is_never_shorter_than_what_was_asked_for(scores):
    await scores.put({"n": np.arange(2)}, keys=["a", "b"])
    with pytest.raises(StaleHandle, match="no row has the key 'x'"):
        await scores.get(["a", "x", "b"], ["n"])


async def test_w16_a_consumer_that_waits_makes_no_calls(two_units, scores):
    await scores.declare("grade", ["text"])
    waiting = asyncio.create_task(scores.claim("grade", 1, timeout=5))
    await two_units.until(lambda: two_units.controller.stats().parked == {"scores/grade": 1})
    before = two_units.controller.server.counters.calls["queue.claim"]
    await asyncio.sleep(0.5)
    assert two_units.controller.server.counters.calls["queue.claim"] == before
    await scores.put({"text": ["a"]})
    assert len(await waiting) == 1


async def test_w18_clearing_rows_releases_their_bytes_at_once(queue):
    async with queue(units=1, limit=64 << 20) as made:
        partition = made.partition()
        rows = await partition.put({"blob": [bytes(100_000)] * 256})
        assert made.held >= 25_600_000
        await partition.clear(rows[1:])
        await made.until(lambda: made.held < 200_000)
        assert (await partition.get(rows[:1], ["blob"]))["blob"] == [bytes(100_000)]
        await partition.put({"blob": [bytes(100_000)] * 600})


async def test_w18_a_task_that_clears_releases_what_it_has_completed(two_units, scores):
    await scores.declare("last", ["n"], clears=True)
    rows = await scores.put({"n": np.arange(8)}, keys=list("abcdefgh"))
    leased = await scores.claim("last", 5, timeout=5)
    assert two_units.held == 64
    assert all(await scores.complete(leased))
    await two_units.until(lambda: two_units.held == 24)
    assert (await scores.rows()).rows == rows[5:]
    told = await scores.consumed("last")
    assert (told.rows, told.cleared, told.all) == (3, 5, False)
    assert all(await scores.complete(await scores.claim("last", 5, timeout=5)))
    assert (await scores.consumed("last")).all


async def test_w21_two_queues_live_side_by_side(queue, tmp_path_factory, world):
    async with queue() as one:
        two = type(one)(tmp_path_factory.mktemp("two"), world=world, units=1, limit=1 << 20)
        await two.start()
        try:
            await one.partition().put({"n": np.zeros(2)}, keys=["a", "b"])
            assert await two.partition().keys() == {}
        finally:
            await two.close()


async def test_w04_rows_of_a_dead_unit_can_be_put_again_under_their_keys(queue):
    async with queue(units=1) as made:
        partition = made.partition()
        await partition.declare("grade", ["n"])
        old = await partition.put({"n": np.arange(3)}, keys=list("abc"))
        assert all(await partition.complete(await partition.claim("grade", 1, timeout=5)))
        await made.stop_unit(0)
        await made.start_unit(0)
        with pytest.raises(StaleHandle, match="the row of key 'a' was lost with its storage unit"):
            await partition.get(["a"], ["n"])
        new = await partition.put({"n": np.arange(10, 14)}, keys=list("abcd"))
        assert not set(old) & set(new)
        assert (await partition.get(["d", "a"], ["n"]))["n"].tolist() == [13, 10]
        assert [row.row for row in await partition.claim("grade", 8, timeout=5)] == new
        assert (await partition.rows()).rows == new
