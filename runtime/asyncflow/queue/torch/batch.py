"""Batch of a data set: its rows, their lease, and their columns as tensors.

Invariants: metas and all columns have the same rows in the same order, in every form and on every device. Tensors are
writable and owned by the caller. The process that holds a lease keeps it in force: a loader worker lives until all of
its batches have arrived, and then the process that created the data set keeps their leases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from asyncflow.errors import ManifestError
from asyncflow.queue.protocol.messages import LeasedRow, RowMeta, StepTotals
from asyncflow.queue.values import decode, plain_array
from asyncflow.rpc.columns import BFLOAT16, BYTES, OBJECT, TEXT, Jagged

if TYPE_CHECKING:
    from tensordict import TensorDict

Kind = Literal["rows", "scalar", "text", "bytes", "object"]
Side = Literal["left", "right"]
_PYTHON = (TEXT, BYTES, OBJECT)


@dataclass(frozen=True)
class Column:
    """Rows of different lengths, one after another.

    values: [entries of all rows, ...]; offsets: int64 [rows + 1], row i is ``values[offsets[i]:offsets[i + 1]]``.
    kind: "scalar" if a row is one value without an axis; "text", "bytes" or "object" if it is a Python value, which
    ``values`` contains as bytes.
    """

    values: Tensor
    offsets: Tensor
    kind: Kind = "rows"

    @classmethod
    def of(cls, column: Jagged) -> Column:
        """Return a fetched column as tensors."""
        values = torch.from_numpy(np.require(column.values, requirements=["A", "W"]))
        offsets = torch.from_numpy(np.require(column.offsets, requirements=["A", "W"]))
        if column.dtype == BFLOAT16:
            values = values.view(torch.bfloat16)
        if column.inner:
            values = values.view(-1, *column.inner)
            offsets = offsets // math.prod(column.inner)
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
        """Return the rows as [rows, longest, ...], padded with ``fill``; a view if all rows have the same length.

        Scalars are [rows]. Raises TypeError for Python values.
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
        positions = torch.arange(longest, device=lengths.device)
        filled = positions < lengths[:, None] if side == "right" else positions >= longest - lengths[:, None]
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
        """Return the column in the queue's form."""
        values, dtype = plain_array(self.values, where="batch")
        inner = None if self.kind == "scalar" else values.shape[1:]
        offsets = self.offsets.cpu().numpy() * math.prod(values.shape[1:])
        return Jagged(values.reshape(-1), offsets, self.kind if self.kind in _PYTHON else dtype, inner)

    def _check_tensor(self, form: str) -> None:
        if self.kind in _PYTHON:
            raise TypeError(f"a column of {self.kind} cannot be {form}: use its rows, column[i]")


LEASE_OWNERS: WeakValueDictionary[str, Any] = WeakValueDictionary()
"""The data sets of this process that keep leases in force, by name; ``keep(rows)`` adds a lease to one."""


@dataclass(frozen=True)
class BatchLease:
    """Leased rows of a batch, until they are completed or given back. owner: name of the data set that claimed them.

    A process that receives the lease keeps it in force from then on, if it knows the data set.
    """

    owner: str
    rows: list[LeasedRow]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if (local := LEASE_OWNERS.get(self.owner)) is not None:
            local.keep(self.rows)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of a queue, packed: ``columns[name].values`` and ``.offsets``.

    lease: kept until the batch is completed, if completion is explicit. step, slot, last, totals: of a batch of an
    optimizer step; ``last`` ends the step, and ``totals`` are then its totals over all ranks and slots.
    """

    metas: list[RowMeta]
    columns: dict[str, Column]
    lease: BatchLease | None = None
    step: int = 0
    slot: int = 0
    last: bool = False
    totals: StepTotals | None = None

    def __len__(self) -> int:
        return len(self.metas)

    def padded(self, fill: float | Mapping[str, float] = 0, *, side: Side = "right") -> dict[str, Any]:
        """Return each column as [rows, longest, ...] and its lengths as ``NAME_lengths``; Python values as lists.

        fill: the padding value, for all columns or by column (0 for columns that are not named).
        """
        forms: dict[str, Any] = {}
        for name, column in self.columns.items():
            if column.kind in ("rows", "scalar"):
                forms[name] = column.padded(fill.get(name, 0) if isinstance(fill, Mapping) else fill, side=side)
                forms |= {f"{name}_lengths": column.lengths} if column.kind == "rows" else {}
            else:
                forms[name] = [column[row] for row in range(len(column))]
        return forms

    def tensordict(self, *, padded: bool = False) -> TensorDict:
        """Return the columns as a TensorDict of [rows], nested or ``padded``, with each ``serial`` and ``sample``.

        Raises ManifestError if the package ``tensordict`` is not installed.
        """
        try:
            from tensordict import NonTensorStack, TensorDict
        except ImportError as error:
            hint = "Run pip install 'asyncflow[tensordict]'"
            raise ManifestError(
                "the package tensordict is not installed", where="Batch.tensordict", hint=hint
            ) from error
        identity = {name: torch.tensor([getattr(m, name) for m in self.metas]) for name in ("serial", "sample")}
        whole = self.padded() if padded else {name: _nested(column) for name, column in self.columns.items()}
        content = {name: NonTensorStack(*v) if isinstance(v, list) else v for name, v in (identity | whole).items()}
        return TensorDict(content, batch_size=[len(self)])

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Return the batch with its columns on another device."""
        return replace(self, columns={n: c.to(device, non_blocking=non_blocking) for n, c in self.columns.items()})

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory; a loader with ``pin_memory=True`` calls this."""
        return replace(self, columns={name: column.pin_memory() for name, column in self.columns.items()})


def columns_of(fetched: Mapping[str, Jagged], names: Sequence[str]) -> dict[str, Column]:
    """Return fetched columns as tensors, in the order of ``names``."""
    return {name: Column.of(fetched[name]) for name in names}


def _nested(column: Column) -> Any:
    if column.kind in ("rows", "scalar"):
        return column.nested()
    return [column[row] for row in range(len(column))]
