"""Rows that move between units: whether rows are at this unit, and the batches in which they leave it.

Invariants: nothing is written to the rows of a move in progress. A row that is here is not looked for elsewhere. The
rows of a batch have the same columns in the same forms, and the same promises of room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from asyncflow.errors import WrongUnit
from asyncflow.identity import location_of
from asyncflow.queue.storage.holdings import Holdings
from asyncflow.rpc.columns import weighed_batches


class MovingRows:
    """Rows of a unit that are moving to other units.

    location: returns the location of the unit's own rows; where: the unit's name; draining: no new rows are accepted;
    frozen: rows of the current move.
    """

    def __init__(self, holdings: Holdings, *, location: Callable[[], int], where: str) -> None:
        self.draining = False
        self.frozen: frozenset[int] = frozenset()
        self._holdings = holdings
        self._location = location
        self._where = where

    def check(self, rows: Sequence[int], *, write: bool = False) -> None:
        """Raise WrongUnit if some of ``rows`` are on another unit, or are moving to or from this one."""
        if away := self.away(rows, write=write):
            hint = "The controller knows their location"
            raise WrongUnit(f"{len(away)} of {len(rows)} rows are not on this unit", where=self._where, hint=hint)

    def away(self, rows: Sequence[int], *, write: bool = False) -> list[int]:
        """Return the rows that may be elsewhere and, for a write, those that are moving away.

        A row that was put here and never moved is here or permanently lost.
        """
        here, own = self._holdings.rows, self._location()
        return [
            row
            for row in rows
            if (row not in here and (self.draining or location_of(row) != own)) or (write and row in self.frozen)
        ]

    def first(self, *, most: int, most_bytes: int) -> tuple[list[int], int]:
        """Return the first rows that are here, within both limits but at least one, and their bytes."""
        rows = next(weighed_batches(self._holdings.rows, self._size, heaviest=most_bytes, most=most), [])
        return rows, sum(map(self._size, rows))

    def batches(self, rows: Iterable[int], *, most_bytes: int) -> list[list[int]]:
        """Return those of ``rows`` that are here, in batches of at most ``most_bytes`` bytes, or of one row."""
        by_form: dict[object, list[int]] = {}
        for number in rows:
            if (row := self._holdings.rows.get(number)) is not None:
                forms = [(name, row.has(name), part.blob.cells.dtypes[name]) for name, part in row.cells.items()]
                by_form.setdefault((frozenset(forms), frozenset(row.outputs.items())), []).append(number)
        return [
            batch for numbers in by_form.values() for batch in weighed_batches(numbers, self._size, heaviest=most_bytes)
        ]

    def _size(self, row: int) -> int:
        return self._holdings.rows[row].size
