"""Columns of a batch: their dtypes, their rows in memory, and their encoding on the wire.

A ``Jagged`` stores rows of different lengths one after another in one flat array, without padding. On the wire a batch
is one frame with all small data, followed by one frame for each large column. The first frame holds the lengths of all
rows, column by column (uint32), then the values of the columns of less than ``LARGE`` bytes. All values are
little-endian. The header holds names, dtypes, inner shapes and numbers of values. Neither side copies a large column:
the frame is the array.

Invariants: only dtypes in ``DTYPES`` cross a socket, and received bytes are never executed. Every ``Jagged`` is
consistent: its offsets rise from 0 to the number of values and divide them into rows of the shape that it names.
``decode_batch`` either returns exactly the input of ``encode_batch`` or raises ProtocolError. A size in a header is not
used before it was compared with the received bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Annotated, Any, NoReturn, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from asyncflow.errors import ProtocolError

BFLOAT16 = "bfloat16"
"""Name of the dtype that numpy lacks: its values are stored and sent as their uint16 bits."""
TEXT, BYTES, OBJECT = "text", "bytes", "object"
"""Dtypes of Python values, which are stored as uint8: UTF-8, the bytes themselves, and msgpack of plain data."""

_PLAIN = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name).newbyteorder("<") for name in _PLAIN}
DTYPES["bool"] = np.dtype(np.bool_)
_NAMES = {stored: name for name, stored in DTYPES.items()}
DTYPES[BFLOAT16] = np.dtype("<u2")
DTYPES |= dict.fromkeys((TEXT, BYTES, OBJECT), np.dtype(np.uint8))
"""The dtypes that may cross a socket: numpy's dtype of the stored values, by name."""


def name_of(dtype: np.dtype[Any]) -> str:
    """Return ``dtype.name``, without the cost of numpy's own computation of it."""
    return _NAMES.get(dtype) or dtype.name


Array: TypeAlias = npt.NDArray[Any]
Offsets: TypeAlias = npt.NDArray[np.int64]
Inner: TypeAlias = tuple[int, ...] | None
"""Shape of a row without its first axis: ``()`` if rows are 1-D, ``(3, 4)`` if they are [n, 3, 4], None if they are
single values without any axis."""

_OFFSET = 8


