"""Batches of rows on the wire: one frame with everything small, then one for each large column, which is its values.

The first frame holds the lengths of all rows, column after column (uint32 where each column's fit together, else
int64), then the values of the columns of less than ``LARGE`` bytes. Everything is little-endian. The header says names,
forms and numbers of values. Neither side copies a large column: the frame is the array.

Invariant: ``decode_batch`` gives either exactly what ``encode_batch`` was given, or a ProtocolError. No size in a
header is believed before the bytes that came agree with it, and no byte is ever interpreted as code.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NoReturn, TypeAlias

import numpy as np
from msgspec import Meta, Struct

from asyncflow.errors import ProtocolError
from asyncflow.net.dtypes import DTYPES
from asyncflow.net.jagged import Array, Inner, Jagged, Offsets

__all__ = [
    "LARGE",
    "MAX_COLUMNS",
    "Array",
    "BatchHeader",
    "Buffer",
    "ColumnHeader",
    "Inner",
    "Jagged",
    "decode_batch",
    "encode_batch",
]

Buffer: TypeAlias = bytes | bytearray | memoryview

LARGE = 64 * 1024
"""Bytes from which on a column has a frame of its own."""
MAX_COLUMNS = 4096
_SHORT, _LONG = np.dtype("<u4"), np.dtype("<i8")
_LONGEST_SHORT = (1 << 32) - 1
_Count = Annotated[int, Meta(ge=0, le=1 << 48)]
_Extent = Annotated[int, Meta(ge=1, le=1 << 48)]


class ColumnHeader(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One column of a batch: its name, dtype and inner shape (see ``Jagged``), and how many values it has."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    dtype: str
    values: _Count
    inner: Annotated[tuple[_Extent, ...], Meta(max_length=32)] | None = ()


class BatchHeader(Struct, frozen=True, kw_only=True):
    """What the frames of a batch hold: the number of rows, and the columns in the order of their values."""

    rows: _Count
    columns: Annotated[list[ColumnHeader], Meta(max_length=MAX_COLUMNS)]


def encode_batch(columns: Mapping[str, Jagged]) -> tuple[BatchHeader, list[Buffer]]:
    """Return header and frames of ``columns``, which must all have the same number of rows (ValueError otherwise).

    Frames of large columns are the columns' own memory: it must not change until they were sent.
    """
    counts = set(map(len, columns.values()))
    if len(counts) > 1:
        raise ValueError(f"columns of one batch differ in rows: { {name: len(c) for name, c in columns.items()} }")
    rows = counts.pop() if counts else 0
    headers = []
    small: list[Any] = [b""]
    large: list[Buffer] = []
    for name, column in columns.items():
        values = column.values
        headers.append(ColumnHeader(name=name, dtype=column.dtype, values=values.size, inner=column.inner))
        if values.nbytes < LARGE:
            small.append(values)
        else:
            large.append(values.data.cast("B"))
    sizes = [header.values for header in headers]
    short = max(sizes, default=0) <= _LONGEST_SHORT
    if rows == 1:
        small[0] = struct.pack(f"<{len(sizes)}{'I' if short else 'q'}", *sizes)
    else:
        small[0] = np.array([column.lengths for column in columns.values()], _SHORT if short else _LONG)
    return BatchHeader(rows=rows, columns=headers), [b"".join(small), *large]


def decode_batch(header: BatchHeader, frames: Sequence[Buffer], *, max_bytes: int) -> dict[str, Jagged]:
    """Return the columns that ``header`` and ``frames`` describe, as writable arrays.

    Large ones share the memory of frames that can be written to. max_bytes: most bytes that all frames together may
    hold. Raises ProtocolError where anything disagrees.
    """
    dtypes = [DTYPES.get(column.dtype) or _unknown(column) for column in header.columns]
    sizes = [column.values * dtype.itemsize for column, dtype in zip(header.columns, dtypes, strict=True)]
    at = _check_frames(header, sizes, [len(frame) for frame in frames], max_bytes)
    small, large = memoryview(frames[0]), iter(frames[1:])
    columns = {}
    for column, dtype, size, lengths in zip(
        header.columns, dtypes, sizes, _decode_lengths(header, small[:at]), strict=True
    ):
        if size < LARGE:
            values = np.frombuffer(bytearray(small[at : at + size]), dtype)
            at += size
        else:
            values = np.frombuffer(next(large), dtype)
            if not values.flags.behaved:
                values = values.copy()
        columns[column.name] = _column(column, values, lengths)
    if len(columns) != len(sizes):
        raise ProtocolError("two columns of one batch have the same name", where="batch")
    return columns


def _unknown(column: ColumnHeader) -> NoReturn:
    raise ProtocolError(f"dtype {column.dtype!r} is not one that may cross a socket", where=_where(column))


def _check_frames(header: BatchHeader, sizes: Sequence[int], came: Sequence[int], max_bytes: int) -> int:
    """Return how many bytes of the first frame are lengths; a ProtocolError where the frames cannot hold the rows."""
    if sum(came) > max_bytes:
        raise ProtocolError(f"a batch of {sum(came)} bytes came where {max_bytes} are allowed", where="batch")
    if not sizes and header.rows:
        raise ProtocolError(f"a batch of {header.rows} rows has no column", where="batch")
    large = [size for size in sizes if size >= LARGE]
    cells, spare = len(sizes) * header.rows, sum(came[:1]) - sum(sizes) + sum(large)
    if list(came[1:]) != large or not came or spare not in (cells * _SHORT.itemsize, cells * _LONG.itemsize):
        what = f"frames of {list(came)} bytes cannot hold {header.rows} rows of columns of {list(sizes)} bytes"
        raise ProtocolError(what, where="batch")
    return spare


def _decode_lengths(header: BatchHeader, frame: memoryview) -> Sequence[Offsets | None]:
    """Return for each column the lengths of its rows, which are known to be right; None for one row."""
    sizes = [column.values for column in header.columns]
    short = len(frame) == len(sizes) * header.rows * _SHORT.itemsize
    if header.rows == 1:
        found: Sequence[Offsets | None] = [None] * len(sizes)
        sums = list(struct.unpack(f"<{len(sizes)}{'I' if short else 'q'}", frame))
    else:
        cells = np.frombuffer(frame, _SHORT if short else _LONG).astype(np.int64)
        if not short and cells.size and not 0 <= cells.min() <= cells.max() <= max(sizes):
            raise ProtocolError("a row has less than no values, or more than its column", where="batch")
        table = cells.reshape(len(sizes), header.rows)
        found, sums = list(table), np.add.reduce(table, 1).tolist()
    if sums != sizes:
        column, values = next((column, n) for column, n in zip(header.columns, sums, strict=True) if n != column.values)
        raise ProtocolError(f"its rows hold {values} values, not {column.values}", where=_where(column))
    return found


def _column(header: ColumnHeader, values: Array, lengths: Offsets | None) -> Jagged:
    if header.dtype == "bool" and bool((values.view(np.uint8) > 1).any()):
        raise ProtocolError("a truth value is neither 0 nor 1", where=_where(header))
    if header.inner == ():
        return Jagged.trusted(values, lengths, header.dtype)
    try:
        return Jagged.checked(values, lengths, header.dtype, header.inner)
    except ValueError as wrong:
        raise ProtocolError(str(wrong), where=_where(header)) from wrong


def _where(column: ColumnHeader) -> str:
    return f"column {column.name!r}"
