import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from asyncflow.errors import ProtocolError
from asyncflow.net.frames import BFLOAT16, DTYPES, BatchHeader, ColumnHeader, Jagged, decode_batch, encode_batch

NO_LIMIT = 1 << 40


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Jagged]:
    rows = draw(st.integers(0, 5))
    columns = {}
    for name in draw(st.lists(st.text(min_size=1, max_size=8), max_size=4, unique=True)):
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        lengths = draw(st.lists(st.integers(0, 6), min_size=rows, max_size=rows))
        columns[name] = Jagged.from_rows([draw(hnp.arrays(DTYPES[dtype], n)) for n in lengths], dtype)
    return columns


@given(batches())
def test_a_batch_comes_back_bit_for_bit_and_read_only(columns: dict[str, Jagged]) -> None:
    header, frames = encode_batch(columns)
    wired = msgspec.msgpack.decode(msgspec.msgpack.encode(header), type=BatchHeader)
    back = decode_batch(wired, [bytes(frame) for frame in frames], max_bytes=NO_LIMIT)
    assert back == columns
    assert list(back) == list(columns)
    assert [c.nbytes for c in columns.values()] == [len(frame) for frame in frames]
    assert not any(column.values.flags.writeable or column.offsets.flags.writeable for column in back.values())


@given(batches(), st.data())
def test_a_frame_of_another_size_is_refused(columns: dict[str, Jagged], data: st.DataObject) -> None:
    header, frames = encode_batch(columns)
    extra = data.draw(st.binary(min_size=1, max_size=16))
    with pytest.raises(ProtocolError):
        decode_batch(header, [*frames, extra], max_bytes=NO_LIMIT)
    if frames:
        which = data.draw(st.integers(0, len(frames) - 1))
        longer = [bytes(frame) + extra if i == which else frame for i, frame in enumerate(frames)]
        with pytest.raises(ProtocolError):
            decode_batch(header, longer, max_bytes=NO_LIMIT)
        shorter = [frame[: -len(extra)] if i == which else frame for i, frame in enumerate(frames)]
        with pytest.raises(ProtocolError):
            decode_batch(header, shorter, max_bytes=NO_LIMIT)


@settings(max_examples=300)
@given(
    st.integers(0, 1 << 48),
    st.lists(
        st.tuples(st.text(min_size=1, max_size=2), st.sampled_from([*DTYPES, "object", "V8"]), st.integers(0, 1 << 48)),
        max_size=3,
    ),
    st.lists(st.binary(max_size=64), max_size=3),
)
def test_whatever_comes_is_a_batch_or_a_protocol_error(
    rows: int, columns: list[tuple[str, str, int]], frames: list[bytes]
) -> None:
    header = BatchHeader(rows=rows, columns=[ColumnHeader(name=n, dtype=d, values=v) for n, d, v in columns])
    try:
        batch = decode_batch(header, frames, max_bytes=NO_LIMIT)
    except ProtocolError:
        return
    for column in batch.values():
        assert len(column) == rows
        assert sum(len(column.row(i)) for i in range(rows)) == column.values.size


@given(st.lists(st.integers(-3, 9), min_size=3, max_size=3), st.integers(0, 8))
def test_offsets_must_rise_from_nothing_to_all_values(offsets: list[int], values: int) -> None:
    header = BatchHeader(rows=2, columns=[ColumnHeader(name="a", dtype="int8", values=values)])
    frame = np.array(offsets, "<i8").tobytes() + bytes(values)
    fine = offsets[0] == 0 and offsets[2] == values and 0 <= offsets[1] <= offsets[2]
    if fine:
        assert len(decode_batch(header, [frame], max_bytes=NO_LIMIT)["a"]) == 2
    else:
        with pytest.raises(ProtocolError):
            decode_batch(header, [frame], max_bytes=NO_LIMIT)


def test_more_bytes_than_allowed_are_refused_before_they_are_looked_at() -> None:
    header, frames = encode_batch({"a": Jagged.from_rows([[1, 2, 3]], "int64")})
    with pytest.raises(ProtocolError, match="40 bytes came where 39"):
        decode_batch(header, frames, max_bytes=39)


def test_a_name_twice_is_refused() -> None:
    header, frames = encode_batch({"a": Jagged.from_rows([[1]], "int64")})
    twice = BatchHeader(rows=1, columns=[header.columns[0], header.columns[0]])
    with pytest.raises(ProtocolError, match="same name"):
        decode_batch(twice, [frames[0], frames[0]], max_bytes=NO_LIMIT)


def test_a_truth_value_is_nought_or_one() -> None:
    header, frames = encode_batch({"a": Jagged.from_rows([[True, False]], "bool")})
    with pytest.raises(ProtocolError, match="neither 0 nor 1"):
        decode_batch(header, [bytes(frames[0])[:-1] + b"\x02"], max_bytes=NO_LIMIT)


def test_columns_of_one_batch_have_one_number_of_rows() -> None:
    with pytest.raises(ValueError, match="differ in rows"):
        encode_batch({"a": Jagged.from_rows([[1]], "int64"), "b": Jagged.from_rows([], "int64")})


def test_unaligned_frames_are_read_right() -> None:
    column = Jagged.from_rows([[1.5], [2.5, 3.5]], "float64")
    header, frames = encode_batch({"a": column})
    shifted = memoryview(b"x" + bytes(frames[0]))[1:]
    back = decode_batch(header, [shifted], max_bytes=NO_LIMIT)["a"]
    assert back == column
    assert back.values.flags.aligned
    assert not back.values.flags.writeable


@given(st.lists(st.lists(st.integers(-100, 100), max_size=4), max_size=6), st.data())
def test_take_and_concat_are_those_of_lists(rows: list[list[int]], data: st.DataObject) -> None:
    column = Jagged.from_rows(rows, np.int32)
    indices = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8)) if rows else []
    assert column.take(indices) == Jagged.from_rows([rows[i] for i in indices], "int32")
    assert Jagged.concat([column, column.take(indices)]) == Jagged.from_rows(rows + [rows[i] for i in indices], "int32")
    assert column.lengths.tolist() == [len(row) for row in rows]


def test_bfloat16_keeps_its_name_and_its_bits() -> None:
    column = Jagged.from_rows([np.array([0x3F80, 0x7FC0], np.uint16)], BFLOAT16)
    header, frames = encode_batch({"w": column})
    back = decode_batch(header, frames, max_bytes=NO_LIMIT)["w"]
    assert (back.dtype, back.values.dtype.name, back.row(0).tolist()) == (BFLOAT16, "uint16", [0x3F80, 0x7FC0])
    with pytest.raises(ValueError, match="uint16 bits"):
        Jagged.from_rows([np.ones(2, np.float32)], BFLOAT16)


def test_a_row_of_two_dimensions_is_refused() -> None:
    with pytest.raises(ValueError, match="one dimension"):
        Jagged.from_rows([np.ones((2, 2), np.float32)], "float32")


@pytest.mark.parametrize("dtype", ["object", "complex64", "datetime64[s]", "U3"])
def test_other_dtypes_are_no_columns(dtype: str) -> None:
    with pytest.raises(ValueError, match="dtype"):
        Jagged.from_rows([], dtype)


def test_a_row_outside_is_an_error() -> None:
    column = Jagged.from_rows([[1], [2]], "int64")
    for index in (-1, 2):
        with pytest.raises(IndexError):
            column.row(index)


def test_columns_of_two_dtypes_are_not_one() -> None:
    with pytest.raises(ValueError, match="cannot be one column"):
        Jagged.concat([Jagged.from_rows([], "int8"), Jagged.from_rows([], "int16")])
