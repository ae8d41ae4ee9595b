"""The bytes of a column's cells as they are told: of one row after another, or once where all rows have the same.

Each number is an uint32, little-endian: a cell came in one message, and none has 4 GiB.

Invariant: ``part(pack(sizes), first, rows)`` gives what each of these rows has.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from asyncflow.net.jagged import Jagged

ABSENT = (1 << 32) - 1
"""Stands for a cell that is not there."""
MOST_BYTES = ABSENT - 1
"""Bytes of the largest cell."""

_SIZE = 4


def pack(sizes: Sequence[int]) -> bytes:
    """Return the bytes of each row's cell in few bytes."""
    if len(sizes) == 1:
        return sizes[0].to_bytes(_SIZE, "little")
    return _short(struct.pack(f"<{len(sizes)}I", *sizes))


def packed(column: Jagged) -> bytes:
    """Return those of the values of a column."""
    if len(column) == 1:
        return column.values.nbytes.to_bytes(_SIZE, "little")
    return _short((column.lengths * column.values.itemsize).astype("<u4").tobytes())


def _short(sizes: bytes) -> bytes:
    return sizes[:_SIZE] if sizes == sizes[:_SIZE] * (len(sizes) // _SIZE) else sizes


def part(sizes: bytes, first: int, rows: int) -> Sequence[int]:
    """Return those of so many rows from ``first`` on."""
    if len(sizes) == _SIZE:
        return (int.from_bytes(sizes, "little"),) * rows
    return struct.unpack_from(f"<{rows}I", sizes, _SIZE * first)


def chosen(sizes: bytes, rows: Sequence[int]) -> bytes:
    """Return those of the rows with these indices, as they lie."""
    if alike(sizes):
        return sizes
    if isinstance(rows, range) and rows.step == 1:
        return sizes[_SIZE * rows.start : _SIZE * rows.stop]
    return b"".join([sizes[_SIZE * row : _SIZE * (row + 1)] for row in rows])


def alike(sizes: bytes) -> bool:
    """Tell whether all rows have the same."""
    return len(sizes) == _SIZE


def one(sizes: bytes) -> int:
    """Return what all rows have, where they are alike."""
    return int.from_bytes(sizes, "little")


def fit(sizes: bytes, rows: int) -> bool:
    """Tell whether they are those of so many rows."""
    return len(sizes) in (_SIZE, _SIZE * rows)
