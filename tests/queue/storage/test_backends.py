"""Tests of what every backend must do, on real stores: give back what it was given, and forget what was freed."""

import asyncio
import random

import numpy as np
import pytest

from asyncflow.queue.storage.backend import Place
from asyncflow.queue.values import decode, encode
from asyncflow.rpc.columns import DTYPES, Jagged

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


def places(blob, rows):
    return [Place(blob, index) for index in (range(rows) if isinstance(rows, int) else rows)]


def samples(rows, *, seed=0, longest=300):
    """Columns as a rollout has them, with some rows empty."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, longest, rows)
    return {
        "tokens": Jagged.from_rows([rng.integers(0, 1 << 40, n) for n in lengths], "int64"),
        "logprobs": Jagged.from_rows([rng.standard_normal(n) for n in lengths], "float32"),
        "image": Jagged.from_rows([rng.integers(0, 255, (n % 3, 4, 2)) for n in lengths], "uint8", inner=(4, 2)),
        "reward": Jagged.from_rows([np.float64(n) for n in lengths], "float64", inner=None),
        "answer": encode(["ä" * (n % 7) for n in lengths]),
        "nothing": Jagged.from_rows([[]] * rows, "int16"),
    }


def taken(columns, indices):
    return {name: column.take(indices) for name, column in columns.items()}


async def test_what_is_put_is_given_back_in_the_order_asked(backend):
    put = samples(40)
    await backend.put(1, put)
    assert await backend.get(places(1, 40), list(put)) == put
    order = random.Random(1).sample(range(40), k=30)
    assert await backend.get(places(1, order), ["answer", "tokens"]) == {
        name: put[name].take(order) for name in ("answer", "tokens")
    }


async def test_every_dtype_comes_back_bit_by_bit(backend):
    raw = np.random.default_rng(3).integers(0, 256, 240).astype(np.uint8)
    for blob, (dtype, stored) in enumerate(DTYPES.items()):
        if dtype not in ("text", "object"):
            values = np.concatenate([(raw & 1 if dtype == "bool" else raw).view(stored), np.zeros(1, stored)])
            column = Jagged(values, np.array([0, 0, 7, 7, values.size]), dtype)
            await backend.put(blob, {"x": column})
            assert (await backend.get(places(blob, 4), ["x"]))["x"] == column


async def test_rows_of_several_blobs_make_one_column(backend):
    parts = {blob: samples(5, seed=blob) for blob in (3, 4, 5)}
    await asyncio.gather(*(backend.put(blob, columns) for blob, columns in parts.items()))
    asked = [Place(4, 2), Place(3, 0), Place(5, 4), Place(4, 0), Place(3, 1)]
    got = await backend.get(asked, ["tokens", "answer"])
    for name, column in got.items():
        assert column == Jagged.concat([parts[blob][name].cut(index, index + 1) for blob, index in asked])


async def test_a_reader_has_its_own(backend):
    put = {"x": Jagged.from_rows([[1, 2, 3], [4]], "int32")}
    await backend.put(1, put)
    before = (await backend.get(places(1, 2), ["x"]))["x"].values.copy()
    await backend.free(places(1, [0]), ["x"])
    assert (await backend.get(places(1, [1]), ["x"]))["x"].values.tolist() == [4]
    assert before.tolist() == [1, 2, 3, 4]


async def test_freeing_leaves_everything_else(backend):
    put = samples(30)
    await backend.put(1, put)
    await backend.free(places(1, range(0, 30, 3)), list(put))
    await backend.free(places(1, [1, 4]), ["tokens", "image", "reward"])
    left = [index for index in range(30) if index % 3]
    assert await backend.get(places(1, left), ["logprobs", "answer"]) == taken(
        {name: put[name] for name in ("logprobs", "answer")}, left
    )
    await backend.free(places(1, [1, 4]), ["logprobs", "answer", "nothing"])
    rest = [index for index in left if index not in (1, 4)]
    assert await backend.get(places(1, rest), list(put)) == taken(put, rest)
    await backend.free(places(1, rest), list(put))


async def test_a_row_without_any_byte_is_a_row(backend):
    empty = {"x": Jagged.from_rows([[], []], "int32"), "y": encode(["", ""])}
    await backend.put(1, empty)
    assert await backend.get(places(1, 2), ["x", "y"]) == empty
    await backend.free(places(1, 2), ["x", "y"])


async def test_many_rows_and_large_ones(backend):
    many = {"x": Jagged.from_rows([[row] for row in range(1500)], "int64")}
    large = {"x": Jagged.from_rows([np.arange(3 << 20), np.arange(9), np.arange(1 << 20)], "int64")}
    await asyncio.gather(backend.put(1, many), backend.put(2, large))
    assert await backend.get(places(1, 1500), ["x"]) == many
    assert await backend.get(places(2, 3), ["x"]) == large
    await asyncio.gather(backend.free(places(1, 1500), ["x"]), backend.free(places(2, 3), ["x"]))


async def test_reads_writes_and_removals_at_once(backend):
    rng = random.Random(5)

    async def live(blob):
        put = samples(rng.randrange(1, 30), seed=blob)
        rows = len(put["tokens"])
        await backend.put(blob, put)
        for _ in range(3):
            order = rng.sample(range(rows), k=rng.randint(1, rows))
            assert await backend.get(places(blob, order), list(put)) == taken(put, order)
        reading = asyncio.create_task(backend.get(places(blob, rows), list(put)))
        await asyncio.sleep(0)
        await backend.free(places(blob, rows), list(put))
        assert await reading == put

    await asyncio.gather(*(live(blob) for blob in range(40)))


async def test_a_put_that_is_cancelled_leaves_nothing(backend):
    for blob in range(10):
        put = asyncio.create_task(backend.put(blob, samples(50, seed=blob)))
        await asyncio.sleep(0.002 * blob)
        put.cancel()
        await asyncio.wait([put])
        if not put.cancelled():
            await backend.free(places(blob, 50), list(samples(1)))
    await backend.put(99, samples(5))
    assert await backend.get(places(99, 5), ["tokens"]) == {"tokens": samples(5)["tokens"]}


@pytest.mark.parametrize("seed", range(3))
async def test_any_blobs_are_kept_apart(backend, seed):
    rng = random.Random(seed)
    parts = {blob: [rng.randbytes(rng.choice((0, 1, 40))) for _ in range(rng.randrange(1, 7))] for blob in range(20)}
    for blob, rows in parts.items():
        column = encode(rows)
        await backend.put(blob, {"a": column, "b": column})
    live = [Place(blob, index) for blob, rows in parts.items() for index in range(len(rows))]
    freeing = []
    while live:
        asked = rng.sample(live, k=min(12, len(live)))
        got = await backend.get(asked, ["b"])
        assert decode(got["b"]) == [parts[place.blob][place.row] for place in asked]
        rng.shuffle(live)
        gone, live = live[:10], live[10:]
        freeing += [asyncio.create_task(backend.free([place], ["a", "b"])) for place in gone]
        await asyncio.sleep(0)
    await asyncio.gather(*freeing)
