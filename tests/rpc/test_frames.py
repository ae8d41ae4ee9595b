import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from asyncflow.errors import ProtocolError
from asyncflow.queue.values import decode, pack_object
from asyncflow.rpc.columns import (
    DTYPES,
    LARGE,
    BatchHeader,
    Buffer,
    ColumnHeader,
    Inner,
    Jagged,
    decode_batch,
    encode_batch,
)

NO_LIMIT = 1 << 40
PYTHON_VALUES = ("text", "bytes", "object")
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=3), inside, max_size=3),
    max_leaves=5,
)
python_rows = {"text": st.text(max_size=6), "bytes": st.binary(max_size=6), "object": plain}
inners = st.none() | st.lists(st.integers(1, 3), max_size=2).map(tuple)


def array_row(dtype: str, inner: Inner) -> st.SearchStrategy[np.ndarray]:
    if inner is None:
        return hnp.arrays(DTYPES[dtype], ())
    return st.integers(0, 4).flatmap(lambda n: hnp.arrays(DTYPES[dtype], (n, *inner)))


def column_of(rows: list, dtype: str, inner: Inner) -> Jagged:
    if dtype not in PYTHON_VALUES:
        return Jagged.from_rows(rows, dtype, inner=inner)
    packed = [pack_object(row) if dtype == "object" else row.encode() if dtype == "text" else row for row in rows]
    data, offsets = np.frombuffer(b"".join(packed), np.uint8), np.cumsum([0, *map(len, packed)], dtype=np.int64)
    return Jagged(data, offsets, dtype)


@st.composite
def batches(draw: st.DrawFn) -> dict[str, tuple[Jagged, list]]:
    """Columns with the rows that they were made from."""
    rows = draw(st.integers(0, 5))
    columns = {}
    for name in draw(st.lists(st.text(min_size=1, max_size=8), max_size=4, unique=True)):
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        inner = () if dtype in PYTHON_VALUES else draw(inners)
        row = python_rows[dtype] if dtype in PYTHON_VALUES else array_row(dtype, inner)
        values = draw(st.lists(row, min_size=rows, max_size=rows))
        columns[name] = column_of(values, dtype, inner), values
    return columns


def wired(columns: dict[str, Jagged]) -> tuple[BatchHeader, list[Buffer]]:
    header, frames = encode_batch(columns)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(header), type=BatchHeader), [bytearray(f) for f in frames]


@given(batches())
def test_a_batch_comes_back_bit_for_bit_as_what_it_was_made_from(made: dict[str, tuple[Jagged, list]]) -> None:
    columns = {name: column for name, (column, _) in made.items()}
    back = decode_batch(*wired(columns), max_bytes=NO_LIMIT)
    assert back == columns
    assert list(back) == list(columns)
    for name, (column, rows) in made.items():
        assert back[name].form == column.form
        if column.dtype in PYTHON_VALUES:
            assert decode(back[name]) == rows
            continue
        for index, (was, now) in enumerate(zip(rows, back[name].rows(), strict=True)):
            assert (was.shape, was.tobytes()) == (now.shape, now.tobytes())
            assert back[name].row(index).shape == was.shape


@given(batches())
def test_what_a_reader_gets_is_writable_and_its_own(made: dict[str, tuple[Jagged, list]]) -> None:
    header, frames = wired({name: column for name, (column, _) in made.items()})
    for received in (frames, [bytes(frame) for frame in frames]):
        for name, column in decode_batch(header, received, max_bytes=NO_LIMIT).items():
            column.values[:] = 0
            assert made[name][0] == column_of(made[name][1], column.dtype, column.inner)


def test_no_large_column_is_copied_on_either_side_and_all_small_ones_are_one_frame() -> None:
    large = Jagged.from_rows([np.arange(5), np.arange(70_000)], "int64")
    small = {name: Jagged.from_rows([[1, 2], [3]], "int16") for name in "abc"}
    header, frames = encode_batch({"large": large, **small})
    assert len(frames) == 2
    assert np.shares_memory(np.frombuffer(frames[1], np.int64), large.values)
    arrived = bytearray(frames[1])
    back = decode_batch(header, [frames[0], arrived], max_bytes=NO_LIMIT)
    assert np.shares_memory(back["large"].values, np.frombuffer(arrived, np.uint8))
    assert back == {"large": large, **small}


@given(batches(), st.data())
def test_a_frame_of_another_size_is_refused(made: dict[str, tuple[Jagged, list]], data: st.DataObject) -> None:
    header, frames = wired({name: column for name, (column, _) in made.items()})
    extra = data.draw(st.binary(min_size=1, max_size=16))
    with pytest.raises(ProtocolError):
        decode_batch(header, [*frames, extra], max_bytes=NO_LIMIT)
    with pytest.raises(ProtocolError):
        decode_batch(header, frames[1:], max_bytes=NO_LIMIT)
    which = data.draw(st.integers(0, len(frames) - 1))
    cut = frames[which][: -len(extra)]
    for other in {bytes(frames[which] + extra), bytes(cut)} - {bytes(frames[which])}:
        with pytest.raises(ProtocolError):
            decode_batch(header, [other if i == which else f for i, f in enumerate(frames)], max_bytes=NO_LIMIT)


