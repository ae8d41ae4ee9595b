"""Behaviours 8 to 12: rows and columns."""

import asyncio

import numpy as np
import pytest
from deadlines import ends_late

from asyncflow.errors import Refused
from asyncflow.identity import RowPlace


async def test_08_another_process_adds_columns_and_the_old_ones_stay(two_units, scores):
    rows = await scores.put({"text": ["a", "b"]})
    other = two_units.partition("scores", worker="other")
    await other.write(rows, {"score": np.array([0.5, 1.5])})
    found = await scores.get(rows, ["score", "text"])
    assert found["text"] == ["a", "b"]
    assert found["score"].tolist() == [0.5, 1.5]


async def test_08_from_a_thread_that_blocks_too(two_units, scores):
    rows = await scores.put({"text": ["a", "b"]})
    blocking = two_units.blocking("scores")
    await asyncio.to_thread(blocking.write, rows, {"score": np.array([0.5, 1.5])})
    assert (await asyncio.to_thread(blocking.get, rows, ["score"]))["score"].tolist() == [0.5, 1.5]
    blocking.queue.close()


async def test_09_a_write_replaces_its_cells_and_no_others_on_all_units(two_units, scores):
    rows = [row for n in range(8) for row in await scores.put({"n": np.array([n])})]
    assert {RowPlace.of(row).unit for row in rows} == {0, 1}
    held = two_units.held
    await scores.write(rows[2:5], {"n": np.array([102, 103, 104])})
    assert (await scores.get(rows, ["n"]))["n"].tolist() == [0, 1, 102, 103, 104, 5, 6, 7]
    for again in range(3):
        await scores.write(rows, {"n": np.arange(8) + again})
    assert (await scores.get(rows, ["n"]))["n"].tolist() == list(range(2, 10))
    await two_units.until(lambda: two_units.held == held)


async def test_10_a_column_of_some_rows_is_theirs_only(scores):
    rows = await scores.put({"text": ["a", "b", "c"]})
    await scores.declare("judge", ["score"])
    await scores.write(rows[1:2], {"score": np.array([1.0])})
    assert (await scores.get(rows[1:2], ["score"]))["score"].tolist() == [1.0]
    with pytest.raises(Refused, match="has no column 'score'"):
        await scores.get(rows, ["score"])
    assert [row.row for row in await scores.claim("judge", 8, timeout=1)] == [rows[1]]
    assert (await scores.peek("judge")).lacks == [["score"], [], ["score"]]


async def test_11_a_row_reads_back_wherever_it_lies(two_units, scores):
    one_by_one = [row for n in range(6) for row in await scores.put({"n": np.array([n])})]
    together = await scores.put({"n": np.arange(6)})
    everything = one_by_one[::-1] + together
    assert (await scores.get(everything, ["n"]))["n"].tolist() == [5, 4, 3, 2, 1, 0, 0, 1, 2, 3, 4, 5]
    await two_units.restart_controller()
    assert (await scores.get(everything, ["n"]))["n"].tolist() == [5, 4, 3, 2, 1, 0, 0, 1, 2, 3, 4, 5]


async def test_11_a_row_reads_back_while_it_moves(queue):
    async with queue(units=3) as made:
        partition = made.partition()
        await partition.declare("grade", ["n"], writes=["score"])
        rows = [row for n in range(30) for row in await partition.put({"n": np.arange(n, n + 4).reshape(1, 4)})]
        leased = await partition.claim("grade", 9, timeout=5)
        leaving = asyncio.create_task(made.units[1].leave())
        reads = 0
        while not leaving.done():
            assert (await partition.get(rows, ["n"]))["n"][:, 0].tolist() == list(range(30))
            reads += 1
            await asyncio.sleep(0)
        assert await leaving
        assert reads
        assert len(made.units[1].holdings) == 0
        await made.stop_unit(1)
        assert (await partition.get(rows, ["n"]))["n"][:, 3].tolist() == list(range(3, 33))
        assert all(await partition.complete(leased, {"score": np.ones(9)}))
        assert (await partition.get(leased, ["score"]))["score"].tolist() == [1.0] * 9
        await made.restart_controller()
        assert (await partition.get(rows, ["n"]))["n"][:, 0].tolist() == list(range(30))
        await partition.clear(rows)
        await made.until(lambda: made.held == 0)


async def test_12_room_counts_bytes_and_a_rewrite_takes_none(queue):
    async with queue(units=1, limit=1 << 20) as made:
        partition = made.partition()
        rows = await partition.put({"blob": [bytes(200_000)] * 2})
        assert made.held == 400_000
        for _ in range(20):
            await partition.write(rows, {"blob": [bytes(200_000)] * 2})
        await made.until(lambda: made.held == 400_000)
        left = (made.limit - 400_000) // 64
        many = await partition.put({"n": np.zeros((left, 8))})
        assert len(many) == left > 10_000
        assert made.held == made.limit
        await ends_late(
            lambda timeout: partition.put({"one": np.zeros(1)}, timeout=timeout),
            says="no room for 8 bytes",
            within_s=0.5,
        )
        await partition.clear(many[:1])
        assert len(await partition.put({"one": np.zeros(8)})) == 8
