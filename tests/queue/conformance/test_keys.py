"""Behaviours 27 to 30: keys and tags."""

import asyncio
from functools import partial

import numpy as np
import pytest

from asyncflow.errors import Refused, StaleHandle
from asyncflow.queue.partition import Partition


async def test_27_a_put_by_key_creates_or_updates_and_keeps_the_other_columns(two_units, scores):
    first = await scores.put({"text": ["a", "b"], "n": np.array([1, 2])}, keys=["x", "y"])
    again = await scores.put({"n": np.array([20, 30]), "new": ["B", "C"]}, keys=["y", "z"])
    assert again[0] == first[1]
    assert again[1] not in first
    assert (await scores.get(["x", "y"], ["text", "n"]))["n"].tolist() == [1, 20]
    assert (await scores.get(["z", "y"], ["new"]))["new"] == ["C", "B"]
    sight = await scores.peek(rows=again)
    assert {name for name, sizes in sight.sizes.items() if sizes[0] >= 0} == {"text", "n", "new"}
    await two_units.restart_controller()
    assert await scores.put({"n": np.array([9])}, keys=["x"]) == first[:1]


async def test_27_two_who_put_the_same_keys_at_once_make_one_row_of_each(two_units, scores):
    keys = [f"k{n}" for n in range(50)]
    writers = [two_units.partition("scores", worker=f"w{n}") for n in range(4)]
    made = await asyncio.gather(*(w.put({f"c{n}": np.arange(50)}, keys=keys) for n, w in enumerate(writers)))
    assert made[0] == made[1] == made[2] == made[3]
    assert len((await scores.rows()).rows) == 50
    found = await scores.get(keys, ["c0", "c1", "c2", "c3"])
    assert all(column.tolist() == list(range(50)) for column in found.values())


async def test_28_tags_alone_are_merged_and_listed(two_units, scores):
    await scores.put({}, keys=["x", "y"], tags=[{"status": "pending", "n": 1}, {"status": "pending"}])
    await scores.put({}, keys=["x"], tags=[{"status": "running"}])
    await scores.tag(["y"], [{"score": 0.5}])
    listed = {"x": {"status": "running", "n": 1}, "y": {"status": "pending", "score": 0.5}}
    assert await scores.keys() == listed
    assert await two_units.partition("unknown").keys() == {}
    await two_units.partition("other").put({"n": np.zeros(3)}, keys=["x", "z", "y"], tags=[{"of": "other"}, {}, {}])
    partitions = await two_units.client.partitions(timeout=5)
    assert partitions == {"other": 3, "scores": 2}
    everything = {"other": {"x": {"of": "other"}, "z": {}, "y": {}}, "scores": listed}
    blocking = two_units.blocking()
    for _ in range(2):
        found = await two_units.client.list_all(timeout=5)
        assert {name: dict(zip(of.keys, of.tags, strict=True)) for name, of in found.items()} == everything
        assert await asyncio.to_thread(blocking.queue.list_all, timeout=5) == found
        await two_units.restart_controller()
    blocking.queue.close()
    assert await scores.keys() == listed
    await scores.write(["x"], {"text": ["now it has one"]})
    assert (await scores.get(["x"], ["text"]))["text"] == ["now it has one"]


async def test_29_unknown_keys_and_columns_are_errors_and_a_subset_comes_in_the_order_asked(scores):
    await scores.put({"n": np.arange(5)}, keys=list("abcde"))
    assert (await scores.get(["d", "a", "c"], ["n"]))["n"].tolist() == [3, 0, 2]
    with pytest.raises(StaleHandle, match="'nobody'"):
        await scores.get(["nobody"], ["n"])
    with pytest.raises(Refused, match="no column 'm'"):
        await scores.get(["a"], ["m"])
    with pytest.raises(Refused, match="key a is named twice"):
        await scores.put({"n": np.arange(2)}, keys=["a", "a"])


