"""A column of a batch: rows of different lengths, one after another in one flat array, never padded.

Invariant: a ``Jagged`` that exists is whole: its offsets rise from nothing to all its values, and cut them into rows of
the shape that it names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from asyncflow.net.dtypes import BFLOAT16, BYTES, DTYPES, OBJECT, TEXT, from_bytes, name_of, to_bytes

Array: TypeAlias = npt.NDArray[Any]
Offsets: TypeAlias = npt.NDArray[np.int64]
Inner: TypeAlias = tuple[int, ...] | None
"""Shape of a row without its first axis: ``()`` where rows are 1-D, ``(3, 4)`` where they are [n, 3, 4], None where
they are single values without any axis."""

_OFFSET = 8


class Jagged:
    """Rows of one column.

    values: 1-D array of all values; offsets: int64 [rows + 1], row i is ``values[offsets[i]:offsets[i + 1]]``;
    dtype: name in ``DTYPES``, by default that of ``values`` (others are said explicitly); inner: see ``Inner``.
    Raises ValueError where they do not fit together.

    Inside, the values lie one after another; offsets and lengths are made of one another when asked for, and a single
    row needs neither.
    """

    __slots__ = ("_lengths", "_offsets", "dtype", "inner", "values")

    def __init__(self, values: Array, offsets: Offsets, dtype: str = "", inner: Inner = ()) -> None:
        self.dtype = dtype or name_of(values.dtype)
        self.inner = inner
        self.values = np.ascontiguousarray(values)
        self._offsets: Offsets | None = offsets
        self._lengths: Offsets | None = None
        if self.dtype not in DTYPES or values.dtype != DTYPES[self.dtype]:
            raise ValueError(f"values of dtype {values.dtype} cannot be a column of dtype {self.dtype!r}")
        if values.ndim != 1 or offsets.ndim != 1 or offsets.dtype != np.int64 or offsets.size == 0:
            raise ValueError(f"a column needs 1-D values and int64 offsets, not {values.shape} and {offsets.shape}")
        if offsets[0] != 0 or offsets[-1] != values.size or bool((offsets[1:] < offsets[:-1]).any()):
            raise ValueError(f"offsets must rise from 0 to {values.size}")
        self.check_shape()

    def check_shape(self) -> None:
        """Raise ValueError where the rows are not of the shape that ``inner`` says."""
        if self.inner == ():
            return
        if self.dtype in (TEXT, BYTES, OBJECT):
            raise ValueError(f"a row of dtype {self.dtype} has no inner shape, so not {self.inner}")
        if self.inner is None:
            if self.values.size != len(self) or bool((self.lengths != 1).any()):
                raise ValueError(f"{len(self)} rows without an axis hold {self.values.size} values")
            return
        if min(self.inner) < 1:
            raise ValueError(f"a row of inner shape {self.inner} holds nothing")
        width, size = math.prod(self.inner), self.values.size
        if size and (width > size or bool((self.offsets % width).any())):
            raise ValueError(f"rows of inner shape {self.inner} need multiples of {width} values")

    @classmethod
    def trusted(cls, values: Array, lengths: Offsets | None, dtype: str, inner: Inner = ()) -> Jagged:
        """Make a column of what is known to fit together, without looking. lengths: None for one row of all values."""
        made = object.__new__(cls)
        made.values, made.dtype, made.inner = values, dtype, inner
        made._offsets, made._lengths = None, lengths
        return made

    @classmethod
    def checked(cls, values: Array, lengths: Offsets | None, dtype: str, inner: Inner) -> Jagged:
        """Make a column of ``lengths`` that are known to fit. Raises ValueError where ``inner`` does not."""
        made = cls.trusted(values, lengths, dtype, inner)
        made.check_shape()
        return made

    @classmethod
    def from_rows(cls, rows: Sequence[Any], dtype: str | npt.DTypeLike, *, inner: Inner = ()) -> Jagged:
        """Make a column of ``rows``: arrays of the shape that ``inner`` says, or the Python values of ``dtype``.

        Arrays are cast to ``dtype``, which is a name or numpy's type.
        """
        name = dtype if isinstance(dtype, str) else name_of(np.dtype(dtype))
        if name not in DTYPES:
            raise ValueError(f"a column cannot have dtype {name!r}; it may be one of {', '.join(DTYPES)}")
        if name in (TEXT, BYTES, OBJECT):
            data = [to_bytes(row, name) for row in rows]
            values = np.frombuffer(bytearray().join(data), np.uint8)
            lengths = np.fromiter(map(len, data), np.int64, len(data))
            return cls.checked(values, lengths, name, inner)
        stored = DTYPES[name]
        ndim = 0 if inner is None else 1 + len(inner)
        arrays = [
            row
            if type(row) is np.ndarray and row.ndim == ndim and row.dtype == stored and row.shape[1:] == (inner or ())
            else _as_row(row, name, inner)
            for row in rows
        ]
        flat = arrays if ndim == 1 else [row.reshape(-1) for row in arrays]
        if len(flat) == 1:
            return cls.checked(flat[0].copy(), None, name, inner)
        values = np.concatenate(flat) if flat else np.empty(0, stored)
        lengths = np.fromiter([row.size for row in flat], np.int64, len(flat))
        return cls.checked(values, lengths, name, inner)

    @classmethod
    def of(cls, rows: Sequence[Any]) -> Jagged:
        """Make a column of ``rows`` (at least one) of whatever dtype and inner shape the first one has."""
        first = rows[0]
        for kind, name in ((str, TEXT), (bytes, BYTES)):
            if isinstance(first, kind):
                return cls.from_rows(rows, name)
        if not isinstance(first, np.ndarray | np.generic | bool | int | float):
            return cls.from_rows(rows, OBJECT)
        array = np.asarray(first)
        return cls.from_rows(rows, name_of(array.dtype), inner=array.shape[1:] if array.ndim else None)

    @classmethod
    def gather(cls, runs: Sequence[tuple[Jagged, int, int]]) -> Jagged:
        """Put the rows from start to stop of each column of ``runs`` (at least one, all of one form) one after another.

        A single run shares its column's memory.
        """
        first, start, stop = runs[0]
        if len(runs) == 1:
            return first.cut(start, stop)
        if {(column.dtype, column.inner) for column, _, _ in runs} != {(first.dtype, first.inner)}:
            forms = ", ".join(sorted({column.form for column, _, _ in runs}))
            raise ValueError(f"rows of {forms} cannot be one column")
        values, lengths = [], []
        for column, start, stop in runs:
            whole = stop - start == len(column)
            values.append(column.values if whole else _values(column, start, stop))
            lengths.append(column.lengths if whole else column.lengths[start:stop])
        return cls.trusted(np.concatenate(values), np.concatenate(lengths), first.dtype, first.inner)

    def cut(self, start: int, stop: int) -> Jagged:
        """Return the rows from ``start`` to ``stop``, which share this column's memory."""
        if start == 0 and stop == len(self):
            return self
        return self.trusted(_values(self, start, stop), self.lengths[start:stop], self.dtype, self.inner)

    def __len__(self) -> int:
        if self._lengths is not None:
            return self._lengths.size
        return self._offsets.size - 1 if self._offsets is not None else 1

    @property
    def offsets(self) -> Offsets:
        """Where rows begin, and the last one ends: int64 [rows + 1]."""
        if self._offsets is None:
            self._offsets = _offsets(self.lengths)
        return self._offsets

    @property
    def lengths(self) -> Offsets:
        """Number of values of each row, int64 [rows]."""
        if self._lengths is None:
            offsets = self._offsets
            self._lengths = np.array([self.values.size]) if offsets is None else offsets[1:] - offsets[:-1]
        return self._lengths

    def row(self, index: int) -> Array:
        """Return row ``index`` (from 0) as a view of its values, in its shape."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a column of {len(self)} rows")
        return self._shaped(_values(self, index, index + 1))

    def rows(self) -> list[Any]:
        """Return all rows as ``from_rows`` takes them: views of arrays, or Python values.

        Raises ProtocolError for bytes that are no such value.
        """
        bounds = [0, self.values.size] if len(self) == 1 else self.offsets.tolist()
        if self.dtype in (TEXT, BYTES, OBJECT):
            data = self.values.tobytes()
            return [from_bytes(data[a:b], self.dtype) for a, b in pairwise(bounds)]
        views = [self.values[a:b] for a, b in pairwise(bounds)]
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
        """Dtype and inner shape in a word, as "float32", "float32[3,4]" or "float32 scalar"."""
        if self.inner is None:
            return f"{self.dtype} scalar"
        return f"{self.dtype}[{','.join(map(str, self.inner))}]" if self.inner else self.dtype

    @property
    def sizes(self) -> list[int]:
        """Bytes of the values of each row."""
        if len(self) == 1:
            return [self.values.nbytes]
        sizes: list[int] = (self.lengths * self.values.itemsize).tolist()
        return sizes

    @property
    def nbytes(self) -> int:
        """Bytes of values and offsets."""
        return self.values.nbytes + (len(self) + 1) * _OFFSET

    def __eq__(self, other: object) -> bool:
        """Equal when form, row lengths and the bits of all values are (so that a NaN equals itself)."""
        if not isinstance(other, Jagged):
            return NotImplemented
        same_shape = self.form == other.form and np.array_equal(self.offsets, other.offsets)
        return same_shape and self.values.tobytes() == other.values.tobytes()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Jagged({len(self)} rows, {self.values.size} values, {self.form})"

    def _shaped(self, values: Array) -> Array:
        return values if self.inner == () else values.reshape(() if self.inner is None else (-1, *self.inner))


def _values(column: Jagged, start: int, stop: int) -> Array:
    if stop - start == len(column):
        return column.values
    offsets = column.offsets
    return column.values[offsets.item(start) : offsets.item(stop)]


def _as_row(row: Any, dtype: str, inner: Inner) -> Array:
    if dtype == BFLOAT16 and isinstance(row, np.ndarray) and row.dtype != DTYPES[BFLOAT16]:
        raise ValueError(f"a bfloat16 row is given by its uint16 bits, not by {row.dtype}")
    array = np.asarray(row, dtype=DTYPES[dtype])
    if inner is None:
        if array.ndim:
            raise ValueError(f"a row without an axis is one value, not {array.shape}")
    elif array.ndim != 1 + len(inner) or array.shape[1:] != inner:
        expected = " by ".join(["n", *map(str, inner)]) if inner else "one dimension"
        raise ValueError(f"a row has {expected}, not the shape {array.shape}")
    return array


def _offsets(lengths: Offsets) -> Offsets:
    offsets = np.zeros(lengths.size + 1, np.int64)
    lengths.cumsum(out=offsets[1:])
    return offsets
