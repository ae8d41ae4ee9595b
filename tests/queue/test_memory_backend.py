"""Blobs in memory: the bytes that were put, and never more than twice those that live."""

import asyncio

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.queue.storage.backend import Place
from asyncflow.queue.storage.memory import MemoryBackend
from asyncflow.queue.values import encode
from asyncflow.rpc.columns import Jagged


def columns(lengths):
    return {
        "a": Jagged.from_rows([np.arange(n) + 100 * i for i, n in enumerate(lengths)], "int64"),
        "b": Jagged.from_rows([np.full((n, 2), i) for i, n in enumerate(lengths)], "int16", inner=(2,)),
        "c": encode(["x" * n for n in lengths]),
    }


def nbytes(backend):
    """Bytes in memory, including those that are no longer needed."""
    return sum(cells.column.nbytes for blob in backend._blobs.values() for cells in blob.values())


blobs = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=8), min_size=1, max_size=4)


@given(blobs, st.data())
def test_what_lives_reads_back_in_any_order_and_takes_no_more_than_twice_its_bytes(lengths, data):
    async def run():
        backend = MemoryBackend()
        put = {number: columns(rows) for number, rows in enumerate(lengths)}
        for number, batch in put.items():
            await backend.put(number, batch)
        alive = {(Place(n, i), name) for n, rows in enumerate(lengths) for i in range(len(rows)) for name in "abc"}
        for names in data.draw(st.lists(st.sampled_from([*"abc", "ab", "cab"]), max_size=8)):
            there = sorted({place for place, _ in alive if all((place, name) in alive for name in names)})
            if not there:
                continue
            asked = data.draw(st.lists(st.sampled_from(there), min_size=1, max_size=6, unique=True))
            got = await backend.get(asked, list(names))
            assert list(got) == list(names)
            for name in names:
                expected = [put[place.blob][name].cut(place.row, place.row + 1) for place in asked]
                assert got[name] == Jagged.concat(expected)
            first = data.draw(st.integers(0, len(there)))
            gone = data.draw(st.one_of(st.lists(st.sampled_from(there), unique=True), st.just(there[first:][:6])))
            await backend.free(gone, list(names))
            alive -= {(place, name) for place in gone for name in names}
            needed = sum(put[place.blob][name].row(place.row).nbytes + 8 for place, name in alive)
            assert nbytes(backend) <= 2 * needed + 8 * len({(place.blob, name) for place, name in alive})
        for place, name in sorted(alive):
            await backend.free([place], [name])
        assert nbytes(backend) == 0

    asyncio.run(run())


async def test_rows_that_lie_in_one_extent_are_given_as_they_lie_also_after_others_have_gone():
    backend = MemoryBackend()
    column = Jagged.from_rows([np.arange(100) for _ in range(10)], "int64")
    await backend.put(7, {"a": column})
    there = (await backend.get([Place(7, i) for i in range(2, 6)], ["a"]))["a"]
    assert np.shares_memory(there.values, column.values)
    await backend.free([Place(7, i) for i in (0, 1, 2, 3, 6, 7)], ["a"])
    first = (await backend.get([Place(7, i) for i in (4, 5)], ["a"]))["a"]
    again = (await backend.get([Place(7, i) for i in (4, 5)], ["a"]))["a"]
    assert not np.shares_memory(first.values, column.values)
    assert np.shares_memory(first.values, again.values)
    assert first == column.take([4, 5])
