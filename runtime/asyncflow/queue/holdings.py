"""What a unit holds: rows, their admitted cells, and puts about which the controller has not yet decided.

A put is stored first, then announced, then decided. Until then its cells are neither old nor new: who asks for them
waits for the verdict.

Invariants: every byte is in the budget from before it is stored until after it is freed; a row has one cell a column;
what was refused leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncflow.errors import AsyncFlowError, PeerLost, StaleHandle
from asyncflow.net.frames import Jagged
from asyncflow.queue.backends.base import Backend
from asyncflow.queue.budget import Budget
from asyncflow.queue.messages import Tag
from asyncflow.queue.table import Cells, Held
from asyncflow.queue.unit_calls import Entry, NewRows, Verdict


class Cell(NamedTuple):
    """An array in the back end: its number, bytes, dtype (a name in ``frames.DTYPES``), and the lease that wrote it."""

    number: int
    size: int
    dtype: str
    lease: str


@dataclass(slots=True)
class _Row:
    tokens: int
    tags: dict[str, Tag]
    columns: dict[str, Cell] = field(default_factory=dict)
    partial: dict[str, Cell] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Put:
    """Cells that are stored and not yet decided about. cells: of each row, by column; verdict: when it has come."""

    entry: Entry
    cells: dict[str, list[Cell]]
    verdict: asyncio.Future[list[bool]]

    def touches(self, rows: frozenset[int], columns: Sequence[str]) -> bool:
        """Tell whether one of these cells may change by it."""
        return any(column in self.cells for column in columns) and not rows.isdisjoint(self.entry.rows)


class Holdings:
    """The rows of a unit."""

    def __init__(self, *, backend: Backend, budget: Budget, where: str) -> None:
        self.budget = budget
        self.puts: dict[Put, None] = {}
        self._rows: dict[int, _Row] = {}
        self._backend = backend
        self._where = where
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    async def store(
        self, columns: Mapping[str, Jagged], *, lease: str, timeout: float
    ) -> tuple[dict[str, list[Cell]], Cells]:
        """Copy ``columns`` into the back end, as soon as there is room; give the cells and their description."""
        cells = {
            name: [Cell(next(self._numbers), column.row(i).nbytes, column.dtype, lease) for i in range(len(column))]
            for name, column in columns.items()
        }
        size = sum(cell.size for of in cells.values() for cell in of)
        await self.budget.reserve(size, timeout=timeout)
        try:
            await self._backend.put(
                (cell.number, columns[name].row(index)) for name, of in cells.items() for index, cell in enumerate(of)
            )
        except BaseException:
            await self._free(cell for of in cells.values() for cell in of)
            raise
        told = Cells(
            dtypes={name: column.dtype for name, column in columns.items()},
            sizes={name: [cell.size for cell in of] for name, of in cells.items()},
        )
        return cells, told

    def propose(self, entry: Entry, cells: dict[str, list[Cell]]) -> Put:
        """Keep stored cells until the controller has decided about ``entry``."""
        put = Put(entry, cells, asyncio.get_running_loop().create_future())
        self.puts[put] = None
        return put

    async def decide(self, put: Put, verdict: Verdict, error: AsyncFlowError | None = None) -> None:
        """Make those rows of ``put`` that were admitted part of the holdings, free the others, tell who waits."""
        ok = verdict.ok or [False] * len(put.entry.rows)
        refused: list[Cell] = []
        for index, number in enumerate(put.entry.rows):
            cells = {name: of[index] for name, of in put.cells.items()}
            if ok[index]:
                refused += self._install(put.entry, index, number, cells)
            else:
                refused += cells.values()
        del self.puts[put]
        await self._free(refused)
        if put.verdict.done():
            return
        if error is not None:
            put.verdict.set_exception(error)
            put.verdict.exception()
        else:
            put.verdict.set_result(ok)

    def _install(self, entry: Entry, index: int, number: int, cells: dict[str, Cell]) -> list[Cell]:
        """Give the cells that are not needed: replaced ones, and all new ones where the same put came twice."""
        if isinstance(entry, NewRows):
            meta = entry.metas[index]
            self._rows[number] = _Row(meta.tokens, dict(meta.tags), cells)
            return []
        row = self._rows.get(number)
        if row is None or any(name in row.columns and row.columns[name].lease == cells[name].lease for name in cells):
            return list(cells.values())
        shelf, out = (row.partial, row.columns) if entry.reason else (row.columns, row.partial)
        if entry.reason:
            replaced = [cells.pop(name) for name in list(cells) if name in out]
        else:
            replaced = [out.pop(name) for name in cells if name in out]
            row.tags |= entry.tags[index] if entry.tags else {}
        replaced += [shelf[name] for name in cells if name in shelf]
        shelf.update(cells)
        return replaced

    async def fetch(self, rows: Sequence[int], columns: Sequence[str]) -> dict[str, Jagged]:
        """Give ``columns`` of ``rows``, in that order. Raises StaleHandle for what is not there."""
        asked = frozenset(rows)
        while pending := [put.verdict for put in self.puts if put.touches(asked, columns)]:
            await asyncio.wait(pending)
        found = {name: [self._cell(number, name) for number in rows] for name in columns}
        out = {}
        for name, cells in found.items():
            arrays = await self._backend.get([cell.number for cell in cells])
            out[name] = Jagged.from_rows(arrays, cells[0].dtype)
        return out

    def _cell(self, number: int, column: str) -> Cell:
        row = self._rows.get(number)
        if row is None:
            hint = "It was cleared, or lost with the unit's earlier incarnation"
            raise StaleHandle(f"row {number} is not here", where=self._where, hint=hint)
        cell = row.columns.get(column) or row.partial.get(column)
        if cell is None:
            has = ", ".join(sorted({*row.columns, *row.partial}))
            raise StaleHandle(f"row {number} has no column {column!r}", where=self._where, hint=f"It has {has}")
        return cell

    def held(self) -> Iterable[Held]:
        """Describe all rows."""
        for number, row in self._rows.items():
            yield Held(
                row=number,
                columns={name: cell.size for name, cell in row.columns.items()},
                partial={name: cell.size for name, cell in row.partial.items()},
                tokens=row.tokens,
                tags=row.tags,
            )

    async def clear(self, rows: Iterable[int]) -> None:
        """Free rows; those that are not here are passed over."""
        gone = [row for number in rows if (row := self._rows.pop(number, None)) is not None]
        await self._free(cell for row in gone for cells in (row.columns, row.partial) for cell in cells.values())

    async def wipe(self) -> None:
        """Free everything: writers are fenced, creators may try again elsewhere."""
        await self.clear(list(self._rows))
        for put in list(self.puts):
            again = PeerLost("the unit was given up and began anew", where=self._where)
            await self.decide(put, Verdict([]), again if isinstance(put.entry, NewRows) else None)

    async def _free(self, cells: Iterable[Cell]) -> None:
        freed = list(cells)
        await self._backend.free(cell.number for cell in freed)
        if freed:
            self.budget.release(sum(cell.size for cell in freed))