class Jagged:
    """Rows of one column.

    values: 1-D array of all values; offsets: int64 [rows + 1], row i is ``values[offsets[i]:offsets[i + 1]]``;
    dtype: name in ``DTYPES``, by default the dtype of ``values`` (required for dtypes that numpy lacks); inner: see
    ``Inner``. lengths: number of values of each row, int64 [rows]. The values are stored contiguously.

    Raises ValueError if the arguments do not fit together.
    """

    __slots__ = ("_offsets", "dtype", "inner", "lengths", "values")

    def __init__(self, values: Array, offsets: Offsets, dtype: str = "", inner: Inner = ()) -> None:
        self.dtype = dtype or name_of(values.dtype)
        self.inner = inner
        self.values = np.ascontiguousarray(values)
        self._offsets: Offsets | None = offsets
        self.lengths: Offsets = offsets[1:] - offsets[:-1]
        if self.dtype not in DTYPES or values.dtype != DTYPES[self.dtype]:
            raise ValueError(f"values of dtype {values.dtype} cannot be a column of dtype {self.dtype!r}")
        if values.ndim != 1 or offsets.ndim != 1 or offsets.dtype != np.int64 or offsets.size == 0:
            raise ValueError(f"a column needs 1-D values and int64 offsets, not {values.shape} and {offsets.shape}")
        if offsets[0] != 0 or offsets[-1] != values.size or bool((offsets[1:] < offsets[:-1]).any()):
            raise ValueError(f"offsets must rise from 0 to {values.size}")
        self.check_shape()

    def check_shape(self) -> None:
        """Raise ValueError if the rows do not have the shape in ``inner``."""
        if self.inner == ():
            return
        if self.dtype in (TEXT, BYTES, OBJECT):
            raise ValueError(f"a row of dtype {self.dtype} has no inner shape, so {self.inner} is not allowed")
        if self.inner is None:
            if self.values.size != len(self) or bool((self.lengths != 1).any()):
                raise ValueError(f"{len(self)} rows without an axis hold {self.values.size} values")
            return
        if min(self.inner) < 1:
            raise ValueError(f"a row of inner shape {self.inner} has no values")
        width, size = math.prod(self.inner), self.values.size
        if size and (width > size or bool((self.offsets % width).any())):
            raise ValueError(f"rows of inner shape {self.inner} need multiples of {width} values")

    @classmethod
    def trusted(cls, values: Array, lengths: Offsets, dtype: str, inner: Inner = ()) -> Jagged:
        """Make a column of arguments that are known to fit together, without a check."""
        column = object.__new__(cls)
        column.values, column.dtype, column.inner = values, dtype, inner
        column.lengths, column._offsets = lengths, None
        return column

    @classmethod
    def from_rows(cls, rows: Sequence[Any], dtype: str | npt.DTypeLike, *, inner: Inner = ()) -> Jagged:
        """Make a column of ``rows``, arrays of the shape that ``inner`` describes. For other rows see ``queue.values``.

        The arrays are cast to ``dtype``, a name or a numpy dtype.
        """
        name = dtype if isinstance(dtype, str) else name_of(np.dtype(dtype))
        if name not in DTYPES or name in (TEXT, BYTES, OBJECT):
            raise ValueError(f"rows cannot be cast to dtype {name!r}, but to one of {', '.join((*_PLAIN, BFLOAT16))}")
        flat = [_as_row(row, name, inner).reshape(-1) for row in rows]
        values = np.concatenate(flat) if flat else np.empty(0, DTYPES[name])
        lengths = np.fromiter([row.size for row in flat], np.int64, len(flat))
        column = cls.trusted(values, lengths, name, inner)
        column.check_shape()
        return column

    @classmethod
    def concat(cls, columns: Sequence[Jagged]) -> Jagged:
        """Return all rows of ``columns`` (at least one, all of one form); a single column is returned as it is."""
        first = columns[0]
        if len(columns) == 1:
            return first
        if {(column.dtype, column.inner) for column in columns} != {(first.dtype, first.inner)}:
            raise ValueError(f"rows of {', '.join(sorted({column.form for column in columns}))} cannot be one column")
        values, lengths = [column.values for column in columns], [column.lengths for column in columns]
        return cls.trusted(np.concatenate(values), np.concatenate(lengths), first.dtype, first.inner)

    def cut(self, start: int, stop: int) -> Jagged:
        """Return the rows from ``start`` to ``stop``, which share this memory; the column itself if these are all."""
        if stop - start == self.lengths.size:
            return self
        values = self.values[self.offsets.item(start) : self.offsets.item(stop)]
        return self.trusted(values, self.lengths[start:stop], self.dtype, self.inner)

    def __len__(self) -> int:
        return self.lengths.size

    @property
    def offsets(self) -> Offsets:
        """Start of each row, and end of the last one: int64 [rows + 1]."""
        if self._offsets is None:
            offsets = np.zeros(len(self) + 1, np.int64)
            self.lengths.cumsum(out=offsets[1:])
            self._offsets = offsets  # assigned last: other threads must not see it incomplete
        return self._offsets

    def row(self, index: int) -> Array:
        """Return row ``index`` (from 0) as a view of its values, in its shape."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a column of {len(self)} rows")
        return self._shaped(self.cut(index, index + 1).values)

    def rows(self) -> list[Array]:
        """Return all rows as views of their values, in their shape."""
        views = [self.values[a:b] for a, b in pairwise(self.offsets.tolist())]
        return views if self.inner == () else [self._shaped(view) for view in views]

    def take(self, indices: Sequence[int] | npt.NDArray[np.integer[Any]]) -> Jagged:
        """Return a new column of the rows ``indices``, in that order; a row may be taken more than once."""
        chosen = np.asarray(indices, np.int64)
        if chosen.size and (chosen.min() < 0 or chosen.max() >= len(self)):
            raise IndexError(f"rows {chosen.min()} to {chosen.max()} of a column of {len(self)} rows")
        starts, stops = self.offsets[chosen], self.offsets[chosen + 1]
        parts = [self.values[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]
        values = np.concatenate(parts) if parts else np.empty(0, self.values.dtype)
        return self.trusted(values, stops - starts, self.dtype, self.inner)

    @property
    def form(self) -> str:
        """Dtype and inner shape as text, such as "float32", "float32[3,4]" or "float32 scalar"."""
        if self.inner is None:
            return f"{self.dtype} scalar"
        return f"{self.dtype}[{','.join(map(str, self.inner))}]" if self.inner else self.dtype

    @property
    def sizes(self) -> list[int]:
        """Bytes of the values of each row."""
        sizes: list[int] = (self.lengths * self.values.itemsize).tolist()
        return sizes

    @property
    def nbytes(self) -> int:
        """Bytes of values and offsets."""
        return self.values.nbytes + (self.lengths.size + 1) * _OFFSET

    def __eq__(self, other: object) -> bool:
        """Return whether form, row lengths and the bits of all values are equal (so a NaN equals itself)."""
        if not isinstance(other, Jagged):
            return NotImplemented
        same_shape = self.form == other.form and np.array_equal(self.offsets, other.offsets)
        return same_shape and self.values.tobytes() == other.values.tobytes()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Jagged({len(self)} rows, {self.values.size} values, {self.form})"

    def _shaped(self, values: Array) -> Array:
        return values if self.inner == () else values.reshape(() if self.inner is None else (-1, *self.inner))


def _as_row(row: Any, dtype: str, inner: Inner) -> Array:
    if dtype == BFLOAT16 and isinstance(row, np.ndarray) and row.dtype != DTYPES[BFLOAT16]:
        raise ValueError(f"a bfloat16 row must be given as uint16 bits, not as {row.dtype}")
    array = np.asarray(row, dtype=DTYPES[dtype])
    if inner is None:
        if array.ndim:
            raise ValueError(f"a row without an axis is one value, not {array.shape}")
    elif array.ndim != 1 + len(inner) or array.shape[1:] != inner:
        expected = " by ".join(["n", *map(str, inner)]) if inner else "one dimension"
        raise ValueError(f"a row has {expected}, not the shape {array.shape}")
    return array


T = TypeVar("T")


def batches(things: Iterable[T], most: int) -> Iterator[list[T]]:
    """Yield lists of ``most`` things; the last one holds the rest."""
    left = iter(things)
    while batch := list(islice(left, most)):
        yield batch


def weighed_batches(
    things: Iterable[T], weigh: Callable[[T], int], *, heaviest: int, most: int | None = None
) -> Iterator[list[T]]:
    """Yield batches of at most ``most`` things and a total weight of at most ``heaviest``; a heavier thing is alone."""
    batch: list[T] = []
    total = 0
    for thing in things:
        weight = weigh(thing)
        if batch and (len(batch) == most or total + weight > heaviest):
            yield batch
            batch, total = [], 0
        batch.append(thing)
        total += weight
    if batch:
        yield batch


Buffer: TypeAlias = bytes | bytearray | memoryview

LARGE = 64 * 1024
"""Columns of at least this many bytes have a frame of their own."""
MAX_COLUMNS = 4096
_LENGTH = np.dtype("<u4")
_LONGEST = (1 << 32) - 1
_Count = Annotated[int, Meta(ge=0, le=1 << 48)]
_Extent = Annotated[int, Meta(ge=1, le=1 << 48)]


class ColumnHeader(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One column of a batch: its name, dtype and inner shape (see ``Jagged``), and its number of values."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    dtype: str
    values: _Count
    inner: Annotated[tuple[_Extent, ...], Meta(max_length=32)] | None = ()


class BatchHeader(Struct, frozen=True, kw_only=True):
    """Description of the frames of a batch: the number of rows, and the columns in the order of their values."""

    rows: _Count
    columns: Annotated[list[ColumnHeader], Meta(max_length=MAX_COLUMNS)]


def encode_batch(columns: Mapping[str, Jagged]) -> tuple[BatchHeader, list[Buffer]]:
    """Return header and frames of ``columns``, which must all have the same number of rows (ValueError otherwise).

    Frames of large columns are the columns' own memory, which must not change until they were sent.
    """
    counts = {column.lengths.size for column in columns.values()}
    if len(counts) > 1:
        raise ValueError(f"columns of one batch differ in rows: { {name: len(c) for name, c in columns.items()} }")
    rows = counts.pop() if counts else 0
    headers = []
    small: list[Any] = [b""]
    large: list[Buffer] = []
    for name, column in columns.items():
        values, count = column.values, column.values.size
        headers.append(ColumnHeader(name=name, dtype=column.dtype, values=count, inner=column.inner))
        if values.nbytes < LARGE:
            small.append(values)
        elif count <= _LONGEST:
            large.append(values.data.cast("B"))
        else:
            raise ValueError(f"column {name!r} has {count} values: at most {_LONGEST} go in one batch")
    small[0] = np.array([column.lengths for column in columns.values()], _LENGTH)
    return BatchHeader(rows=rows, columns=headers), [b"".join(small), *large]


def decode_batch(header: BatchHeader, frames: Sequence[Buffer], *, max_bytes: int) -> dict[str, Jagged]:
    """Return the columns that ``header`` and ``frames`` describe, as writable arrays.

    Large columns share the memory of writable frames. max_bytes: maximum total bytes of the frames. Raises
    ProtocolError if header and frames do not agree.
    """
    sizes = [column.values * (DTYPES.get(column.dtype) or _unknown(column)).itemsize for column in header.columns]
    at = _check_frames(header, sizes, [len(frame) for frame in frames], max_bytes)
    small, large = memoryview(frames[0]), iter(frames[1:])
    columns = {}
    for column, size, lengths in zip(header.columns, sizes, _decode_lengths(header, small[:at]), strict=True):
        if size < LARGE:
            values = np.frombuffer(bytearray(small[at : at + size]), DTYPES[column.dtype])
            at += size
        else:
            values = np.frombuffer(next(large), DTYPES[column.dtype])
            if not values.flags.behaved:
                values = values.copy()
        columns[column.name] = made = Jagged.trusted(values, lengths, column.dtype, column.inner)
        if column.inner != () or column.dtype == "bool":
            _check_values(made, column)
    if len(columns) != len(sizes):
        raise ProtocolError("two columns of one batch have the same name", where="batch")
    return columns


def _unknown(column: ColumnHeader) -> NoReturn:
    raise ProtocolError(f"dtype {column.dtype!r} may not cross a socket", where=_where(column))


def _check_frames(header: BatchHeader, sizes: Sequence[int], frame_sizes: Sequence[int], max_bytes: int) -> int:
    """Return the bytes of the lengths in the first frame. Raises ProtocolError if the frames cannot hold the rows."""
    if sum(frame_sizes) > max_bytes:
        raise ProtocolError(f"a batch has {sum(frame_sizes)} bytes, but at most {max_bytes} are allowed", where="batch")
    if not sizes and header.rows:
        raise ProtocolError(f"a batch of {header.rows} rows has no column", where="batch")
    large = [size for size in sizes if size >= LARGE]
    lengths = len(sizes) * header.rows * _LENGTH.itemsize
    if not frame_sizes or frame_sizes[0] != lengths + sum(sizes) - sum(large) or list(frame_sizes[1:]) != large:
        what = f"frames of {list(frame_sizes)} bytes cannot hold {header.rows} rows of columns of {list(sizes)} bytes"
        raise ProtocolError(what, where="batch")
    return lengths


def _decode_lengths(header: BatchHeader, frame: memoryview) -> Offsets:
    """Return the lengths of the rows of each column. Raises ProtocolError if they do not fit the header."""
    table = np.frombuffer(frame, _LENGTH).astype(np.int64).reshape(len(header.columns), header.rows)
    for column, values in zip(header.columns, np.add.reduce(table, 1).tolist(), strict=True):
        if column.values != values:
            raise ProtocolError(f"its rows hold {values} values, not {column.values}", where=_where(column))
    return table


def _check_values(column: Jagged, header: ColumnHeader) -> None:
    if header.dtype == "bool" and bool((column.values.view(np.uint8) > 1).any()):
        raise ProtocolError("a boolean value is neither 0 nor 1", where=_where(header))
    try:
        column.check_shape()
    except ValueError as wrong:
        raise ProtocolError(str(wrong), where=_where(header)) from wrong


def _where(column: ColumnHeader) -> str:
    return f"column {column.name!r}"
