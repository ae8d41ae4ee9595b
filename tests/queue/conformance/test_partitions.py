"""Behaviours 22 to 26: partitions, and what is cleared."""

import asyncio

import numpy as np
import pytest

from asyncflow.errors import Refused, StaleHandle


async def test_22_partitions_do_not_meet(two_units):
    one, two = two_units.partition("one"), two_units.partition("two")
    for partition in (one, two):
        await partition.declare("grade", ["text"])
    first = await one.put({"text": ["a"]}, keys=["k"], tags=[{"of": 1}])
    second = await two.put({"text": [np.arange(3)]}, keys=["k"], tags=[{"of": 2}])
    assert first != second
    assert (await one.get(["k"], ["text"]))["text"] == ["a"]
    assert (await two.get(["k"], ["text"]))["text"].tolist() == [[0, 1, 2]]
    assert (await one.keys(), await two.keys()) == ({"k": {"of": 1}}, {"k": {"of": 2}})
    assert [row.row for row in await one.claim("grade", 8, timeout=5)] == first
    await one.clear()
    assert [row.row for row in await two.claim("grade", 8, timeout=5)] == second


async def test_23_a_cleared_partition_is_as_new(two_units, scores):
    await scores.declare("grade", ["text"])
    await scores.expect(5)
    old = await scores.put({"text": ["a", "b"]}, keys=["x", "y"], tags=[{"n": 1}, {"n": 2}])
    await scores.claim("grade", 1, timeout=5)
    await scores.clear()
    assert await scores.keys() == {}
    assert (await scores.rows()).rows == []
    told = await scores.produced(["text"])
    assert (told.rows, told.cleared, told.expected, told.all) == (0, 0, None, False)
    await two_units.until(lambda: two_units.held == 0)
    with pytest.raises(StaleHandle):
        await scores.get(["x"], ["text"])
    new = await scores.put({"text": ["c"]}, keys=["x"])
    assert not set(new) & set(old)
    assert [row.row for row in await scores.claim("grade", 8, timeout=5)] == new


async def test_24_cleared_rows_are_handed_out_no_more_and_the_others_stay(scores):
    await scores.declare("grade", ["text"])
    rows = await scores.put({"text": [str(n) for n in range(200)]})
    gone, kept = rows[::2], rows[1::2]

    async def take():
        found = []
        while part := await scores.claim("grade", 7, timeout=0.2):
            found += [row.row for row in part]
        return found

    taking, _ = await asyncio.gather(take(), scores.clear(gone))
    after = set(await take())
    assert set(kept) <= {*taking, *after}
    assert not after & set(gone)
    assert (await scores.get(kept, ["text"]))["text"] == [str(n) for n in range(1, 200, 2)]
    assert (await scores.rows()).rows == kept


async def test_24_a_group_of_which_rows_were_cleared_is_handed_out_without_them(scores):
    await scores.declare("whole", ["text"], groups=True)
    rows = await scores.put({"text": ["a", "b", "c"]}, group_size=3)
    await scores.clear(rows[1:2])
    assert [row.row for row in await scores.claim("whole", 8, timeout=5)] == [rows[0], rows[2]]


async def test_25_clearing_what_is_not_there_does_nothing(scores):
    rows = await scores.put({"text": ["a", "b"]}, keys=["x", "y"])
    await scores.clear([1, 2, 3])
    await scores.clear(["nobody"])
    await scores.clear([rows[0], 77])
    await scores.clear(rows[:1])
    await scores.clear(["nobody", "y"])
    assert (await scores.rows()).rows == []
    await scores.clear()
    await scores.clear()


async def test_26_an_id_is_never_used_again(two_units, scores):
    other = two_units.partition("other")
    seen = set()
    for turn in range(4):
        rows = await (scores if turn % 2 else other).put({"n": np.arange(8)})
        assert not seen & set(rows)
        seen |= set(rows)
        await scores.clear(rows)
        await other.clear(rows)
        if turn == 1:
            await two_units.restart_controller()
    assert (await scores.rows()).rows == (await other.rows()).rows == []
    with pytest.raises(StaleHandle):
        await scores.write(sorted(seen)[:1], {"n": np.zeros(1, np.int64)})


async def ended(queue, *, timeout=5):
    """Tell whether the queue says that nothing more comes for the task, rather than that nothing came in time."""
    claimed = await queue.client.claim(partition="scores", task="grade", max_rows=8, until_done=True, timeout=timeout)
    assert not claimed.rows
    return claimed.ended


@pytest.mark.parametrize("how", ["close", "expect"])
async def test_19_who_waits_is_told_that_no_more_rows_come(two_units, scores, how):
    await scores.declare("grade", ["text"])
    await scores.put({"text": ["a", "b", "c"]})
    other = two_units.partition(worker="other")
    held = await other.claim("grade", 8, timeout=5)
    assert len(held) == 3
    assert not await ended(two_units, timeout=0.1)
    waiting = asyncio.create_task(ended(two_units, timeout=30))
    await (scores.close() if how == "close" else scores.expect(3))
    await asyncio.sleep(0.1)
    assert not waiting.done(), "another holds rows, which may come back"
    assert all(await other.complete(held))
    assert await waiting
    await two_units.restart_controller()
    assert await ended(two_units)
    await scores.clear()
    assert not await ended(two_units, timeout=0.1)


async def test_19_cleared_rows_count_towards_those_that_were_expected(two_units, scores):
    await scores.declare("grade", ["text"])
    await scores.expect(4)
    rows = await scores.put({"text": ["a", "b"]})
    await scores.clear(rows)
    assert not await ended(two_units, timeout=0.1)
    await scores.clear(await scores.put({"text": ["c", "d"]}))
    assert await ended(two_units)


async def test_19_a_closed_partition_takes_no_new_rows_and_all_else(two_units, scores):
    await scores.declare("grade", ["text"])
    await scores.put({"text": list("abcdefgh")}, keys=list("abcdefgh"))
    there = set(await scores.keys())
    await scores.close()
    for keys in (None, ["new"]):
        with pytest.raises(Refused, match="the partition is closed: it gets no more rows"):
            await scores.put({"text": ["x"]}, keys=keys)
    with pytest.raises(Refused, match="closed"):
        await scores.put({"text": ["A", "x"]}, keys=["a", "new"])
    assert set(await scores.keys()) == there
    await scores.put({"text": ["A"]}, keys=["a"])
    await two_units.stop_unit(0)
    await two_units.start_unit(0)
    lost = sorted(there - set(await scores.keys()))
    await scores.put({"text": lost}, keys=lost)
    assert set(await scores.keys()) == there
    await scores.clear()
    await scores.put({"text": ["x"]}, keys=["new"])
    assert list(await scores.keys()) == ["new"]
