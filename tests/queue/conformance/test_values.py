"""The codec alone: whatever users put comes back equal, and no bytes do worse than be refused."""

import contextlib

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from asyncflow.errors import ProtocolError, Refused
from asyncflow.queue.peers import check_rows
from asyncflow.queue.values import decode, encode, encode_columns, pack_object, unpack_object
from asyncflow.rpc.columns import BYTES, DTYPES, OBJECT, TEXT, Jagged

NUMBERS = sorted(DTYPES.keys() - {TEXT, BYTES, OBJECT, "bfloat16"})
dtypes = st.sampled_from(NUMBERS).map(np.dtype)
inners = st.one_of(st.none(), st.lists(st.integers(1, 3), max_size=2).map(tuple))
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(-(2**63), 2**63 - 1) | st.binary(), inner)
        | hnp.arrays(dtypes, hnp.array_shapes(min_dims=0, min_side=0, max_side=3))
    ),
    max_leaves=20,
)


@st.composite
def arrays_of_rows(draw):
    """Rows of one dtype and one shape except for the first dimension."""
    dtype, inner = draw(dtypes), draw(inners)
    rows = draw(st.integers(1, 6))
    shapes = [() if inner is None else (draw(st.integers(0, 4)), *inner) for _ in range(rows)]
    return [draw(hnp.arrays(dtype, shape)) for shape in shapes]


def equal(left, right):
    """Tell whether two values are the same in type, shape, dtype and every bit that counts."""
    if isinstance(left, np.ndarray | np.generic):
        same = isinstance(right, np.ndarray | np.generic) and (left.dtype, left.shape) == (right.dtype, right.shape)
        return same and np.array_equal(left, right, equal_nan=left.dtype.kind == "f")
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(value, right[key]) for key, value in left.items())
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    return left == right or left != left


@given(arrays_of_rows())
def test_rows_of_arrays_come_back_and_are_stacked_where_they_have_one_shape(rows):
    found = decode(encode(rows))
    assert isinstance(found, np.ndarray) == (len({row.shape for row in rows}) == 1)
    assert len(found) == len(rows)
    assert all(map(equal, found, rows))


@given(st.data())
def test_an_array_of_rows_comes_back_as_it_was(data):
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=4))
    array = data.draw(hnp.arrays(data.draw(dtypes), shape))
    assert equal(decode(encode(array)), array)
    assert equal(decode(encode(array.T)), np.ascontiguousarray(array.T))


@given(st.lists(plain, min_size=1, max_size=6))
@example([1, None])
@example([True, 1])
@example([(1,), [1]])
def test_plain_values_come_back_as_they_were(rows):
    kinds = {type(row) for row in rows}
    if np.ndarray in kinds:
        return
    found = decode(encode(rows))
    if kinds in ({bool}, {float}):
        found = found.tolist()
    elif kinds == {int}:
        if min(rows) < -(2**63) or max(rows) >= 2**63:
            return
        found = found.tolist()
    assert equal(found, rows)


@given(plain)
def test_an_object_comes_back_as_it_was(value):
    assert equal(unpack_object(pack_object(value)), value)


@given(st.binary(max_size=64))
@example(msgspec.msgpack.encode(msgspec.msgpack.Ext(1, msgspec.msgpack.encode(["float64", [1 << 40], b""]))))
@example(msgspec.msgpack.encode(msgspec.msgpack.Ext(1, msgspec.msgpack.encode(["float64", [-1, -8], bytes(64)]))))
@example(msgspec.msgpack.encode(msgspec.msgpack.Ext(1, msgspec.msgpack.encode(["object", [1], b"x"]))))
@example(msgspec.msgpack.encode(msgspec.msgpack.Ext(9, b"")))
@example(b"\x91" * 100_000)
@example(b"\xdf\xff\xff\xff\xff")
def test_any_bytes_are_an_object_or_refused(data):
    with contextlib.suppress(ProtocolError):
        unpack_object(data)


@given(st.binary(max_size=40), st.sampled_from([TEXT, OBJECT]))
def test_any_bytes_of_a_column_are_values_or_refused(data, dtype):
    column = Jagged(np.frombuffer(data, np.uint8), np.array([0, len(data) // 2, len(data)]), dtype)
    with contextlib.suppress(ProtocolError):
        assert len(decode(column)) == 2


def test_an_object_that_contains_itself_is_refused():
    knot = []
    knot.append(knot)
    with pytest.raises(Refused, match="contains itself"):
        pack_object(knot)


@pytest.mark.parametrize("value", [{2**70: 1}, {"\ud800": 1}, ["\ud800"]])
def test_an_object_that_msgpack_cannot_hold_is_refused(value):
    with pytest.raises(Refused, match="an object cannot be sent"):
        pack_object(value)


def test_what_is_no_plain_value_is_refused_with_its_name():
    for value, words in (
        (object(), "of type object"),
        ({1, 2}, "of type set"),
        (1 << 64, "of type int"),
        ({(1,): 2}, "of type dict"),
    ):
        with pytest.raises(Refused, match=words):
            pack_object({"deep": [value]})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1 << 63], "an integer does not fit int64"),
        (np.zeros((2, 3, 0)), r"rows of shape \(..., 0\) hold nothing"),
        ([np.zeros((2, 0)), np.zeros((3, 0))], r"rows of shape \(..., 0\) hold nothing"),
        (np.array(1.0), "a single number has no rows"),
        (np.array(["a", 1], object)[:0], "an empty list has no dtype"),
        (np.zeros(2, complex), "values of dtype complex128 cannot be a column"),
        (np.array(["ab"]), "values of dtype str64 cannot be a column"),
        (np.array([b"ab"]), "values of dtype bytes16 cannot be a column"),
        ([np.array([1, 2.5], object)], "values of dtype object cannot be a column"),
        ([{"deep": np.array([1, 2.5], object)}], "values of dtype object cannot be a column"),
    ],
)
def test_a_column_that_could_not_be_given_back_is_refused(values, words):
    with pytest.raises(Refused, match=words):
        encode(values)


def test_an_array_without_rows_is_a_column_without_rows():
    for shape in ((0,), (0, 3), (0, 3, 2)):
        assert len(decode(encode(np.zeros(shape)))) == 0


def test_the_rows_of_an_array_of_objects_are_plain_values():
    assert decode(encode(np.array([{"a": 1}, None], object))) == [{"a": 1}, None]


@pytest.mark.parametrize("array", [["pigeon", [1], b"x"], ["int8", [-1], b"x"], ["int8", [2], b"x"]])
def test_an_array_that_nobody_packed_is_no_object(array):
    with pytest.raises(ProtocolError, match="no plain object"):
        unpack_object(msgspec.msgpack.encode(msgspec.msgpack.Ext(1, msgspec.msgpack.encode(array))))


def test_columns_that_differ_in_rows_are_refused_with_their_lengths():
    with pytest.raises(Refused, match="column b has 3 rows, not 2"):
        check_rows(encode_columns({"a": np.zeros(2), "b": ["x", "y", "z"]}), None, rows=2)
