"""Rows that a unit holds, by *block*: rows that came together and were written together, so that one record says of all
of them what they consist of and what was promised to them.

A write gives its rows a block of their own; so rows written one by one have one each, and what is done to many rows of
one put, as nearly everything is, costs what it costs for one.

Invariants: a block never changes, but is replaced for some of its rows; a row has one cell a column; what is whole is
never replaced by what is unfinished.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from asyncflow.queue.backends.base import Place
from asyncflow.queue.protocol.messages import Tag
from asyncflow.queue.protocol.sizes import part
from asyncflow.queue.protocol.unit_calls import Entry, MovedRows, NewRows
from asyncflow.queue.unit.pieces import Parcel, Part, Piece, Put

Tags = dict[str, Tag]


class Block:
    """What rows consist of. entry: with which they came; shift: the id of a row less its index there.

    outputs: most bytes of each column that is written to each of them later; promise: those that are kept for it;
    cells: the piece from which they have each column; layers: the columns that they have from each piece; tags: of
    those rows to which some were written.
    """

    __slots__ = ("_entry", "_shift", "_tags", "cells", "layers", "outputs", "promise")

    def __init__(
        self,
        entry: Entry,
        shift: int,
        outputs: Mapping[str, int],
        cells: Mapping[str, Piece],
        layers: Mapping[Piece, tuple[str, ...]],
        tags: Mapping[int, Tags],
    ) -> None:
        self.cells = cells
        self.layers = layers
        self.outputs = outputs
        self.promise = promised(outputs, cells) if outputs else 0
        self._entry = entry
        self._shift = shift
        self._tags = tags

    @classmethod
    def new(cls, put: Put, shift: int) -> Block:
        """Make that of rows that ``put`` brought."""
        parcel = put.parcel
        whole = Piece(parcel, shift)
        if not parcel.partial:
            cells = dict.fromkeys(parcel.columns, whole)
            return cls(put.entry, shift, put.outputs, cells, {whole: parcel.columns}, {})
        partial = Piece(parcel, shift, partial=True)
        cells = dict.fromkeys(parcel.columns, whole) | dict.fromkeys(parcel.partial, partial)
        return cls(put.entry, shift, put.outputs, cells, _layers(cells), {})

    def awaits(self, column: str, size: int) -> bool:
        """Tell whether a cell of up to so many bytes was promised to each row and is not there yet."""
        return size <= self.outputs.get(column, 0) and not self._has(column)

    def has_from(self, parcel: Parcel) -> bool:
        """Tell whether the writer of ``parcel`` has written one of its columns before."""
        for piece, columns in self.layers.items():
            if piece.parcel.lease == parcel.lease and not piece.partial and not set(columns).isdisjoint(parcel.columns):
                return True
        return False

    def written(self, piece: Piece, rows: range, tags: Sequence[Tags]) -> tuple[Block, list[Part]]:
        """Return what ``rows`` become by a write, and what is not needed then: what it replaces, or some of itself."""
        cells = dict(self.cells)
        replaced: dict[str, Piece] = {}
        new = piece.parcel.columns
        for name in new:
            old = cells.get(name)
            if old is None:
                cells[name] = piece
            elif piece.partial and not old.partial:
                replaced[name] = piece
            else:
                cells[name], replaced[name] = piece, old
        layers = {**self.layers, piece: new} if new and not replaced else _layers(cells)
        own = {row: self._tags[row] for row in rows if row in self._tags} if self._tags else self._tags
        if tags:
            own = {row: self.tags(row) | added for row, added in zip(rows, tags, strict=True)}
        dropped = [(old, names, rows[0], len(rows)) for old, names in _layers(replaced).items()]
        return Block(self._entry, self._shift, self.outputs, cells, layers, own), dropped

    def parts(self, first: int, rows: int) -> list[Part]:
        """Return all that so many rows from ``first`` on consist of."""
        return [(piece, columns, first, rows) for piece, columns in self.layers.items()]

    def sizes(self, row: int, *, partial: bool) -> dict[str, int]:
        """Bytes of the cells of a row, by column: of those that are unfinished, or of the whole ones."""
        cells = [(name, piece) for name, piece in self.cells.items() if piece.partial is partial]
        return {name: part(piece.parcel.cells.sizes[name], row - piece.shift, 1)[0] for name, piece in cells}

    def size(self, row: int) -> int:
        """Bytes of the cells of a row."""
        return sum([piece.size(columns, row, 1) for piece, columns in self.layers.items()])

    def tokens(self, row: int) -> int:
        """Tokens of a row."""
        entry, index = self._entry, row - self._shift
        if isinstance(entry, NewRows):
            return entry.metas[index].tokens
        return entry.tokens[index] if isinstance(entry, MovedRows) else 0

    def tags(self, row: int) -> Tags:
        """Tags of a row."""
        if (own := self._tags.get(row)) is not None:
            return own
        entry, index = self._entry, row - self._shift
        if isinstance(entry, NewRows):
            return entry.metas[index].tags
        return entry.tags[index] if entry.tags else {}

    def _has(self, column: str) -> bool:
        piece = self.cells.get(column)
        return piece is not None and not piece.partial


def promised(outputs: Mapping[str, int], cells: Mapping[str, Piece]) -> int:
    """Return the bytes of the ``outputs`` of one row that are not there yet."""
    return sum(size for name, size in outputs.items() if (piece := cells.get(name)) is None or piece.partial)


def _layers(cells: Mapping[str, Piece]) -> dict[Piece, tuple[str, ...]]:
    layers: dict[Piece, list[str]] = {}
    for name, piece in cells.items():
        layers.setdefault(piece, []).append(name)
    return {piece: tuple(names) for piece, names in layers.items()}


class Run(NamedTuple):
    """So many rows of a block, from ``first`` on."""

    block: Block
    first: int
    rows: int


def stretches(rows: Sequence[int], alike: Sequence[object]) -> list[tuple[int, int]]:
    """Return start and stop of each part of ``rows`` that follow one another and share one object in ``alike``."""
    count = len(rows)
    if count < 2:
        return [(0, count)] if count else []
    run = range(rows[0], rows[0] + count)
    if rows[-1] == run[-1] and alike.count(alike[0]) == count and (rows == run or list(rows) == list(run)):
        return [(0, count)]
    cuts = [i for i in range(1, count) if alike[i] is not alike[i - 1] or rows[i] != rows[i - 1] + 1]
    return list(pairwise([0, *cuts, count]))


def together(runs: Sequence[Run], columns: Sequence[str]) -> list[tuple[list[Place], list[str]]]:
    """Return where the cells of ``runs`` lie, columns that lie at the same places together. KeyError: not there."""
    if len(runs) == 1:
        ((block, first, rows),) = runs
        of: dict[Piece, list[str]] = {}
        for name in columns:
            of.setdefault(block.cells[name], []).append(name)
        return [([piece.place(first, rows)], names) for piece, names in of.items()]
    found = [[run.block.cells[name] for name in columns] for run in runs]
    alike: dict[tuple[Piece, ...], list[str]] = {}
    for name, pieces in zip(columns, zip(*found, strict=True), strict=True):
        alike.setdefault(pieces, []).append(name)
    return [
        ([piece.place(first, rows) for piece, (_, first, rows) in zip(pieces, runs, strict=True)], names)
        for pieces, names in alike.items()
    ]
