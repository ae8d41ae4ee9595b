"""What a data set gives: some samples, who they are, and their columns.

Invariant: metas and all columns have the same rows in the same order, in every form and on every device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from asyncflow.errors import ManifestError
from asyncflow.net.frames import Jagged
from asyncflow.queue.protocol.messages import RowMeta, StepTotals
from asyncflow.queue.torch.column import Column, Side
from asyncflow.queue.torch.held import Held

if TYPE_CHECKING:
    from tensordict import TensorDict


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Some samples, packed: ``columns[name].values`` and ``.offsets``.

    held: what keeps them ours until they are completed, where that is to be said. step, slot, last, totals: of a batch
    of an optimizer step; ``last`` ends the step, and then ``totals`` says what it held over all ranks and slots.
    """

    metas: list[RowMeta]
    columns: dict[str, Column]
    held: Held | None = None
    step: int = 0
    slot: int = 0
    last: bool = False
    totals: StepTotals | None = None

    def __len__(self) -> int:
        return len(self.metas)

    def padded(self, fill: float | Mapping[str, float] = 0, *, side: Side = "right") -> dict[str, Any]:
        """Return each column as [rows, longest, ...] and its lengths as ``NAME_lengths``; Python values as lists.

        fill: what fills the rest, for all columns or by column (0 for one that is not named).
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
        """Return the columns as a TensorDict of [rows], nested or ``padded``, with ``serial`` and ``sample`` of each.

        Raises ManifestError where the package ``tensordict`` is not installed.
        """
        try:
            from tensordict import NonTensorStack, TensorDict
        except ImportError as error:
            hint = "pip install 'asyncflow[tensordict]'"
            raise ManifestError(
                "the package tensordict is not installed", where="Batch.tensordict", hint=hint
            ) from error
        who = {name: torch.tensor([getattr(m, name) for m in self.metas]) for name in ("serial", "sample")}
        whole = self.padded() if padded else {name: _nested(column) for name, column in self.columns.items()}
        content = {name: NonTensorStack(*v) if isinstance(v, list) else v for name, v in (who | whole).items()}
        return TensorDict(content, batch_size=[len(self)])

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Return the batch with its columns on another device."""
        return replace(self, columns={n: c.to(device, non_blocking=non_blocking) for n, c in self.columns.items()})

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory; a loader with ``pin_memory=True`` calls this."""
        return replace(self, columns={name: column.pin_memory() for name, column in self.columns.items()})


def columns_of(fetched: Mapping[str, Jagged], names: Sequence[str]) -> dict[str, Column]:
    """Return what was fetched as tensors, in the order of ``names``."""
    return {name: Column.of(fetched[name]) for name in names}


def _nested(column: Column) -> Any:
    if column.kind in ("rows", "scalar"):
        return column.nested()
    return [column[row] for row in range(len(column))]
