"""Batches of rows on the wire: one frame a column, offsets first, then values, never padded.

A column of a batch is a ``Jagged``: one flat array of values and the offsets that cut it into rows. A column's frame is
``offsets`` (int64, rows + 1) followed by ``values``, both little-endian; the header says dtype and number of values.

Invariant: ``decode_batch`` gives either exactly what ``encode_batch`` was given, or a ProtocolError. No size in a
header is believed before the bytes that came agree with it, and no byte is ever interpreted as code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from asyncflow.errors import ProtocolError

Buffer: TypeAlias = bytes | bytearray | memoryview
Array: TypeAlias = npt.NDArray[Any]

BFLOAT16 = "bfloat16"
"""Name of the dtype that numpy lacks: its values travel and lie in memory as their uint16 bits."""

_PLAIN = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name).newbyteorder("<") for name in _PLAIN}
DTYPES |= {"bool": np.dtype(np.bool_), BFLOAT16: np.dtype("<u2")}
"""The dtypes that may cross a socket, by name, and how their values lie in memory."""

MAX_COLUMNS = 4096
_OFFSET = np.dtype("<i8")
_Count = Annotated[int, Meta(ge=0, le=1 << 48)]


class ColumnHeader(Struct, frozen=True, kw_only=True):
    """One column of a batch: its name, the name of its dtype (see ``DTYPES``), and how many values its frame holds."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    dtype: str
    values: _Count


class BatchHeader(Struct, frozen=True, kw_only=True):
    """What the frames of a batch hold: the number of rows, and the columns in the order of the frames."""

    rows: _Count
    columns: Annotated[list[ColumnHeader], Meta(max_length=MAX_COLUMNS)]


class Jagged:
    """One column of a batch: rows of different lengths, one after another in one flat array.

    values: 1-D array of all values; offsets: int64 [rows + 1], row i is ``values[offsets[i]:offsets[i + 1]]``;
    dtype: name in ``DTYPES``, by default that of ``values`` ("bfloat16" is said explicitly and needs uint16 values).
    Raises ValueError where the three do not fit together.
    """

    __slots__ = ("dtype", "offsets", "values")

    def __init__(self, values: Array, offsets: npt.NDArray[np.int64], dtype: str = "") -> None:
        self.dtype = dtype or values.dtype.name
        if self.dtype not in DTYPES or values.dtype != DTYPES[self.dtype]:
            raise ValueError(f"values of dtype {values.dtype} cannot be a column of dtype {self.dtype!r}")
        if values.ndim != 1 or offsets.ndim != 1 or offsets.dtype != np.int64 or offsets.size == 0:
            raise ValueError(f"a column needs 1-D values and int64 offsets, not {values.shape} and {offsets.shape}")
        if offsets[0] != 0 or offsets[-1] != values.size or bool((offsets[1:] < offsets[:-1]).any()):
            raise ValueError(f"offsets must rise from 0 to {values.size}")
        self.values = values
        self.offsets = offsets

    @classmethod
    def from_rows(cls, rows: Sequence[Array | Sequence[Any]], dtype: str | npt.DTypeLike) -> Jagged:
        """Make a column of ``rows`` (1-D each, lengths may differ), cast to ``dtype`` (its name, or numpy's type)."""
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
        if name not in DTYPES:
            raise ValueError(f"a column cannot have dtype {name!r}; it may be one of {', '.join(DTYPES)}")
        return cls._joined([_as_row(row, name) for row in rows], name)

    @classmethod
    def concat(cls, parts: Sequence[Jagged]) -> Jagged:
        """Put the rows of ``parts`` (at least one, all of one dtype) one after another."""
        if len({part.dtype for part in parts}) != 1:
            raise ValueError(f"columns of dtypes {[part.dtype for part in parts]} cannot be one column")
        lengths = np.concatenate([np.diff(part.offsets) for part in parts])
        return cls(np.concatenate([part.values for part in parts]), _offsets(lengths), parts[0].dtype)

    @classmethod
    def _joined(cls, arrays: Sequence[Array], dtype: str) -> Jagged:
        values = np.concatenate([np.empty(0, DTYPES[dtype]), *arrays])
        lengths = np.fromiter((array.size for array in arrays), dtype=np.int64, count=len(arrays))
        return cls(values, _offsets(lengths), dtype)

    def __len__(self) -> int:
        return self.offsets.size - 1

    def row(self, index: int) -> Array:
        """Give row ``index`` (from 0) as a view, 1-D."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a column of {len(self)} rows")
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def take(self, indices: Sequence[int] | npt.NDArray[np.integer[Any]]) -> Jagged:
        """Give a new column of the rows ``indices``, in that order; a row may be taken more than once."""
        return self._joined([self.row(int(index)) for index in indices], self.dtype)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of values of each row, int64 [rows]."""
        return np.diff(self.offsets)

    @property
    def nbytes(self) -> int:
        """Bytes of values and offsets, which is the size of the column's frame."""
        return self.values.nbytes + self.offsets.nbytes

    def __eq__(self, other: object) -> bool:
        """Equal when dtype, row lengths and the bits of all values are (so that a NaN equals itself)."""
        if not isinstance(other, Jagged):
            return NotImplemented
        same_shape = self.dtype == other.dtype and np.array_equal(self.offsets, other.offsets)
        return same_shape and self.values.tobytes() == other.values.tobytes()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Jagged({len(self)} rows, {self.values.size} {self.dtype})"


