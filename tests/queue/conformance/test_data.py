"""Behaviours 1 to 7: what is put is what is read."""

import asyncio

import numpy as np
import pytest
import torch

from asyncflow.errors import Refused
from asyncflow.queue.torch import Column

EVERY_KIND = {
    "float32": np.array([[1.5, 2.5], [3.5, -0.0]], np.float32),
    "int64": np.array([2**62, -1]),
    "fp16": np.array([[1.0], [65504.0]], np.float16),
    "fixed": np.arange(24).reshape(2, 3, 4),
    "jagged": [np.arange(3, dtype=np.int32), np.arange(5, dtype=np.int32)],
    "bytes": [b"\x00\xff", b"two"],
    "str": ["eins", "zwei: é 字"],
    "dict": [{"a": 1, "b": [1.5, None]}, {"a": {"deep": (1, "x")}}],
    "object": [None, ["any", {"plain": True}]],
    "bool": [True, False],
}


def same(left, right):
    """Equal value by value, NaN to NaN."""
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        left, right = np.asarray(left), np.asarray(right)
        floats = left.dtype.kind == right.dtype.kind == "f"
        return left.shape == right.shape and left.dtype == right.dtype and np.array_equal(left, right, equal_nan=floats)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


async def round_trip(partition, values, column="it"):
    rows = await partition.put({column: values})
    return (await partition.get(rows, [column]))[column]


async def test_01_every_kind_of_column_reads_back_equal(scores):
    rows = await scores.put(EVERY_KIND)
    found = await scores.get(rows, list(EVERY_KIND))
    assert list(found) == list(EVERY_KIND)
    for name, put in EVERY_KIND.items():
        put = np.array(put) if name == "bool" else put
        assert same(found[name], put), name


async def test_01_tensors_read_back_equal_bfloat16_too(two_units):
    partition = two_units.partition(tensors=True)
    put = {
        "bf16": torch.randn(4, 3, generator=torch.manual_seed(1)).bfloat16(),
        "half": torch.arange(4.0).half(),
        "ints": [torch.arange(n) for n in (1, 0, 3, 2)],
    }
    found = await partition.get(await partition.put(put), list(put))
    assert found["bf16"].dtype is torch.bfloat16
    assert torch.equal(found["bf16"], put["bf16"])
    assert torch.equal(found["half"], put["half"])
    assert all(map(torch.equal, found["ints"], put["ints"]))


async def test_01_bfloat16_reads_without_torch_as_the_equal_float32(scores):
    put = torch.tensor([1.0, float("nan"), float("-inf"), 2**-126]).bfloat16()
    assert same(await round_trip(scores, put), put.float().numpy())


@pytest.mark.parametrize(
    "values",
    [
        np.array([np.nan, np.inf, -np.inf, -0.0], np.float32),
        [np.zeros(0, np.float16), np.array([np.nan], np.float16)],
        np.zeros((2, 0), np.int64),
        [np.zeros((0, 3)), np.ones((2, 3))],
        np.array([3.5], np.float64),
        [np.float32(1.0), np.float32("nan")],
        ["", "x"],
        [b"", b""],
        [{}, []],
    ],
    ids=lambda values: f"{type(values).__name__} of {type(values[0]).__name__} {values!r:.20}",
)
async def test_02_nothing_is_too_empty_or_too_strange(scores, values):
    found = await round_trip(scores, values)
    assert same(found, np.array(values) if isinstance(values[0], np.generic) else values)


async def test_03_what_is_not_contiguous_reads_back_as_its_contiguous_form(scores):
    whole = np.arange(60).reshape(5, 3, 4)
    for n, view in enumerate((whole.transpose(2, 1, 0), whole[::2], whole[:, ::-1, 1], np.asfortranarray(whole))):
        assert same(await round_trip(scores, view, f"view {n}"), np.ascontiguousarray(view))
    rows = [whole[0].T, whole[1].T[::2]]
    assert same(await round_trip(scores, rows, "rows"), [row.copy() for row in rows])
    assert same(await round_trip(scores, torch.arange(6).reshape(2, 3).T, "tensor"), np.arange(6).reshape(2, 3).T)


@pytest.mark.parametrize("size", [4, 65_536])
async def test_04_no_read_after_it_sees_what_a_reader_changes(two_units, scores, size):
    put = np.arange(2.0 * size).reshape(2, size)
    expected = put.copy()
    rows = await scores.put({"it": put})
    put += 7
    other, blocking = two_units.partition(worker="other"), two_units.blocking()
    readers = (
        lambda: scores.get(rows, ["it"]),
        lambda: other.get(rows, ["it"]),
        lambda: asyncio.to_thread(blocking.get, rows, ["it"]),
    )
    for read in readers:
        mine = (await read())["it"]
        mine += 1
        for again in readers:
            assert same((await again())["it"], expected)
        assert same(mine, expected + 1)
    blocking.queue.close()


