"""Rows of a unit that move to other units: which of them cannot be written to, and the batches in which they go.

Invariants: nothing is written to the rows of a move while it is under way; a row that is here, or comes here, is not
looked for elsewhere; the rows of a batch have the same columns in the same forms, and are promised the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from asyncflow.errors import Elsewhere
from asyncflow.identity import home_of
from asyncflow.queue.protocol.unit_calls import MovedRows
from asyncflow.queue.storage.holdings import Holdings
from asyncflow.rpc.columns import weighed_batches


class MovingRows:
    """Rows of a unit that are moving to others. location: returns that of the unit's own rows; where: its name."""

    def __init__(self, holdings: Holdings, *, location: Callable[[], int], where: str) -> None:
        self.draining = False
        self._holdings = holdings
        self._location = location
        self._where = where
        self._frozen: frozenset[int] = frozenset()
        self._thawed: asyncio.Future[None] | None = None

    def freeze(self, rows: Iterable[int]) -> None:
        """Block writes to ``rows``, and to no others, until ``thaw``."""
        self.thaw()
        self._frozen = frozenset(rows)
        self._thawed = asyncio.get_running_loop().create_future()

    def thaw(self) -> None:
        """Let the rows that are still here be written to again."""
        self._frozen = frozenset()
        if self._thawed is not None and not self._thawed.done():
            self._thawed.set_result(None)

    def blocks(self, rows: Sequence[int]) -> bool:
        """Return whether some of ``rows`` cannot be written to here now."""
        return not self._frozen.isdisjoint(rows) or bool(self._away(rows))

    async def writable(self, rows: Sequence[int]) -> None:
        """Wait until ``rows`` can be written to here. Raises Elsewhere where some lie on another unit."""
        while True:
            await self.readable(rows)
            if self._thawed is None or self._frozen.isdisjoint(rows):
                return
            await asyncio.wait([self._thawed])

    async def readable(self, rows: Sequence[int]) -> None:
        """Wait until those of ``rows`` that come here have come. Raises Elsewhere where some lie on another unit."""
        while away := self._away(rows):
            coming = [
                put.result
                for put in self._holdings.puts
                if isinstance(put.entry, MovedRows) and not away.isdisjoint(put.rows)
            ]
            if not coming:
                hint = "The controller knows where they lie"
                raise Elsewhere(f"{len(away)} of {len(rows)} rows do not lie here", where=self._where, hint=hint)
            await asyncio.wait([coming[-1]])

    def _away(self, rows: Sequence[int]) -> set[int]:
        """Return the rows that may be elsewhere; one that was put here and never moved is here, or gone for good."""
        here = self._holdings.rows
        if all(map(here.__contains__, rows)):
            return set()
        own = self._location()
        return {row for row in rows if (self.draining or home_of(row) != own) and row not in here}

    def first(self, *, most: int, most_bytes: int) -> tuple[list[int], int]:
        """Return the first rows that are here, no more than said unless that is none, and their bytes."""
        rows = next(weighed_batches(self._holdings.rows, self._size, heaviest=most_bytes, most=most), [])
        return rows, sum(map(self._size, rows))

    def batches(self, rows: Iterable[int], *, most_bytes: int) -> list[list[int]]:
        """Return those of ``rows`` that are here, in batches of at most so many bytes, or of one row."""
        alike: dict[object, list[int]] = {}
        for number in rows:
            if (row := self._holdings.rows.get(number)) is not None:
                forms = [(name, row.has(name), part.blob.cells.dtypes[name]) for name, part in row.cells.items()]
                alike.setdefault((frozenset(forms), frozenset(row.outputs.items())), []).append(number)
        return [
            batch for numbers in alike.values() for batch in weighed_batches(numbers, self._size, heaviest=most_bytes)
        ]

    def _size(self, row: int) -> int:
        return self._holdings.rows[row].size
