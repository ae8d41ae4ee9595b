"""The bytes of a column's cells as they are told: of one row after another, or once where all rows have the same.

Each number is an uint32, little-endian: a cell came in one message, and none has 4 GiB.

Invariant: ``part(packed(column), first, rows)`` gives what each of these rows has.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from asyncflow.net.jagged import Jagged

_SIZE = 4


def packed(column: Jagged) -> bytes:
    """Give the bytes of the values of each row."""
    rows = len(column)
    if rows == 1:
        return column.values.nbytes.to_bytes(_SIZE, "little")
    sizes: bytes = (column.lengths * column.values.itemsize).astype("<u4").tobytes()
    return sizes[:_SIZE] if sizes == sizes[:_SIZE] * rows else sizes


def part(sizes: bytes, first: int, rows: int) -> Sequence[int]:
    """Give those of so many rows from ``first`` on."""
    if alike(sizes):
        return (int.from_bytes(sizes, "little"),) * rows
    return struct.unpack_from(f"<{rows}I", sizes, _SIZE * first)


def chosen(sizes: bytes, rows: Iterable[int]) -> bytes:
    """Give those of the rows with these indices."""
    if alike(sizes):
        return sizes
    return b"".join([sizes[_SIZE * row : _SIZE * (row + 1)] for row in rows])


def alike(sizes: bytes) -> bool:
    """Tell whether all rows have the same."""
    return len(sizes) == _SIZE


def fit(sizes: bytes, rows: int) -> bool:
    """Tell whether they are those of so many rows."""
    return alike(sizes) or len(sizes) == _SIZE * rows