@pytest.mark.parametrize("size", [4, 65_536])
async def test_04_tensors_are_writable_and_no_read_after_it_sees_what_is_changed_in_them(two_units, scores, size):
    partition = two_units.partition(tensors=True)
    put = torch.arange(2.0 * size).reshape(2, size)
    rows = await partition.put({"it": put, "beside": torch.arange(2)})
    for _ in range(3):
        found = await partition.get(rows, ["it", "beside"])
        held = await two_units.client.fetch(rows, list(found), timeout=5)
        columns = [Column.of(of) for of in held.values()]
        tensors = [*found.values(), *(tensor for column in columns for tensor in (column.values, column.offsets))]
        for tensor in tensors:
            tensor += 1
        again = await partition.get(rows, ["it", "beside"])
        assert torch.equal(again["it"], put)
        assert again["beside"].tolist() == [0, 1]
        assert torch.equal(found["it"], put + 1)
        assert [len(column) for column in held.values()] == [2, 2]


async def test_04_what_was_read_stays_when_its_rows_are_replaced_or_cleared_and_others_come(two_units, scores):
    put = np.arange(4.0 * 65_536).reshape(4, 65_536)
    rows = await scores.put({"it": put})
    whole, some = [(await scores.get(asked, ["it"]))["it"] for asked in (rows, rows[1:3])]
    await scores.write(rows[1:2], {"it": -put[1:2]})
    assert same((await scores.get(rows[1:3], ["it"]))["it"], np.stack([-put[1], put[2]]))
    await scores.clear(rows)
    for factor in range(2, 12):
        others = await scores.put({"it": factor * put})
        assert same((await scores.get(others, ["it"]))["it"], factor * put)
        assert same(whole, put)
        assert same(some, put[1:3])
        await scores.clear(others)
    await two_units.until(lambda: two_units.held == 0)


async def test_05_rows_come_in_the_order_of_the_handles(scores):
    rows = [row for n in range(8) for row in await scores.put({"n": np.array([2 * n, 2 * n + 1])})]
    order = [11, 3, 0, 15, 4, 7, 8, 1]
    assert (await scores.get([rows[i] for i in order], ["n"]))["n"].tolist() == order


async def test_05_a_row_that_is_asked_for_twice_is_given_twice(scores):
    rows = [row for n in range(6) for row in await scores.put({"n": np.array([n]), "text": [f"t{n}"]}, keys=[f"k{n}"])]
    order = [4, 1, 4, 4, 0, 1]
    found = await scores.get([rows[i] for i in order], ["n", "text", "n"])
    assert (found["n"].tolist(), found["text"]) == (order, [f"t{i}" for i in order])
    assert (await scores.get([f"k{i}" for i in order], ["n"]))["n"].tolist() == order


async def test_06_a_regular_column_becomes_jagged_and_regular_again(scores):
    rows = await scores.put({"it": np.ones((3, 2))})
    odd = await scores.put({"it": np.ones((1, 5))})
    assert [row.shape for row in (await scores.get(rows + odd, ["it"]))["it"]] == [(2,), (2,), (2,), (5,)]
    await scores.clear(odd)
    assert (await scores.get(rows, ["it"]))["it"].shape == (3, 2)


async def test_06_only_the_first_dimension_of_a_row_may_differ(scores):
    await scores.put({"it": np.ones((3, 2, 4))})
    with pytest.raises(Refused, match="it holds"):
        await scores.put({"it": np.ones((3, 2, 5))})
    with pytest.raises(Refused, match="differ in their first dimension"):
        await scores.put({"other": [np.ones((2, 2)), np.ones((2, 3))]})


async def test_07_columns_of_different_length_are_refused(scores):
    rows = await scores.put({"a": np.zeros(3)})
    for wrong in (
        lambda: scores.put({"a": np.zeros(4), "b": np.zeros(3)}),
        lambda: scores.put({"a": np.zeros(4)}, keys=["only one"]),
        lambda: scores.put({"a": np.zeros(3)}, tags=[{}]),
        lambda: scores.put({"a": np.zeros(3)}, group_size=2),
        lambda: scores.write(rows, {"b": np.zeros(2)}),
        lambda: scores.write(rows, {"b": np.zeros(3)}, tags=[{}]),
    ):
        with pytest.raises(Refused):
            await wrong()
    assert (await scores.rows()).rows == rows
    assert (await scores.produced(["b"])).done == 0


@pytest.mark.parametrize("value", [[object()], [{1, 2}], np.zeros(2, np.complex64), [1 << 70], ["\ud800"], 3.5])
async def test_07_what_could_not_be_given_back_equal_is_refused(scores, value):
    with pytest.raises(Refused):
        await scores.put({"it": value})
    assert (await scores.rows()).rows == []
