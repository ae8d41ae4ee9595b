"""What a unit holds: rows, their admitted cells, and puts about which the controller has not yet decided.

The cells of one put are a *parcel* in the back end; what rows consist of is said by their *block*. A put is stored
first, then announced, then decided. Until then its cells are neither old nor new: who asks for them waits for the
verdict.

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

from asyncflow.errors import AsyncFlowError, PeerLost, StaleHandle
from asyncflow.net.eager import begin
from asyncflow.net.jagged import Jagged
from asyncflow.net.later import Later
from asyncflow.net.rpc.wire import MAX_MESSAGE
from asyncflow.queue.backends.base import Backend, BytesLost, Place
from asyncflow.queue.protocol.runs import expand
from asyncflow.queue.protocol.shard_calls import controller_of
from asyncflow.queue.protocol.sizes import part
from asyncflow.queue.protocol.unit_calls import Cells, Entry, Held, MovedRows, NewCells, Verdict
from asyncflow.queue.unit.blocks import Block, stretches
from asyncflow.queue.unit.budget import Budget
from asyncflow.queue.unit.finding import Finder
from asyncflow.queue.unit.pieces import Parcel, Part, Piece, Put


class Holdings:
    """The rows of a unit. lost: told of those whose cells the store has lost; most: bytes that a fetch may give."""

    def __init__(
        self,
        *,
        backend: Backend,
        budget: Budget,
        where: str,
        lost: Callable[[list[int]], None],
        most: int = MAX_MESSAGE,
    ) -> None:
        self.budget = budget
        self.puts: dict[Put, None] = {}
        self._lost = lost
        self._rows: dict[int, Block] = {}
        self._backend = backend
        self._where = where
        self._finder = Finder(where, most)
        self._numbers = itertools.count(1)
        self._freeing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    @property
    def rows(self) -> Mapping[int, Block]:
        """What is here: the block of each row."""
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
        promise = sum(size for name, size in outputs.items() if name not in parcel.whole) * rows
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
        blocks = list(map(self._rows.get, rows))
        for start, stop in stretches(rows, blocks):
            if (block := blocks[start]) is None:
                return False
            for name, sizes in cells.sizes.items():
                if not block.awaits(name, max(part(sizes, start, stop - start))):
                    return False
        return True

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
        put = Put(entry, expand(entry.rows), parcel, outputs, Later(), controller_of(parcel.lease))
        self.puts[put] = None
        return put

    def decide(self, put: Put, verdict: Verdict) -> None:
        """Hold those rows of ``put`` that were admitted, and free the others; whoever put them learns it at once."""
        put.tell(verdict)
        ok = verdict.each(len(put.rows))
        refused, void = self._write(put, put.entry, ok) if isinstance(put.entry, NewCells) else self._admit(put, ok)
        del self.puts[put]
        if refused or void:
            self._free(refused, promise=void)

    def _admit(self, put: Put, ok: Sequence[bool]) -> tuple[list[Part], int]:
        """Hold new rows; give what is not needed, and the bytes of promises that are void."""
        rows, refused, void = put.rows, [], 0
        if isinstance(put.entry, MovedRows):
            ok = [
                good and number not in self._rows and not self._comes_again(put, number)
                for number, good in zip(rows, ok, strict=True)
            ]
        for start, stop in stretches(rows, ok):
            block = Block.new(put, rows[start] - start)
            if ok[start]:
                self._rows.update(dict.fromkeys(rows[start:stop], block))
            else:
                refused += block.parts(rows[start], stop - start)
                void += block.promise * (stop - start)
        return refused, void

    def _comes_again(self, put: Put, number: int) -> bool:
        """Tell whether a row was sent here once more after ``put``, which then is not what the controller meant."""
        later = itertools.dropwhile(lambda other: other is not put, self.puts)
        return any(isinstance(other.entry, MovedRows) and number in other.rows for other in islice(later, 1, None))

    def discard(self, parcel: Parcel, rows: int) -> None:
        """Free what was stored and is not proposed."""
        self._free([(Piece(parcel, 0), parcel.columns, 0, rows)])

    def _write(self, put: Put, entry: NewCells, ok: Sequence[bool]) -> tuple[list[Part], int]:
        """Write to rows; give what is not needed, and the bytes of promises that are kept.

        That is what was replaced, or what came where the row is gone or the same put came before.
        """
        rows, parcel, refused, kept = put.rows, put.parcel, [], 0
        blocks = [self._rows.get(number) if good else None for number, good in zip(rows, ok, strict=True)]
        alike = blocks if len(set(rows)) == len(rows) else range(len(rows))
        for start, stop in stretches(rows, alike):
            count, first = stop - start, rows[start]
            piece = Piece(parcel, first - start, partial=bool(entry.reason))
            block = self._rows.get(first) if ok[start] else None
            if block is None or block.has_from(parcel):
                refused.append((piece, parcel.columns, first, count))
                continue
            tags = [] if entry.reason else entry.tags[start:stop]
            after, dropped = block.written(piece, range(first, first + count), tags)
            self._rows.update(dict.fromkeys(rows[start:stop], after))
            refused += dropped
            kept += (block.promise - after.promise) * count
        return refused, kept

    async def fetch(self, rows: Sequence[int], columns: Sequence[str]) -> dict[str, Jagged]:
        """Return ``columns`` of ``rows``, in that order. Raises what ``Finder`` does."""
        self._finder.check(rows)
        columns = list(dict.fromkeys(columns))
        if self.puts:
            await self._decided(frozenset(rows), columns)
        got: dict[str, Jagged] = {}
        for places, names in self._finder.find(self._rows, rows, columns, used=self.budget.used):
            try:
                got |= await self._backend.get(places, names)
            except BytesLost as gone:
                raise self._lose(gone) from gone
        return {name: got[name] for name in columns}

    async def _decided(self, rows: frozenset[int], columns: Sequence[str]) -> None:
        """Wait for the verdicts on puts that may change these cells."""
        while pending := [put.verdict for put in self.puts if put.touches(rows, columns)]:
            with contextlib.suppress(AsyncFlowError):
                await pending[-1]

    def _lose(self, gone: BytesLost) -> StaleHandle:
        """Report the loss of rows whose cells the store has lost; return the error for the caller that asked."""
        there = frozenset(gone.places)
        lost = [
            number
            for number, block in self._rows.items()
            if not there.isdisjoint(piece.place(number, 1) for piece in block.cells.values())
        ]
        self.clear(lost)
        self._lost(lost)
        return StaleHandle(f"the store has lost {len(lost)} rows", where=self._where, hint="They will be created again")

    def held(self) -> Iterable[Held]:
        """Describe all rows."""
        for number, block in self._rows.items():
            yield Held(
                row=number,
                columns=block.sizes(number, partial=False),
                partial=block.sizes(number, partial=True),
                tokens=block.tokens(number),
                tags=block.tags(number),
            )

    def clear(self, rows: Iterable[int]) -> None:
        """Free rows; those that are not here are passed over."""
        asked = list(rows)
        gone = list(map(self._rows.pop, asked, itertools.repeat(None)))
        parts: list[Part] = []
        void = 0
        for start, stop in stretches(asked, gone):
            if (block := gone[start]) is not None:
                parts += block.parts(asked[start], stop - start)
                void += block.promise * (stop - start)
        self._free(parts, promise=void)

    def wipe(self) -> None:
        """Free everything: writers are fenced, creators may try again elsewhere."""
        self.clear(list(self._rows))
        for put in list(self.puts):
            again = PeerLost("the unit was given up and began anew", where=self._where)
            self.decide(put, Verdict([], None if isinstance(put.entry, NewCells) else again.to_wire()))

    def _free(self, parts: Sequence[Part], *, promise: int = 0) -> None:
        """Release promises now, and bytes when the store has let go of them."""
        if promise:
            self.budget.release(0, promise=promise)
        by_columns: dict[tuple[str, ...], list[Place]] = {}
        size = 0
        for piece, columns, first, rows in parts:
            if columns:
                by_columns.setdefault(columns, []).append(piece.place(first, rows))
                size += piece.size(columns, first, rows)
        if not by_columns:
            return
        work = self._let_go(by_columns, size)
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