@settings(max_examples=300)
@given(
    st.integers(0, 1 << 48),
    st.lists(
        st.tuples(
            st.text(min_size=1, max_size=2),
            st.sampled_from([*DTYPES, "complex64", "V8"]),
            st.integers(0, 1 << 48),
            st.none() | st.lists(st.integers(-1, 1 << 48), max_size=32).map(tuple),
        ),
        max_size=3,
    ),
    st.lists(st.binary(max_size=64), max_size=4),
)
def test_whatever_comes_is_a_batch_or_a_protocol_error(
    rows: int, columns: list[tuple[str, str, int, Inner]], frames: list[bytes]
) -> None:
    made = [ColumnHeader(name=n, dtype=d, values=v, inner=i) for n, d, v, i in columns]
    try:
        batch = decode_batch(BatchHeader(rows=rows, columns=made), frames, max_bytes=NO_LIMIT)
        for column in batch.values():
            assert len(column) == len(column.rows()) == rows
            assert sum(column.row(i).size for i in range(rows)) == column.values.size
    except ProtocolError:
        return


@given(st.lists(st.integers(0, 9), min_size=2, max_size=2), st.integers(0, 8))
def test_lengths_must_make_all_values(lengths: list[int], values: int) -> None:
    header = BatchHeader(rows=2, columns=[ColumnHeader(name="a", dtype="int8", values=values)])
    frames = [np.array(lengths, "<u4").tobytes() + bytes(values)]
    if sum(lengths) == values:
        assert decode_batch(header, frames, max_bytes=NO_LIMIT)["a"].lengths.tolist() == lengths
    else:
        with pytest.raises(ProtocolError):
            decode_batch(header, frames, max_bytes=NO_LIMIT)


def test_lengths_that_run_over_are_refused() -> None:
    header = BatchHeader(rows=3, columns=[ColumnHeader(name="a", dtype="int8", values=2)])
    lengths = np.array([(1 << 32) - 1, (1 << 32) - 1, 4], "<u4")
    with pytest.raises(ProtocolError, match="rows hold 8589934594 values, not 2"):
        decode_batch(header, [lengths.tobytes() + b"xx"], max_bytes=NO_LIMIT)


@pytest.mark.parametrize(
    ("inner", "lengths", "wrong"),
    [
        ((2, 3), [6, 5], "multiples of 6"),
        ((1 << 48,) * 32, [6, 6], "multiples"),
        ((0, 3), [6, 6], "has no values"),
        (None, [2, 0], "without an axis"),
    ],
)
def test_a_row_has_the_shape_that_its_header_names(inner: Inner, lengths: list[int], wrong: str) -> None:
    header = BatchHeader(rows=2, columns=[ColumnHeader(name="a", dtype="int8", values=sum(lengths), inner=inner)])
    with pytest.raises(ProtocolError, match=wrong):
        decode_batch(header, [np.array(lengths, "<u4").tobytes() + bytes(sum(lengths))], max_bytes=NO_LIMIT)


def test_a_python_value_has_no_inner_shape() -> None:
    header = BatchHeader(rows=1, columns=[ColumnHeader(name="a", dtype="text", values=2, inner=(2,))])
    with pytest.raises(ProtocolError, match="no inner shape"):
        decode_batch(header, [np.array([2], "<u4").tobytes() + b"xx"], max_bytes=NO_LIMIT)


def test_more_bytes_than_allowed_are_refused_before_they_are_looked_at() -> None:
    header, frames = encode_batch({"a": Jagged.from_rows([[1, 2, 3]], "int64")})
    with pytest.raises(ProtocolError, match="28 bytes, but at most 27"):
        decode_batch(header, frames, max_bytes=27)
    assert decode_batch(header, frames, max_bytes=28)
    with pytest.raises(ProtocolError, match="5 rows has no column"):
        decode_batch(BatchHeader(rows=5, columns=[]), [b""], max_bytes=NO_LIMIT)


def test_a_name_twice_is_refused() -> None:
    header, frames = encode_batch({"a": Jagged.from_rows([[1]], "int64")})
    twice = BatchHeader(rows=1, columns=[header.columns[0], header.columns[0]])
    with pytest.raises(ProtocolError, match="same name"):
        decode_batch(twice, [bytes(frames[0]) * 2], max_bytes=NO_LIMIT)


def test_a_truth_value_is_nought_or_one() -> None:
    header, frames = encode_batch({"a": Jagged.from_rows([[True, False]], "bool")})
    with pytest.raises(ProtocolError, match="neither 0 nor 1"):
        decode_batch(header, [bytes(frames[0])[:-1] + b"\x02"], max_bytes=NO_LIMIT)


@pytest.mark.parametrize(
    ("dtype", "data", "match"),
    [
        ("text", b"\xff", "are no text"),
        ("object", b"\xc1", "no plain object"),
        ("object", b"\x91" * 100_000, "no plain object"),
    ],
)
def test_bytes_that_are_no_value_are_a_protocol_error(dtype: str, data: bytes, match: str) -> None:
    header = BatchHeader(rows=1, columns=[ColumnHeader(name="a", dtype=dtype, values=len(data))])
    frames = [np.array([len(data)], "<u4").tobytes(), data]
    frames = frames if len(data) >= LARGE else [b"".join(frames)]
    column = decode_batch(header, frames, max_bytes=NO_LIMIT)["a"]
    with pytest.raises(ProtocolError, match=match):
        decode(column)


def test_columns_of_one_batch_have_one_number_of_rows() -> None:
    with pytest.raises(ValueError, match="differ in rows"):
        encode_batch({"a": Jagged.from_rows([[1]], "int64"), "b": Jagged.from_rows([], "int64")})


def test_unaligned_frames_are_read_right() -> None:
    column = Jagged.from_rows([[1.5], np.arange(10_000)], "float64")
    header, frames = encode_batch({"a": column})
    shifted = [memoryview(bytearray(b"x" + bytes(frame)))[1:] for frame in frames]
    back = decode_batch(header, shifted, max_bytes=NO_LIMIT)["a"]
    assert back == column
    assert back.values.flags.aligned
    assert back.values.flags.writeable
