"""What a unit holds: rows, their admitted cells, and puts about which the controller has not yet decided.

A put is stored first, then announced, then decided. Until then its cells are neither old nor new: who asks for them
waits for the verdict.

A row is created together with a promise of room for its outputs, and only then; so whoever completes it gets through,
although the unit is full of rows that wait to be completed.

Invariants: every byte is in the budget from before it is stored until after it is freed; the budget promises, for each
row, what its creator named and nobody has written yet; a row has one cell a column; what was refused leaves nothing
behind.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
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
    outputs: Mapping[str, int]
    columns: dict[str, Cell] = field(default_factory=dict)
    partial: dict[str, Cell] = field(default_factory=dict)

    def awaits(self, column: str, size: int) -> bool:
        """Tell whether a cell of that size was promised and is not there yet."""
        return column not in self.columns and size <= self.outputs.get(column, 0)

    @property
    def promise(self) -> int:
        """Bytes that are kept for it."""
        return _promise(self.outputs, self.columns)


@dataclass(slots=True, eq=False)
class Put:
    """Cells that are stored and not yet decided about.

    cells: of each row, by column; outputs: promised to each new row; verdict: when it has come.
    """

    entry: Entry
    cells: dict[str, list[Cell]]
    outputs: Mapping[str, int]
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

    async def store_new(
        self, columns: Mapping[str, Jagged], *, outputs: Mapping[str, int], timeout: float
    ) -> tuple[dict[str, list[Cell]], Cells]:
        """Copy ``columns`` of new rows into the back end, as soon as there is room for them and their ``outputs``.

        Gives the cells and their description. outputs: most bytes of each column that a row gets later.
        """
        cells = self._cells(columns, lease="")
        promise = _promise(outputs, columns) * max(map(len, columns.values()), default=0)
        await self.budget.reserve(_size(cells), promise=promise, timeout=timeout)
        return cells, await self._put(columns, cells, promise=promise)

    async def store_outputs(
        self, columns: Mapping[str, Jagged], *, rows: Sequence[int], lease: str, partial: bool, timeout: float
    ) -> tuple[dict[str, list[Cell]], Cells]:
        """Copy ``columns`` of rows that are here into the back end: at once where they were promised, else in turn."""
        cells = self._cells(columns, lease=lease)
        promised = not partial and all(
            (row := self._rows.get(number)) is not None and row.awaits(name, cell.size)
            for name, of in cells.items()
            for number, cell in zip(rows, of, strict=True)
        )
        await (self.budget.draw if promised else self.budget.reserve)(_size(cells), timeout=timeout)
        return cells, await self._put(columns, cells)

    def _cells(self, columns: Mapping[str, Jagged], *, lease: str) -> dict[str, list[Cell]]:
        return {
            name: [Cell(next(self._numbers), column.row(i).nbytes, column.dtype, lease) for i in range(len(column))]
            for name, column in columns.items()
        }

    async def _put(self, columns: Mapping[str, Jagged], cells: dict[str, list[Cell]], *, promise: int = 0) -> Cells:
        try:
            await self._backend.put(
                (cell.number, columns[name].row(index)) for name, of in cells.items() for index, cell in enumerate(of)
            )
        except BaseException:
            await self._free((cell for of in cells.values() for cell in of), promise=promise)
            raise
        return Cells(
            dtypes={name: column.dtype for name, column in columns.items()},
            sizes={name: [cell.size for cell in of] for name, of in cells.items()},
        )

    def propose(self, entry: Entry, cells: dict[str, list[Cell]], *, outputs: Mapping[str, int]) -> Put:
        """Keep stored cells until the controller has decided about ``entry``."""
        put = Put(entry, cells, outputs, asyncio.get_running_loop().create_future())
        self.puts[put] = None
        return put

    async def decide(self, put: Put, verdict: Verdict, error: AsyncFlowError | None = None) -> None:
        """Make those rows of ``put`` that were admitted part of the holdings, free the others, tell who waits."""
        ok = verdict.ok or [False] * len(put.entry.rows)
        refused: list[Cell] = []
        void = 0
        for index, number in enumerate(put.entry.rows):
            cells = {name: of[index] for name, of in put.cells.items()}
            if ok[index]:
                replaced, kept = self._install(put, index, number, cells)
                refused += replaced
                void += kept
            else:
                refused += cells.values()
                void += _promise(put.outputs, cells)
        del self.puts[put]
        await self._free(refused, promise=void)
        if put.verdict.done():
            return
        if error is not None:
            put.verdict.set_exception(error)
            put.verdict.exception()
        else:
            put.verdict.set_result(ok)

    def _install(self, put: Put, index: int, number: int, cells: dict[str, Cell]) -> tuple[list[Cell], int]:
        """Give the cells that are not needed (replaced, or of a put that came twice) and the bytes of kept promises."""
        entry = put.entry
        if isinstance(entry, NewRows):
            meta = entry.metas[index]
            self._rows[number] = _Row(meta.tokens, dict(meta.tags), put.outputs, cells)
            return [], 0
        row = self._rows.get(number)
        if row is None or any(name in row.columns and row.columns[name].lease == cells[name].lease for name in cells):
            return list(cells.values()), 0
        promised = row.promise
        shelf, out = (row.partial, row.columns) if entry.reason else (row.columns, row.partial)
        if entry.reason:
            replaced = [cells.pop(name) for name in list(cells) if name in out]
        else:
            replaced = [out.pop(name) for name in cells if name in out]
            row.tags |= entry.tags[index] if entry.tags else {}
        replaced += [shelf[name] for name in cells if name in shelf]
        shelf.update(cells)
        return replaced, promised - row.promise

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
        await self._free(
            (cell for row in gone for cells in (row.columns, row.partial) for cell in cells.values()),
            promise=sum(row.promise for row in gone),
        )

    async def wipe(self) -> None:
        """Free everything: writers are fenced, creators may try again elsewhere."""
        await self.clear(list(self._rows))
        for put in list(self.puts):
            again = PeerLost("the unit was given up and began anew", where=self._where)
            await self.decide(put, Verdict([]), again if isinstance(put.entry, NewRows) else None)

    async def _free(self, cells: Iterable[Cell], *, promise: int = 0) -> None:
        freed = list(cells)
        await self._backend.free(cell.number for cell in freed)
        if freed or promise:
            self.budget.release(_size({"": freed}), promise=promise)


def _size(cells: Mapping[str, Sequence[Cell]]) -> int:
    return sum(cell.size for of in cells.values() for cell in of)


def _promise(outputs: Mapping[str, int], present: Container[str]) -> int:
    return sum(size for name, size in outputs.items() if name not in present)