async def test_29_a_key_whose_row_was_lost_with_its_unit_is_said_to_be_lost(two_units, scores):
    await scores.put({"n": np.arange(8)}, keys=list("abcdefgh"))
    there = set(await scores.keys())
    await two_units.stop_unit(0)
    await two_units.start_unit(0)
    lost = sorted(there - set(await scores.keys()))
    assert lost
    with pytest.raises(StaleHandle, match=f"the row of key '{lost[0]}' was lost with its storage unit. Put it again"):
        await scores.get([lost[0]], ["n"])
    with pytest.raises(
        StaleHandle, match=r"no row has the key 'nobody'\. It was never put, or was cleared; keys\(\) lists"
    ):
        await scores.get(["nobody"], ["n"])
    await two_units.restart_controller()
    with pytest.raises(StaleHandle, match=f"or lost with a storage unit, as {len(lost)} rows were"):
        await scores.get([lost[0]], ["n"])
    await scores.put({"n": np.array([50])}, keys=lost[:1])
    assert (await scores.get(lost[:1], ["n"]))["n"].tolist() == [50]


@pytest.mark.parametrize("key", ["", None, 7, b"a"])
async def test_29_what_is_no_key_is_refused_and_nothing_is_put(scores, key):
    with pytest.raises(Refused, match=r"cannot be the key of a row\. A key is a text of at least one character"):
        await scores.put({"n": np.arange(2)}, keys=["a", key])
    with pytest.raises(Refused, match="not a text or is empty"):
        await scores.put({"n": np.arange(2)}, tags=[{"key": "a"}, {"key": "" if key is None else 7}])
    assert (await scores.rows()).rows == []


async def test_29_texts_and_tags_that_cannot_be_sent_are_refused_and_the_connection_goes_on(two_units, scores):
    half = "\ud800"
    blocking = two_units.blocking()
    for partition in (scores, Partition(two_units.client, half)):
        for options in ({"keys": [half]}, {"tags": [{half: 1}]}, {"tags": [{"a": half}]}):
            with pytest.raises(Refused, match=r"a value cannot be sent: .*surrogates"):
                await partition.put({"n": np.arange(1)}, **options)
    for tag, why in {np.int64(1): "int64", 1 << 64: r"2\*\*64", object(): "object"}.items():
        for verb in (scores.put, partial(scores.write, [1])):
            with pytest.raises(Refused, match=f"{why}.*"):
                await verb({"n": np.arange(1)}, tags=[{"a": tag}])
    for tags in ([3], [{}, {}], "a"):
        with pytest.raises(Refused, match=r"1 rows came with . sets of tags\. Pass one mapping a row"):
            await scores.put({"n": np.arange(1)}, tags=tags)
    for verb in (blocking.get, blocking.write):
        with pytest.raises(Refused, match="a value cannot be sent"):
            await asyncio.to_thread(verb, [half], ["n"] if verb == blocking.get else {"n": [1]})
    (row,) = await asyncio.to_thread(blocking.put, {"n": np.arange(1)}, keys=["a"])
    assert (await scores.rows()).rows == [row]


async def test_29_rows_are_named_by_whole_numbers_or_keys_and_by_nothing_else(scores):
    rows = await scores.put({"n": np.arange(3)}, keys=list("abc"))
    assert (await scores.get(np.array(rows), ["n"]))["n"].tolist() == [0, 1, 2]
    for verb in (scores.get, scores.write):
        with pytest.raises(Refused, match="None names no row"):
            await verb([None], ["n"] if verb == scores.get else {"n": [1]})
    with pytest.raises(Refused, match=r"1\.5 names no row"):
        await scores.clear([rows[0], 1.5])
    await scores.clear(np.array(rows[:2]))
    assert (await scores.rows()).rows == rows[2:]


async def test_30_tags_of_a_row_reach_every_reader_after_that_and_go_with_it(two_units, scores):
    await scores.declare("grade", ["n"])
    rows = await scores.put({"n": np.arange(3)}, tags=[{"tokens": 7, "of": "me"}, {}, {"tokens": 9}])
    await scores.tag(rows[1:2], [{"late": True}])
    expected = [{"tokens": 7, "of": "me"}, {"late": True}, {"tokens": 9}]
    for reader in (scores, two_units.partition("scores", worker="other")):
        assert (await reader.rows()).tags == expected
    leased = await scores.claim("grade", 8, timeout=5)
    assert [row.meta.tags for row in leased] == expected
    await scores.clear(rows[:1])
    assert (await scores.rows()).tags == expected[1:]