def encode_batch(columns: Mapping[str, Jagged]) -> tuple[BatchHeader, list[Buffer]]:
    """Give header and frames of ``columns``, which must all have the same number of rows (ValueError otherwise)."""
    counts = {len(column) for column in columns.values()}
    if len(counts) > 1:
        raise ValueError(f"columns of one batch differ in rows: { {name: len(c) for name, c in columns.items()} }")
    headers = [ColumnHeader(name=name, dtype=c.dtype, values=c.values.size) for name, c in columns.items()]
    frames: list[Buffer] = []
    for column in columns.values():
        frame = bytearray(column.nbytes)
        bounds = column.offsets.nbytes
        np.frombuffer(frame, _OFFSET, column.offsets.size)[:] = column.offsets
        np.frombuffer(frame, column.values.dtype, column.values.size, bounds)[:] = column.values
        frames.append(frame)
    return BatchHeader(rows=counts.pop() if counts else 0, columns=headers), frames


def decode_batch(header: BatchHeader, frames: Sequence[Buffer], *, max_bytes: int) -> dict[str, Jagged]:
    """Give the columns that ``header`` and ``frames`` describe, as read-only arrays that share the frames' memory.

    max_bytes: most bytes that all frames together may hold. Raises ProtocolError where anything disagrees.
    """
    if len(frames) != len(header.columns):
        raise ProtocolError(f"{len(frames)} frames came for {len(header.columns)} columns", where="batch")
    views = [memoryview(frame).cast("B").toreadonly() for frame in frames]
    total = sum(view.nbytes for view in views)
    if total > max_bytes:
        raise ProtocolError(f"a batch of {total} bytes came where {max_bytes} are allowed", where="batch")
    columns = {c.name: _decode_column(c, header.rows, view) for c, view in zip(header.columns, views, strict=True)}
    if len(columns) != len(views):
        raise ProtocolError("two columns of one batch have the same name", where="batch")
    if not columns and header.rows:
        raise ProtocolError(f"a batch of {header.rows} rows has no column", where="batch")
    return columns


def _decode_column(header: ColumnHeader, rows: int, frame: memoryview) -> Jagged:
    where = f"column {header.name!r}"
    dtype = DTYPES.get(header.dtype)
    if dtype is None:
        raise ProtocolError(f"dtype {header.dtype!r} is not one that may cross a socket", where=where)
    bounds = (rows + 1) * _OFFSET.itemsize
    if frame.nbytes != bounds + header.values * dtype.itemsize:
        raise ProtocolError(
            f"a frame of {frame.nbytes} bytes cannot hold {rows} rows and {header.values} {header.dtype}", where=where
        )
    offsets = _aligned(np.frombuffer(frame, _OFFSET, rows + 1))
    values = _aligned(np.frombuffer(frame, dtype, header.values, bounds))
    if header.dtype == "bool" and bool((values.view(np.uint8) > 1).any()):
        raise ProtocolError("a truth value is neither 0 nor 1", where=where)
    try:
        return Jagged(values, offsets, header.dtype)
    except ValueError as wrong:
        raise ProtocolError(str(wrong), where=where) from wrong


def _as_row(row: Array | Sequence[Any], dtype: str) -> Array:
    if dtype == BFLOAT16 and isinstance(row, np.ndarray) and row.dtype != DTYPES[BFLOAT16]:
        raise ValueError(f"a bfloat16 row is given by its uint16 bits, not by {row.dtype}")
    array = np.asarray(row, dtype=DTYPES[dtype])
    if array.ndim != 1:
        raise ValueError(f"a row has one dimension, not {array.ndim}")
    return array


def _aligned(array: Array) -> Array:
    if array.flags.aligned:
        return array
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def _offsets(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    offsets = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
