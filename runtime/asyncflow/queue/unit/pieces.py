"""What one put brought, and what rows have of it.

Invariant: parcels and pieces never change; what is given up of them is named by a part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from asyncflow.errors import from_wire
from asyncflow.net.jagged import Jagged
from asyncflow.net.later import Later
from asyncflow.queue.backends.base import Place
from asyncflow.queue.protocol.sizes import packed, part
from asyncflow.queue.protocol.unit_calls import Cells, Entry, Verdict


class Parcel:
    """What one put brought to the back end.

    number: there; lease: that wrote it; cells: as the controller is told; partial: the columns that are unfinished.
    """

    __slots__ = ("cells", "columns", "lease", "number", "partial", "size")

    def __init__(
        self, number: int, columns: Mapping[str, Jagged], *, lease: str = "", partial: Collection[str] = ()
    ) -> None:
        self.number = number
        self.lease = lease
        self.columns = tuple(columns)
        self.partial = tuple(partial)
        self.size = sum([column.values.nbytes for column in columns.values()])
        self.cells = Cells(
            dtypes={name: column.form for name, column in columns.items()},
            sizes={name: packed(column) for name, column in columns.items()},
        )

    @property
    def whole(self) -> tuple[str, ...]:
        """The columns that are not unfinished."""
        return tuple(name for name in self.columns if name not in self.partial) if self.partial else self.columns


class Piece:
    """What rows have from a parcel, all whole or all unfinished. shift: the id of a row less its index there."""

    __slots__ = ("parcel", "partial", "shift")

    def __init__(self, parcel: Parcel, shift: int, *, partial: bool = False) -> None:
        self.parcel = parcel
        self.shift = shift
        self.partial = partial

    def place(self, first: int, rows: int) -> Place:
        """Return where so many rows from ``first`` on lie."""
        return Place(self.parcel.number, first - self.shift, rows)

    def size(self, columns: Sequence[str], first: int, rows: int) -> int:
        """Bytes of these columns of so many rows from ``first`` on."""
        sizes, index = self.parcel.cells.sizes, first - self.shift
        return sum([sum(part(sizes[name], index, rows)) for name in columns])


Part: TypeAlias = tuple[Piece, tuple[str, ...], int, int]
"""Some columns of a piece, of so many rows: the first of them, and how many they are."""


@dataclass(slots=True, eq=False)
class Put:
    """A parcel that is stored and not yet decided about. rows: their ids; outputs: promised to each new row.

    verdict: when it comes; shard: the controller that decides, 0 for the home.
    """

    entry: Entry
    rows: Sequence[int]
    parcel: Parcel
    outputs: Mapping[str, int]
    verdict: Later[Verdict]
    shard: int = 0

    def tell(self, verdict: Verdict) -> None:
        """Have who put learn what was decided, where he waits for it still."""
        if self.verdict.done():
            return
        if verdict.error is not None:
            self.verdict.set_exception(from_wire(verdict.error))
        else:
            self.verdict.set_result(Verdict(verdict.each(len(self.rows)), rows=verdict.rows))

    def touches(self, rows: frozenset[int], columns: Sequence[str]) -> bool:
        """Tell whether one of these cells may change by it."""
        return not rows.isdisjoint(self.rows) and any(column in self.parcel.columns for column in columns)
