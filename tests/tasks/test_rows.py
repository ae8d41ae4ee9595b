"""The values that a function returned become columns, or a failure of its row."""

from typing import Any

import numpy as np
import pytest

from asyncflow.tasks.rows import OutputColumn, RowFailure, columns_of, packed, read_results, unpacked

SCORE = OutputColumn(name="score", dtype="float32", most=2)
COUNT = OutputColumn(name="count", dtype="int64", most=1)


def test_numbers_lists_and_arrays_are_columns() -> None:
    found = [{"score": 1, "count": True}, {"score": [0.5, 2], "count": np.int32(7)}, {"score": [], "count": []}]
    results = read_results(found, [SCORE, COUNT], rows=3)
    columns = columns_of(results, [SCORE, COUNT])
    assert [columns["score"].row(i).tolist() for i in range(3)] == [[1], [0.5, 2], []]
    assert (columns["score"].dtype, columns["count"].values.tolist()) == ("float32", [1, 7])


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (None, "returned a NoneType; it must"),
        ("a", "returned 1 entries; it must"),
        ([], "returned 0 entries; it must"),
        ([{"count": 1}, {"count": 2}], "returned 2 entries; it must"),
        ([{}], "returned [], and the task writes ['count']"),
        ([{"count": 1, "x": 2}], "['count', 'x']"),
        ([3], "returned a int for a row"),
        ([{"count": 0.5}], "float64, which is no int64"),
        ([{"count": "many"}], "which is no int64"),
        ([{"count": [[1], [2, 3]]}], "count:"),
        ([{"count": [1, 2]}], "2 entries, more than 1"),
        ([{"count": None}], "which is no int64"),
        ([{"count": 1 << 63}], "count holds 9223372036854775808, which int64 cannot hold"),
    ],
)
def test_anything_else_is_a_failure_with_its_reason(found: Any, says: str) -> None:
    (result,) = read_results(found, [COUNT], rows=1)
    assert isinstance(result, RowFailure)
    assert result.kind == "invalid"
    assert says in result.detail
    assert columns_of([result], [COUNT])["count"].lengths.tolist() == [0]


@pytest.mark.parametrize(("dtype", "value"), [("uint8", 256), ("uint8", -1), ("int32", 1 << 31), ("bool", 2)])
def test_a_whole_number_that_the_column_cannot_hold_is_a_failure_and_no_other_number(dtype: str, value: int) -> None:
    (result,) = read_results([{"x": [0, value]}], [OutputColumn(name="x", dtype=dtype, most=2)], rows=1)
    assert isinstance(result, RowFailure)
    assert result.detail == f"x holds {value}, which {dtype} cannot hold"


def test_results_go_through_bytes_and_are_checked_again() -> None:
    results = read_results([{"score": [0.5, 2], "count": 3}, None, {"score": [], "count": []}], [SCORE, COUNT], rows=3)
    again = unpacked(packed(results), [SCORE, COUNT], rows=3)
    assert again[1] == results[1]
    for one, other in zip(again, results, strict=True):
        if not isinstance(one, RowFailure) and not isinstance(other, RowFailure):
            assert {name: (x.dtype, x.tolist()) for name, x in one.items()} == {
                name: (x.dtype, x.tolist()) for name, x in other.items()
            }
    for said in ({"count": bytes(16)}, {"count": b"", "x": b""}, {}):
        (result,) = unpacked([said], [COUNT], rows=1)
        assert isinstance(result, RowFailure)
    for wrong in ([], [{"count": bytes(7)}]):
        with pytest.raises(ValueError, match=r"outcomes of|multiple"):
            unpacked(wrong, [COUNT], rows=1)
