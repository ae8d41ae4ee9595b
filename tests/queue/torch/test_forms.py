"""Packed, padded, nested, as a TensorDict; and to the queue and back."""

import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from asyncflow.errors import ManifestError, Refused  # noqa: E402
from asyncflow.queue.protocol.messages import RowMeta  # noqa: E402
from asyncflow.queue.torch import Batch, Column  # noqa: E402
from asyncflow.queue.values import decode, encode  # noqa: E402
from asyncflow.rpc.columns import Jagged  # noqa: E402

lengths = st.lists(st.integers(0, 5), max_size=6)


def column_of(rows):
    return Column.of(encode(rows))


def column(lengths, *inner, dtype=torch.int64):
    rows = [torch.full((n, *inner), i + 1, dtype=dtype) for i, n in enumerate(lengths)]
    return rows, Column.of(encode(rows) if rows else Jagged.from_rows([], "int64", inner=inner))


@given(lengths, st.sampled_from([(), (2,), (2, 3)]), st.sampled_from(["left", "right"]))
def test_padded_rows_are_the_rows_and_the_fill(lengths, inner, side):
    rows, packed = column(lengths, *inner)
    padded = packed.padded(-1, side=side)
    assert padded.shape[:2] == (len(lengths), max(lengths, default=0))
    for row, whole in zip(rows, padded, strict=True):
        room = len(whole) - len(row)
        inside, outside = (whole[room:], whole[:room]) if side == "left" else (whole[: len(row)], whole[len(row) :])
        assert torch.equal(inside, row)
        assert (outside == -1).all()


def test_equal_rows_are_padded_and_nested_without_a_copy():
    _, packed = column([3, 3])
    packed.padded()[1, 2] = 7
    assert packed[1].tolist() == [2, 2, 7]
    _, packed = column([1, 3])
    packed.nested()[1][0] = 9
    assert packed[1].tolist() == [9, 2, 2]


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.ones(2, 2).to(torch.float8_e4m3fn), "torch.strided tensor of torch.float8_e4m3fn"),
        (torch.ones(2, 2).to_sparse(), "torch.sparse_coo tensor of torch.float32"),
        (torch.ones(2, 2, dtype=torch.bfloat16).to_sparse(), "torch.sparse_coo tensor of torch.bfloat16"),
    ],
)
def test_a_tensor_that_numpy_cannot_hold_is_refused_with_its_column(tensor, kind):
    for values in (tensor, [tensor], [{"deep": tensor}]):
        with pytest.raises(Refused, match=f"column x: a {kind} cannot be a column. Pass a dense tensor"):
            encode(values, where="column x")


@given(lengths, st.sampled_from([(), (2,)]), st.sampled_from([torch.bfloat16, torch.float16, torch.bool, torch.int32]))
def test_a_column_goes_to_the_queue_and_comes_back(lengths, inner, dtype):
    rows, packed = column(lengths, *inner, dtype=dtype)
    back = Column.of(packed.jagged())
    assert len(back) == len(rows)
    assert back.values.shape[1:] == inner
    assert all(torch.equal(back[i], row) for i, row in enumerate(rows))
    assert not rows or back.values.dtype == dtype


def test_scalars_and_python_values():
    scalars = column_of([torch.tensor(1.5), torch.tensor(2.5)])
    assert scalars.padded().tolist() == scalars.nested().tolist() == [1.5, 2.5]
    assert Column.of(scalars.jagged())[1].shape == ()
    words = Column.of(encode(["ä", ""]))
    assert (words[0], words[1], decode(words.jagged())) == ("ä", "", ["ä", ""])
    things = column_of([{"seen": np.arange(2)}, (1, None)])
    assert things[0]["seen"].tolist() == [0, 1]
    assert things[1] == (1, None)
    with pytest.raises(TypeError, match="a column of text cannot be padded"):
        words.padded()
    with pytest.raises(IndexError, match="row 2 of a column of 2 rows"):
        words[2]


def test_what_was_fetched_is_the_callers_own():
    source = Jagged.from_rows([[1, 2], [3]], "int32")
    source.values.flags.writeable = False
    Column.of(source).values.zero_()
    assert source.values.tolist() == [1, 2, 3]
    mine = Jagged.from_rows([[1, 2], [3]], "int32")
    Column.of(mine).values[0] = 5
    assert mine.values[0] == 5


def batch():
    metas = [RowMeta(partition="p", serial=7 + i, sample=i, step=1) for i in range(2)]
    return Batch(
        metas=metas,
        columns={
            "ids": column_of([torch.tensor([1]), torch.tensor([2, 3])]),
            "reward": column_of([torch.tensor(0.5), torch.tensor(1.0)]),
            "text": Column.of(encode(["a", "b"])),
        },
    )


def test_a_padded_batch():
    padded = batch().padded({"ids": -100}, side="left")
    assert padded["ids"].tolist() == [[-100, 1], [2, 3]]
    assert padded["ids_lengths"].tolist() == [1, 2]
    assert padded["reward"].tolist() == [0.5, 1.0]
    assert padded["text"] == ["a", "b"]


@pytest.mark.parametrize("padded", [False, True])
def test_a_tensordict(padded):
    pytest.importorskip("tensordict")
    made = batch().tensordict(padded=padded)
    assert made.batch_size == torch.Size([2])
    assert made["serial"].tolist() == [7, 8]
    assert (made["ids"].tolist() if padded else [row.tolist() for row in made["ids"]]) == (
        [[1, 0], [2, 3]] if padded else [[1], [2, 3]]
    )
    assert made[1]["text"] == "b"


def test_a_tensordict_needs_its_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensordict", None)
    with pytest.raises(ManifestError, match=r"asyncflow\[tensordict\]"):
        batch().tensordict()


def test_a_batch_moves_between_devices_and_processes():
    there = pickle.loads(pickle.dumps(batch().to("cpu")))
    assert there.metas == batch().metas
    assert there.columns["ids"][1].tolist() == [2, 3]
    assert batch().to("meta").columns["ids"].values.device.type == "meta"
    assert np.array_equal(there.columns["ids"].offsets, [0, 1, 3])
