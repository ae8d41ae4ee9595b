"""Behaviours 22 to 26: partitions, and what is cleared."""

import asyncio

import numpy as np
import pytest

from asyncflow.errors import StaleHandle


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
