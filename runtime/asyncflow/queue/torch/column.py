"""A column of a batch as tensors: packed as it came, padded or nested on request.

Invariant: the tensors are writable and the caller's own; nothing is copied where the bytes that came can be used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from asyncflow.net.dtypes import BFLOAT16, BYTES, OBJECT, TEXT, name_of
from asyncflow.net.frames import Jagged
from asyncflow.queue.client.open_values import decode

Kind = Literal["rows", "scalar", "text", "bytes", "object"]
Side = Literal["left", "right"]
_PYTHON = (TEXT, BYTES, OBJECT)


@dataclass(frozen=True)
class Column:
    """Rows of different lengths, one after another.

    values: [entries of all rows, ...]; offsets: int64 [rows + 1], row i is ``values[offsets[i]:offsets[i + 1]]``.
    kind: "scalar" where a row is one value without an axis; "text", "bytes" and "object" where it is a Python value,
    which ``values`` holds as bytes.
    """

    values: Tensor
    offsets: Tensor
    kind: Kind = "rows"

    @classmethod
    def of(cls, column: Jagged) -> Column:
        """Take a column that was fetched."""
        values = torch.from_numpy(np.require(column.values, requirements=["A", "W"]))
        offsets = torch.from_numpy(np.require(column.offsets, requirements=["A", "W"]))
        if column.dtype == BFLOAT16:
            values = values.view(torch.bfloat16)
        if column.inner:
            values = values.view(-1, *column.inner)
            offsets = offsets // int(np.prod(column.inner))
        kind: Kind = "scalar" if column.inner is None else "rows"
        if column.dtype in _PYTHON:
            kind = column.dtype  # type: ignore[assignment] # it is one of _PYTHON
        return cls(values, offsets, kind)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Any:
        """Return one row: a view, or the Python value."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of a column of {len(self)} rows")
        values = self.values[self.offsets[row] : self.offsets[row + 1]]
        if self.kind == "rows":
            return values
        if self.kind == "scalar":
            return values[0]
        return decode(Jagged(values.cpu().numpy(), np.array([0, len(values)]), self.kind))[0]

    @property
    def lengths(self) -> Tensor:
        """Entries of each row, int64 [rows]."""
        return self.offsets.diff()

    def padded(self, fill: float = 0, *, side: Side = "right") -> Tensor:
        """Return the rows as [rows, longest, ...], filled up with ``fill``; a view where all are of one length.

        Scalars are [rows]. Python values have no such form: TypeError.
        """
        self._check_tensor("padded")
        if self.kind == "scalar":
            return self.values
        lengths = self.lengths
        longest = int(lengths.max()) if len(self) else 0
        shape = (len(self), longest, *self.values.shape[1:])
        if len(self.values) == len(self) * longest:
            return self.values.view(shape)
        out = self.values.new_full(shape, fill)
        places = torch.arange(longest, device=lengths.device)
        filled = places < lengths[:, None] if side == "right" else places >= longest - lengths[:, None]
        out[filled] = self.values
        return out

    def nested(self) -> Tensor:
        """Return the rows as a nested tensor (jagged layout) that shares their memory; scalars as [rows]."""
        self._check_tensor("nested")
        if self.kind == "scalar":
            return self.values
        nested: Tensor = torch.nested.nested_tensor_from_jagged(self.values, self.offsets)
        return nested

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Column:
        """Return the column on another device."""
        values, offsets = (tensor.to(device, non_blocking=non_blocking) for tensor in (self.values, self.offsets))
        return Column(values, offsets, self.kind)

    def pin_memory(self) -> Column:
        """Return the column in page-locked memory."""
        return Column(self.values.pin_memory(), self.offsets.pin_memory(), self.kind)

    def jagged(self) -> Jagged:
        """Return the column as the queue takes it."""
        values, offsets = self.values.detach().cpu().contiguous(), self.offsets.cpu().numpy()
        if self.kind in _PYTHON:
            return Jagged(values.numpy(), offsets, self.kind)
        inner = tuple(values.shape[1:])
        offsets = offsets * int(np.prod(inner))
        if values.dtype == torch.bfloat16:
            bits = values.view(torch.uint16).numpy().reshape(-1)
            return Jagged(bits, offsets, BFLOAT16, None if self.kind == "scalar" else inner)
        array = values.numpy().reshape(-1)
        return Jagged(array, offsets, name_of(array.dtype), None if self.kind == "scalar" else inner)

    def _check_tensor(self, form: str) -> None:
        if self.kind in _PYTHON:
            raise TypeError(f"a column of {self.kind} cannot be {form}: take its rows, column[i]")
