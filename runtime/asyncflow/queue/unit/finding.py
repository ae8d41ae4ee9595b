"""What a fetch asks for, and where it lies.

Invariants: a fetch names each row once, and no more than goes in one message; what it asks beyond that, or that is not
there, is refused before a byte of it is touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from asyncflow.errors import ProtocolError, Refused, StaleHandle
from asyncflow.queue.backends.base import Place
from asyncflow.queue.unit.blocks import Block, Run, stretches, together

Found: TypeAlias = list[tuple[list[Place], list[str]]]
"""Where cells lie: columns that lie at the same places together."""


class Finder(NamedTuple):
    """Finds cells in a unit. where: its name; most: bytes that go in one answer."""

    where: str
    most: int

    def check(self, rows: Sequence[int]) -> None:
        """Refuse to look for a row more than once."""
        if not isinstance(rows, range) and (different := len(set(rows))) < len(rows):
            what = f"a fetch names {len(rows)} rows, of which {different} differ"
            raise ProtocolError(what, where=self.where, hint="Name each row once")

    def find(self, held: Mapping[int, Block], rows: Sequence[int], columns: Sequence[str], *, used: int) -> Found:
        """Return where ``columns`` of ``rows`` lie. held: the rows that are here; used: bytes of all their cells.

        Raises StaleHandle for what is not there, Refused for what is too much at once.
        """
        if not rows:
            raise ProtocolError("a fetch names no row", where=self.where)
        blocks = list(map(held.get, rows))
        runs = []
        for start, stop in stretches(rows, blocks):
            block = blocks[start]
            if block is None:
                hint = "It was cleared, or lost with the unit's earlier incarnation"
                raise StaleHandle(f"row {rows[start]} is not here", where=self.where, hint=hint)
            runs.append(Run(block, rows[start], stop - start))
        try:
            found = together(runs, columns)
        except KeyError as missing:
            (column,) = missing.args
            row, cells = next((run.first, run.block.cells) for run in runs if column not in run.block.cells)
            hint = f"It has {', '.join(sorted(cells))}"
            raise StaleHandle(f"row {row} has no column {column!r}", where=self.where, hint=hint) from None
        if used > self.most and (size := _size(runs, columns)) > self.most:
            hint = f"Fetch fewer rows at a time: at most {self.most} bytes come from a unit at once"
            raise Refused(f"{size} bytes were asked for, of {len(rows)} rows", where=self.where, hint=hint)
        return found


def _size(runs: Sequence[Run], columns: Sequence[str]) -> int:
    return sum([block.cells[name].size((name,), first, rows) for block, first, rows in runs for name in columns])
