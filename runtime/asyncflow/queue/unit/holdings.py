"""What a unit holds: rows, their admitted cells, and puts about which the controller has not yet decided.

The cells of one put are a *parcel* in the back end; a row is made of *pieces*, each some columns of its place in a
parcel. A put is stored first, then announced, then decided. Until then its cells are neither old nor new: who asks for
them waits for the verdict.

A row is created together with a promise of room for its outputs, and only then; so whoever completes it gets through,
although the unit is full of rows that wait to be completed.

Invariants: every byte is in the budget from before it is stored until after it is freed; the budget promises, for each
row, what its creator named and nobody has written yet; a row has one cell a column; what was refused leaves nothing
behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice

from asyncflow.errors import AsyncFlowError, PeerLost, ProtocolError, StaleHandle
from asyncflow.net.eager import begin
from asyncflow.net.jagged import Jagged
from asyncflow.net.later import Later
from asyncflow.queue.backends.base import Backend, BytesLost, Place
from asyncflow.queue.protocol.shard_calls import controller_of
from asyncflow.queue.protocol.unit_calls import Cells, Entry, Held, MovedRows, NewCells, NewRows, Verdict
from asyncflow.queue.unit.budget import Budget
from asyncflow.queue.unit.pieces import HeldRow, Parcel, Piece, Put, promised


class Holdings:
    """The rows of a unit. lost: told of those whose cells the store has lost."""

    def __init__(self, *, backend: Backend, budget: Budget, where: str, lost: Callable[[list[int]], None]) -> None:
        self.budget = budget
        self.puts: dict[Put, None] = {}
        self._lost = lost
        self._rows: dict[int, HeldRow] = {}
        self._backend = backend
        self._where = where
        self._numbers = itertools.count(1)
        self._freeing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    @property
    def rows(self) -> Mapping[int, HeldRow]:
        """What is here, by row."""
        return self._rows

    async def store_new(
        self,
        columns: Mapping[str, Jagged],
        *,
        rows: int,
        outputs: Mapping[str, int],
        partial: Collection[str] = (),
        producer: str,
        timeout: float,
    ) -> Parcel:
        """Store ``columns`` of ``rows`` new rows, in the producer's turn, when there is room for them and outputs.

        outputs: most bytes of each column that a row gets later; partial: columns that are unfinished.
        """
        parcel = Parcel(next(self._numbers), columns, partial=partial)
        promise = promised(outputs, parcel.whole) * rows
        await self.budget.reserve(parcel.size, promise=promise, timeout=timeout, producer=producer)
        return await self._put(parcel, columns, promise=promise)

    async def store_outputs(
        self,
        columns: Mapping[str, Jagged],
        *,
        rows: Sequence[int],
        lease: str,
        partial: bool,
        producer: str,
        timeout: float,
    ) -> Parcel:
        """Store ``columns`` of rows that are here: at once where they were promised, else in the producer's turn."""
        parcel = Parcel(next(self._numbers), columns, lease=lease)
        if not partial and self._promised(rows, parcel.cells):
            await self.budget.draw(parcel.size, timeout=timeout)
        else:
            await self.budget.reserve(parcel.size, timeout=timeout, producer=producer)
        return await self._put(parcel, columns)

    def _promised(self, rows: Sequence[int], cells: Cells) -> bool:
        held = [self._rows.get(number) for number in rows]
        return all(
            row is not None and row.awaits(name, size)
            for name, sizes in cells.sizes.items()
            for row, size in zip(held, sizes, strict=True)
        )

    async def _put(self, parcel: Parcel, columns: Mapping[str, Jagged], *, promise: int = 0) -> Parcel:
        try:
            if parcel.columns:
                await self._backend.put(parcel.number, columns)
        except BaseException:
            self.budget.release(parcel.size, promise=promise)
            raise
        return parcel

    def propose(self, entry: Entry, parcel: Parcel, *, outputs: Mapping[str, int]) -> Put:
        """Keep what was stored until the controller has decided about ``entry``."""
        put = Put(entry, parcel, outputs, Later(), controller_of(parcel.lease))
        self.puts[put] = None
        return put

    def decide(self, put: Put, verdict: Verdict, error: AsyncFlowError | None = None) -> None:
        """Make those rows of ``put`` that were admitted part of the holdings, free the others, tell who waits."""
        ok = verdict.ok or [False] * len(put.entry.rows)
        refused: list[Piece] = []
        void = 0
        promise = promised(put.outputs, put.parcel.whole)
        for index, number in enumerate(put.entry.rows):
            piece = Piece(Place(put.parcel.number, index), put.parcel, put.parcel.columns)
            if not ok[index]:
                refused.append(piece)
                void += promise
            elif isinstance(put.entry, NewCells):
                void += self._write(number, piece, put.entry, index, refused)
            elif isinstance(put.entry, MovedRows) and (number in self._rows or self._comes_again(put, number)):
                refused.append(piece)
                void += promise
            else:
                self._rows[number] = _new_row(put, index, piece)
        del self.puts[put]
        self._free(refused, promise=void)
        if put.verdict.done():
            return
        if error is not None:
            put.verdict.set_exception(error)
        else:
            put.verdict.set_result(Verdict(ok, rows=verdict.rows))

    def _comes_again(self, put: Put, number: int) -> bool:
        """Tell whether a row was sent here once more after ``put``, which then is not what the controller meant."""
        later = itertools.dropwhile(lambda other: other is not put, self.puts)
        return any(
            isinstance(other.entry, MovedRows) and number in other.entry.rows for other in islice(later, 1, None)
        )

    def discard(self, parcel: Parcel, rows: int) -> None:
        """Free what was stored and is not proposed."""
        self._free([Piece(Place(parcel.number, index), parcel, parcel.columns) for index in range(rows)])

    def _write(self, number: int, piece: Piece, entry: NewCells, index: int, refused: list[Piece]) -> int:
        """Make a piece part of a row; give the bytes of kept promises, and to ``refused`` what is not needed.

        That is what it replaces, or itself where the row is gone or the same put came before.
        """
        row = self._rows.get(number)
        if row is None or row.has_from(piece):
            refused.append(piece)
            return 0
        before = row.promise
        if entry.reason:
            refused += row.keep(piece)
        else:
            refused += row.complete(piece)
            row.tags |= entry.tags[index] if entry.tags else {}
        return before - row.promise

    async def fetch(self, rows: Sequence[int], columns: Sequence[str]) -> dict[str, Jagged]:
        """Give ``columns`` of ``rows``, in that order. Raises StaleHandle for what is not there."""
        if not rows:
            raise ProtocolError("a fetch names no row", where=self._where)
        asked = frozenset(rows)
        while pending := [put.verdict for put in self.puts if put.touches(asked, columns)]:
            with contextlib.suppress(AsyncFlowError):
                await pending[-1]
        got: dict[str, Jagged] = {}
        for places, names in self._together(rows, columns):
            try:
                got |= await self._backend.get(places, names)
            except BytesLost as gone:
                raise self._lose(gone) from gone
        return {name: got[name] for name in columns}

    def _together(self, rows: Sequence[int], columns: Sequence[str]) -> list[tuple[list[Place], list[str]]]:
        """Give where the cells lie, columns that lie at the same places together."""
        found = [self._row(number) for number in rows]
        if all(len(row.whole) == 1 and not row.partial for row in found):
            pieces = [row.whole[0] for row in found]
            if all(set(columns).issubset(there) for there in {piece.columns for piece in pieces}):
                return [([piece.place for piece in pieces], list(columns))]
        together: list[tuple[list[Place], list[str]]] = []
        for name in columns:
            places = [self._place(number, row, name) for number, row in zip(rows, found, strict=True)]
            alike = next((names for known, names in together if known == places), None)
            if alike is None:
                together.append((places, [name]))
            else:
                alike.append(name)
        return together

    def _lose(self, gone: BytesLost) -> StaleHandle:
        """Give up the rows whose cells the store has lost, whoever asked for them; give the error for who did."""
        there = frozenset(gone.places)
        lost = [number for number, row in self._rows.items() if not there.isdisjoint(row.places)]
        self.clear(lost)
        self._lost(lost)
        hint = "The samples will be created again"
        return StaleHandle(f"the store has lost {len(lost)} rows", where=self._where, hint=hint)

    def _row(self, number: int) -> HeldRow:
        row = self._rows.get(number)
        if row is None:
            hint = "It was cleared, or lost with the unit's earlier incarnation"
            raise StaleHandle(f"row {number} is not here", where=self._where, hint=hint)
        return row

    def _place(self, number: int, row: HeldRow, column: str) -> Place:
        piece = row.piece(column)
        if piece is None:
            has = ", ".join(sorted({name for piece in (*row.whole, *row.partial) for name in piece.columns}))
            raise StaleHandle(f"row {number} has no column {column!r}", where=self._where, hint=f"It has {has}")
        return piece.place

    def held(self) -> Iterable[Held]:
        """Describe all rows."""
        for number, row in self._rows.items():
            yield Held(
                row=number,
                columns={name: piece.size(name) for piece in row.whole for name in piece.columns},
                partial={name: piece.size(name) for piece in row.partial for name in piece.columns},
                tokens=row.tokens,
                tags=row.tags,
            )

    def clear(self, rows: Iterable[int]) -> None:
        """Free rows; those that are not here are passed over."""
        gone = [row for number in rows if (row := self._rows.pop(number, None)) is not None]
        pieces = [piece for row in gone for pieces in (row.whole, row.partial) for piece in pieces]
        self._free(pieces, promise=sum(row.promise for row in gone))

    def wipe(self) -> None:
        """Free everything: writers are fenced, creators may try again elsewhere."""
        self.clear(list(self._rows))
        for put in list(self.puts):
            again = PeerLost("the unit was given up and began anew", where=self._where)
            self.decide(put, Verdict([]), None if isinstance(put.entry, NewCells) else again)

    def _free(self, pieces: Sequence[Piece], *, promise: int = 0) -> None:
        """Give back promises now, and bytes when the store has let go of them."""
        if promise:
            self.budget.release(0, promise=promise)
        by_columns: dict[tuple[str, ...], list[Place]] = {}
        for piece in pieces:
            if piece.columns:
                by_columns.setdefault(piece.columns, []).append(piece.place)
        if not by_columns:
            return
        work = self._let_go(by_columns, sum(piece.size(name) for piece in pieces for name in piece.columns))
        freeing = begin(work) if self._backend.immediate else asyncio.create_task(work, name="free")
        if freeing is not None:
            self._freeing.add(freeing)
            freeing.add_done_callback(self._freeing.discard)

    async def _let_go(self, by_columns: Mapping[tuple[str, ...], Sequence[Place]], size: int) -> None:
        try:
            for columns, places in by_columns.items():
                await self._backend.free(places, columns)
        finally:
            self.budget.release(size)


def _new_row(put: Put, index: int, piece: Piece) -> HeldRow:
    entry = put.entry
    if isinstance(entry, MovedRows):
        whole = [piece._replace(columns=piece.parcel.whole)] if piece.parcel.whole else []
        partial = [piece._replace(columns=tuple(entry.partial))] if entry.partial else []
        return HeldRow(entry.tokens[index], dict(entry.tags[index]), put.outputs, whole, partial)
    if isinstance(entry, NewRows):
        meta = entry.metas[index]
        return HeldRow(meta.tokens, dict(meta.tags), put.outputs, [piece])
    return HeldRow(0, dict(entry.tags[index]) if entry.tags else {}, put.outputs, [piece])
