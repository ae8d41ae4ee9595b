"""Parcels that were lent whole: who holds some of their rows need not ask for the others.

A parcel is *shown* by marks in the shared memory where its columns lie. Whoever was lent them looks at a mark before it
uses them again, and sees at once when it was taken back.

Invariants: a parcel is shown only as long as all its cells are those that a fetch would give; one that was hidden is
never shown again.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence

from asyncflow.net.arena.lending import take_back
from asyncflow.net.arena.loans import hide, show
from asyncflow.net.frames import LARGE, Array, Jagged
from asyncflow.queue.backends.base import Backend
from asyncflow.queue.unit.blocks import Block
from asyncflow.queue.unit.pieces import Parcel, Piece, Put

_MOST_ROWS = 1024


class Shown:
    """The parcels that are shown, and their large columns. backend: where they lie."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._ended = False
        self._columns: dict[Parcel, dict[str, Array]] = {}
        self._hidden: weakref.WeakSet[Parcel] = weakref.WeakSet()

    async def parcel(
        self, held: Mapping[int, Block], rows: Sequence[int], columns: Sequence[str], puts: Collection[Put]
    ) -> tuple[dict[str, Jagged], int] | None:
        """Show the parcel where ``rows`` lie; give these columns of all its rows, and the first of them.

        held: all rows; puts: those that are not decided. None where the parcel cannot be shown.
        """
        found = _whole(held, rows, columns) if rows and columns and not self._ended else None
        if found is None or found[0].parcel in self._hidden:
            return None
        piece, every = found
        if puts and any(put.touches(frozenset(every), columns) for put in puts):
            return None
        if not self._backend.immediate:
            return None
        got = await self._backend.get([piece.place(every.start, len(every))], columns)
        large = {name: column.values for name, column in got.items() if column.values.nbytes >= LARGE}
        if not large or not show(*large.values()):
            return None
        self._columns.setdefault(piece.parcel, {}).update(large)
        return got, every.start

    def hide(self, parcels: Iterable[Parcel]) -> None:
        """Show these parcels no more, since some of their rows are freed or change."""
        take_back()
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

    def end(self) -> None:
        """Show none from now on."""
        self._ended = True
        self.hide(list(self._columns))


def _whole(rows: Mapping[int, Block], asked: Sequence[int], columns: Sequence[str]) -> tuple[Piece, range] | None:
    """Give the piece in which ``asked`` lie, and all its rows; None where it is not one, or lacks some of its rows.

    rows: what the unit holds; columns: those that all the rows must have from the piece.
    """
    block = rows.get(asked[0])
    piece = None if block is None else block.cells.get(columns[0])
    if piece is None or piece.partial:
        return None
    every = range(piece.shift, piece.shift + piece.parcel.rows)
    if len(every) > _MOST_ROWS or min(asked) < every.start or max(asked) >= every.stop:
        return None
    for block in set(map(rows.get, every)):
        if block is None or any(block.cells.get(name) is not piece for name in columns):
            return None
    return piece, every
