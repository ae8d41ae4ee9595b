from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.rpc.columns import BFLOAT16, Inner, Jagged

rows_of_ints = st.lists(st.lists(st.integers(-100, 100), max_size=4), max_size=6)


@given(rows_of_ints, st.data())
def test_take_and_concat_are_those_of_lists(rows: list[list[int]], data: st.DataObject) -> None:
    column = Jagged.from_rows(rows, np.int32)
    indices = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8)) if rows else []
    assert column.take(indices) == Jagged.from_rows([rows[i] for i in indices], "int32")
    both = Jagged.concat([column, column.take(indices)])
    assert both == Jagged.from_rows(rows + [rows[i] for i in indices], "int32")
    assert column.lengths.tolist() == [len(row) for row in rows]


@given(st.lists(rows_of_ints, min_size=1, max_size=4), st.data())
def test_cut_is_a_slice_without_a_copy_and_concat_their_sum(parts: list[list[list[int]]], data: st.DataObject) -> None:
    runs, expected = list[Jagged](), list[list[int]]()
    for rows in parts:
        start = data.draw(st.integers(0, len(rows)))
        stop = data.draw(st.integers(start, len(rows)))
        column = Jagged.from_rows(rows, "int16")
        runs.append(column.cut(start, stop))
        assert not runs[-1].values.size or np.shares_memory(runs[-1].values, column.values)
        expected += rows[start:stop]
    gathered = Jagged.concat(runs)
    assert gathered == Jagged.from_rows(expected, "int16")
    assert len(runs) > 1 or gathered is runs[0]


def test_bfloat16_keeps_its_name_and_its_bits() -> None:
    column = Jagged.from_rows([np.array([0x3F80, 0x7FC0], np.uint16)], BFLOAT16)
    assert (column.dtype, column.values.dtype.name, column.row(0).tolist()) == (BFLOAT16, "uint16", [0x3F80, 0x7FC0])
    with pytest.raises(ValueError, match="uint16 bits"):
        Jagged.from_rows([np.ones(2, np.float32)], BFLOAT16)


@pytest.mark.parametrize(
    ("row", "dtype", "inner"),
    [
        (np.ones((2, 2), np.float32), "float32", ()),
        (np.ones(2, np.float32), "float32", (2,)),
        (np.ones((2, 3), np.float32), "float32", (2,)),
        (np.ones(1, np.float32), "float32", None),
        (np.float32(1), "float32", ()),
    ],
)
def test_a_row_of_another_shape_is_refused(row: np.ndarray, dtype: str, inner: Inner) -> None:
    with pytest.raises(ValueError, match="a row"):
        Jagged.from_rows([row], dtype, inner=inner)


@pytest.mark.parametrize("transposed", [np.arange(12).reshape(3, 4).T, np.arange(12)[::2].reshape(3, 2)])
def test_rows_that_are_not_contiguous_are_their_contiguous_form(transposed: np.ndarray) -> None:
    column = Jagged.from_rows([transposed, transposed[:1]], "int64", inner=transposed.shape[1:])
    assert column.inner == transposed.shape[1:]
    assert [row.tolist() for row in column.rows()] == [transposed.tolist(), transposed[:1].tolist()]


@pytest.mark.parametrize("dtype", ["complex64", "datetime64[s]", "U3", "text", "object"])
def test_other_dtypes_are_no_columns(dtype: str) -> None:
    with pytest.raises(ValueError, match="dtype"):
        Jagged.from_rows([], dtype)


def test_a_row_outside_is_an_error() -> None:
    column = Jagged.from_rows([[1], [2]], "int64")
    for index in (-1, 2):
        with pytest.raises(IndexError):
            column.row(index)
        with pytest.raises(IndexError):
            column.take([index])


@pytest.mark.parametrize("offsets", [[1, 3], [0, 2], [0, 2, 1, 3], [0, 4], []])
def test_offsets_that_do_not_cut_all_values_into_rows_are_refused(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="offsets"):
        Jagged(np.arange(3), np.array(offsets, np.int64))


def test_columns_of_two_forms_are_not_one() -> None:
    for other in (Jagged.from_rows([], "int16"), Jagged.from_rows([], "int8", inner=None)):
        with pytest.raises(ValueError, match="cannot be one column"):
            Jagged.concat([Jagged.from_rows([], "int8"), other])


def test_a_thread_never_sees_offsets_that_another_has_half_made() -> None:
    seen: list[list[int]] = []

    class Interrupted(np.ndarray):
        """Lengths that are summed up while another thread asks for the offsets."""

        def cumsum(self, *args: Any, **options: Any) -> Any:
            if not seen:
                seen.append([])
                seen[0] = column.offsets.tolist()
            return np.asarray(self).cumsum(*args, **options)

    lengths = np.array([2, 3]).view(Interrupted)
    column = Jagged.trusted(np.arange(5), lengths, "int64")
    assert column.offsets.tolist() == [0, 2, 5]
    assert seen == [[0, 2, 5]]
