"""Parcels that were lent whole: who holds some of their rows need not ask for the others.

A parcel is *shown* by marks in the shared memory where its columns lie. Whoever was lent them looks at a mark before it
uses them again, and sees at once when it was taken back.

Invariants: a parcel is shown only as long as all its cells are those that a fetch would give; one that was hidden is
never shown again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence

from asyncflow.net.arena_loans import hide, show
from asyncflow.net.frames import LARGE, Array, Jagged
from asyncflow.queue.unit.blocks import Block
from asyncflow.queue.unit.pieces import Parcel, Piece

_MOST_ROWS = 1024


class Shown:
    """The parcels that are shown, and their large columns."""

    def __init__(self) -> None:
        self._columns: dict[Parcel, dict[str, Array]] = {}
        self._hidden: weakref.WeakSet[Parcel] = weakref.WeakSet()

    def show(self, parcel: Parcel, columns: Mapping[str, Jagged]) -> bool:
        """Show a parcel of which these are whole columns, and say whether that can be."""
        large = {name: column.values for name, column in columns.items() if column.values.nbytes >= LARGE}
        if parcel in self._hidden or not large or not all(map(show, large.values())):
            return False
        self._columns.setdefault(parcel, {}).update(large)
        return True

    def hide(self, parcels: Iterable[Parcel]) -> None:
        """Show these parcels no more."""
        if self._columns:
            for parcel in set(parcels).intersection(self._columns):
                self._hidden.add(parcel)
                for values in self._columns.pop(parcel).values():
                    hide(values)

    def hide_of(self, blocks: Iterable[Block | None], columns: Sequence[str]) -> None:
        """Show no parcels of which these cells may be replaced."""
        if self._columns:
            held = [block.cells.get(name) for block in set(blocks) if block is not None for name in columns]
            self.hide(piece.parcel for piece in held if piece is not None)

    def hide_all(self) -> None:
        """Show none."""
        self.hide(list(self._columns))


def whole(rows: Mapping[int, Block], asked: Sequence[int], columns: Sequence[str]) -> tuple[Piece, range] | None:
    """Give the piece in which ``asked`` lie, and all its rows; None where it is not one, or lacks some of its rows.

    rows: what the unit holds; columns: those that all the rows must have from the piece.
    """
    block = rows.get(asked[0])
    piece = None if block is None else block.cells.get(columns[0])
    if piece is None or piece.partial:
        return None
    every = range(piece.shift, piece.shift + len(piece.parcel.cells.sizes[columns[0]]))
    if len(every) > _MOST_ROWS or min(asked) < every.start or max(asked) >= every.stop:
        return None
    for block in set(map(rows.get, every)):
        if block is None or any(block.cells.get(name) is not piece for name in columns):
            return None
    return piece, every
