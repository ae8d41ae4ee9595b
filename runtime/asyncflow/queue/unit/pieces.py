"""What a row on a unit is made of: pieces, each some columns of its place in a parcel.

Invariant: a row has one cell a column; what is whole is never hidden by what is partial.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncflow.net.jagged import Jagged
from asyncflow.net.later import Later
from asyncflow.queue.backends.base import Place
from asyncflow.queue.protocol.messages import Tag
from asyncflow.queue.protocol.unit_calls import Cells, Entry, Verdict


class Parcel:
    """What one put brought to the back end.

    number: there; lease: that wrote it; cells: as the controller is told; whole: the columns that are not unfinished.
    """

    __slots__ = ("cells", "columns", "lease", "number", "size", "whole")

    def __init__(
        self, number: int, columns: Mapping[str, Jagged], *, lease: str = "", partial: Collection[str] = ()
    ) -> None:
        self.number = number
        self.lease = lease
        self.columns = tuple(columns)
        self.whole = tuple(name for name in columns if name not in partial) if partial else self.columns
        self.size = sum(column.values.nbytes for column in columns.values())
        self.cells = Cells(
            dtypes={name: column.form for name, column in columns.items()},
            sizes={name: column.sizes for name, column in columns.items()},
        )


class Piece(NamedTuple):
    """Some columns of a row, where they lie."""

    place: Place
    parcel: Parcel
    columns: tuple[str, ...]

    def size(self, column: str) -> int:
        """Bytes of a cell."""
        return self.parcel.cells.sizes[column][self.place.row]


@dataclass(slots=True)
class HeldRow:
    """A row. outputs: most bytes of each column that is written to it later; whole, partial: its pieces."""

    tokens: int
    tags: dict[str, Tag]
    outputs: Mapping[str, int]
    whole: list[Piece]
    partial: list[Piece] = field(default_factory=list)

    def awaits(self, column: str, size: int) -> bool:
        """Tell whether a cell of that size was promised and is not there yet."""
        return size <= self.outputs.get(column, 0) and _find(self.whole, column) is None

    def piece(self, column: str) -> Piece | None:
        """Give where a column lies, the partial one where there is no other."""
        return _find(self.whole, column) or _find(self.partial, column)

    def has_from(self, piece: Piece) -> bool:
        """Tell whether the same writer has written one of these columns before."""
        there = (_find(self.whole, column) for column in piece.columns)
        return any(held is not None and held.parcel.lease == piece.parcel.lease for held in there)

    def complete(self, piece: Piece) -> list[Piece]:
        """Take in a piece; give what it replaces."""
        replaced = _cut(self.partial, piece.columns) + _cut(self.whole, piece.columns)
        self.whole.append(piece)
        return replaced

    def keep(self, piece: Piece) -> list[Piece]:
        """Take in a piece of what is unfinished; give what it replaces, and of itself what is whole already."""
        new = [piece]
        known = _cut(new, [column for column in piece.columns if _find(self.whole, column) is not None])
        replaced = known + _cut(self.partial, piece.columns)
        self.partial += new
        return replaced

    @property
    def size(self) -> int:
        """Bytes of its cells."""
        return sum(piece.size(name) for piece in (*self.whole, *self.partial) for name in piece.columns)

    @property
    def places(self) -> list[Place]:
        """Where it lies."""
        return [piece.place for piece in (*self.whole, *self.partial)]

    @property
    def promise(self) -> int:
        """Bytes that are kept for it."""
        return promised(self.outputs, [name for piece in self.whole for name in piece.columns]) if self.outputs else 0


@dataclass(slots=True, eq=False)
class Put:
    """A parcel that is stored and not yet decided about. outputs: promised to each new row; verdict: when it comes.

    shard: the controller that decides, 0 for the home.
    """

    entry: Entry
    parcel: Parcel
    outputs: Mapping[str, int]
    verdict: Later[Verdict]
    shard: int = 0

    def touches(self, rows: frozenset[int], columns: Sequence[str]) -> bool:
        """Tell whether one of these cells may change by it."""
        return any(column in self.parcel.columns for column in columns) and not rows.isdisjoint(self.entry.rows)


def promised(outputs: Mapping[str, int], present: Collection[str]) -> int:
    """Give the bytes of the ``outputs`` of one row that are not ``present``."""
    return sum(size for name, size in outputs.items() if name not in present)


def _find(pieces: Sequence[Piece], column: str) -> Piece | None:
    for piece in pieces:
        if column in piece.columns:
            return piece
    return None


def _cut(pieces: list[Piece], columns: Collection[str]) -> list[Piece]:
    """Take these columns out of ``pieces``; give them."""
    out = [(piece, tuple(name for name in piece.columns if name in columns)) for piece in pieces]
    out = [(piece, names) for piece, names in out if names]
    for piece, names in out:
        pieces.remove(piece)
        if left := tuple(name for name in piece.columns if name not in names):
            pieces.append(piece._replace(columns=left))
    return [piece._replace(columns=names) for piece, names in out]
