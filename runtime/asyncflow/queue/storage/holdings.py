"""The rows that a unit holds, their admitted cells, and puts about which the controller has not yet decided.

The cells of one put are a *blob* in the back end, of which each row has an *extent*. A *block* is one record for all
rows that came together and were written together: which cells they have, and what was promised to them.

A put is stored first, then reported, then decided. Until then its cells are neither old nor new: a fetch of them waits
for the decision. A row is created together with a promise of room for its outputs, so that they find it in a full unit.

Invariants: every byte is in the budget from before it is stored until after it is freed; the budget promises, for each
row, what its creator named and nobody has written yet; blobs, extents and blocks never change, but a row's block is
replaced; a row has one cell a column, and a whole one is never replaced by an unfinished one; what was refused leaves
nothing behind; a fetch of more than goes in one message, or of what is not there, is refused before a byte is read.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TypeAlias

from asyncflow.errors import PeerLost, ProtocolError, Refused, StaleHandle, from_wire
from asyncflow.queue.protocol.batches import packed, part
from asyncflow.queue.protocol.calls import controller_of
from asyncflow.queue.protocol.messages import Tag
from asyncflow.queue.protocol.unit_calls import Cells, Entry, Held, MovedRows, NewCells, NewRows, Verdict
from asyncflow.queue.storage.backend import Backend, BytesLost, Place
from asyncflow.queue.storage.budget import ByteBudget
from asyncflow.rpc.columns import Jagged
from asyncflow.rpc.framing import MAX_MESSAGE

Tags: TypeAlias = dict[str, Tag]


class Blob:
    """The columns that one put brought to the back end.

    number: there; lease: that wrote it; cells: as the controller is told; partial: the columns that are unfinished.
    """

    __slots__ = ("cells", "columns", "lease", "number", "partial", "size")

    def __init__(
        self, number: int, columns: Mapping[str, Jagged], *, lease: str = "", partial: Collection[str] = ()
    ) -> None:
        self.number = number
        self.lease = lease
        self.columns = tuple(columns)
        self.partial = tuple(partial)
        self.size = sum([column.values.nbytes for column in columns.values()])
        self.cells = Cells(
            dtypes={name: column.form for name, column in columns.items()},
            sizes={name: packed(column) for name, column in columns.items()},
        )

    @property
    def whole(self) -> tuple[str, ...]:
        """The columns that are not unfinished."""
        return tuple(name for name in self.columns if name not in self.partial)


@dataclass(slots=True, eq=False)
class Extent:
    """Rows of a blob, whose cells are all whole or all unfinished. shift: the id of a row less its index there."""

    blob: Blob
    shift: int
    partial: bool = False

    def place(self, first: int, rows: int) -> Place:
        """Return where so many rows from ``first`` on lie."""
        return Place(self.blob.number, first - self.shift, rows)

    def size(self, columns: Sequence[str], first: int, rows: int) -> int:
        """Bytes of these columns of so many rows from ``first`` on."""
        sizes, index = self.blob.cells.sizes, first - self.shift
        return sum([sum(part(sizes[name], index, rows)) for name in columns])


Part: TypeAlias = tuple[Extent, tuple[str, ...], int, int]
"""Some columns of an extent, of so many rows: the first of them, and how many they are."""


@dataclass(slots=True, eq=False)
class PendingPut:
    """A blob that is stored and not yet decided about. rows: their ids; outputs: promised to each new row.

    result: the future of what the controller decides; controller: the number of that one, 0 for the primary.
    """

    entry: Entry
    rows: Sequence[int]
    blob: Blob
    outputs: Mapping[str, int]
    result: asyncio.Future[Verdict]
    controller: int = 0

    async def decided(self) -> Verdict:
        """Return the decision, which says of each row whether it was admitted. Raises the error that it names.

        A caller that is cancelled does not cancel the decision: others wait for it too.
        """
        await asyncio.wait([self.result])
        decision = self.result.result()
        if decision.error is not None:
            raise from_wire(decision.error)
        return Verdict(decision.each(len(self.rows)), rows=decision.rows)

    def may_change(self, rows: frozenset[int] | None, columns: Sequence[str] | None) -> bool:
        """Return whether one of these cells may change by it. None: all rows, or all columns."""
        if rows is not None and rows.isdisjoint(self.rows):
            return False
        return columns is None or any(column in self.blob.columns for column in columns)


class Block:
    """Rows with the same cells. entry: with which they came; shift: the id of a row less its index there.

    outputs: most bytes of each column that is written to each of them later; promise: those that are kept for it;
    cells: the extent in which they have each column; tags: of those rows to which some were written.
    """

    __slots__ = ("_entry", "_shift", "_tags", "cells", "outputs", "promise")

    def __init__(
        self,
        entry: Entry,
        shift: int,
        outputs: Mapping[str, int],
        cells: Mapping[str, Extent],
        tags: Mapping[int, Tags],
    ) -> None:
        self.cells = cells
        self.outputs = outputs
        self.promise = sum([size for name, size in outputs.items() if not self._has(name)]) if outputs else 0
        self._entry = entry
        self._shift = shift
        self._tags = tags

    @classmethod
    def new(cls, put: PendingPut, shift: int) -> Block:
        """Return the block of rows that ``put`` brought."""
        blob = put.blob
        cells = dict.fromkeys(blob.columns, Extent(blob, shift))
        cells |= dict.fromkeys(blob.partial, Extent(blob, shift, partial=True))
        return cls(put.entry, shift, put.outputs, cells, {})

    def awaits(self, column: str, size: int) -> bool:
        """Return whether a cell of up to so many bytes was promised to each row and is not there yet."""
        return size <= self.outputs.get(column, 0) and not self._has(column)

    def has_from(self, blob: Blob) -> bool:
        """Return whether the writer of ``blob`` has written one of its columns before."""
        extents = filter(None, map(self.cells.get, blob.columns))
        return any(extent.blob.lease == blob.lease and not extent.partial for extent in extents)

    def written(self, extent: Extent, rows: range, tags: Sequence[Tags]) -> tuple[Block, list[Part]]:
        """Return the block that a write makes of ``rows``, and the parts to be freed: of old cells, or of its own."""
        cells = dict(self.cells)
        freed: dict[str, Extent] = {}
        for name in extent.blob.columns:
            old = cells.get(name)
            if old is None:
                cells[name] = extent
            elif extent.partial and not old.partial:
                freed[name] = extent
            else:
                cells[name], freed[name] = extent, old
        own = {row: self._tags[row] for row in rows if row in self._tags}
        if tags:
            own = {row: self.tags(row) | added for row, added in zip(rows, tags, strict=True)}
        return Block(self._entry, self._shift, self.outputs, cells, own), _parts(freed, rows[0], len(rows))

    def parts(self, first: int, rows: int) -> list[Part]:
        """Return all parts of so many rows from ``first`` on."""
        return _parts(self.cells, first, rows)

    def sizes(self, row: int, *, partial: bool) -> dict[str, int]:
        """Bytes of the cells of a row, by column: of those that are unfinished, or of the whole ones."""
        cells = [(name, extent) for name, extent in self.cells.items() if extent.partial is partial]
        return {name: part(extent.blob.cells.sizes[name], row - extent.shift, 1)[0] for name, extent in cells}

    def size(self, row: int) -> int:
        """Bytes of the cells of a row."""
        return sum([extent.size((name,), row, 1) for name, extent in self.cells.items()])

    def tokens(self, row: int) -> int:
        """Tokens of a row."""
        entry, index = self._entry, row - self._shift
        told = entry.samples if isinstance(entry, NewRows) else entry if isinstance(entry, MovedRows) else None
        return told.tokens[index] if told is not None and told.tokens else 0

    def tags(self, row: int) -> Tags:
        """Tags of a row."""
        if (own := self._tags.get(row)) is not None:
            return own
        return self._entry.tags[row - self._shift] if self._entry.tags else {}

    def _has(self, column: str) -> bool:
        extent = self.cells.get(column)
        return extent is not None and not extent.partial


def _parts(cells: Mapping[str, Extent], first: int, rows: int) -> list[Part]:
    names: dict[Extent, list[str]] = {}
    for name, extent in cells.items():
        names.setdefault(extent, []).append(name)
    return [(extent, tuple(columns), first, rows) for extent, columns in names.items()]


class Holdings:
    """The rows of a unit: the block of each, by number.

    lost: called with those whose cells the store lost; most: bytes of a fetch.
    """

    def __init__(
        self,
        *,
        backend: Backend,
        budget: ByteBudget,
        where: str,
        lost: Callable[[list[int]], None],
        most: int = MAX_MESSAGE,
    ) -> None:
        self.budget = budget
        self.puts: dict[PendingPut, None] = {}
        self._lost = lost
        self.rows: dict[int, Block] = {}
        self._backend = backend
        self._where = where
        self._most = most
        self._numbers = itertools.count(1)
        self._freeing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self.rows)

    def __contains__(self, row: int) -> bool:
        return row in self.rows

    async def store_new(
        self,
        columns: Mapping[str, Jagged],
        *,
        rows: int,
        outputs: Mapping[str, int],
        partial: Collection[str] = (),
        producer: str,
        timeout: float,
    ) -> Blob:
        """Store ``columns`` of ``rows`` new rows, in the producer's turn, when there is room for them and outputs.

        outputs: most bytes of each column that a row gets later; partial: columns that are unfinished.
        """
        blob = Blob(next(self._numbers), columns, partial=partial)
        promise = sum(size for name, size in outputs.items() if name not in blob.whole) * rows
        await self.budget.reserve(blob.size, promise=promise, timeout=timeout, producer=producer)
        return await self._put(blob, columns, promise=promise)

    async def store_outputs(
        self,
        columns: Mapping[str, Jagged],
        *,
        rows: Sequence[int],
        lease: str,
        partial: bool,
        producer: str,
        timeout: float,
    ) -> Blob:
        """Store ``columns`` of rows that are here: at once where they were promised, else in the producer's turn."""
        blob = Blob(next(self._numbers), columns, lease=lease)
        if not partial and self._is_promised(rows, blob.cells):
            await self.budget.draw(blob.size, timeout=timeout)
        else:
            await self.budget.reserve(blob.size, timeout=timeout, producer=producer)
        return await self._put(blob, columns)

    def _is_promised(self, rows: Sequence[int], cells: Cells) -> bool:
        blocks = list(map(self.rows.get, rows))
        for start, stop in runs_of(rows, blocks):
            if (block := blocks[start]) is None:
                return False
            for name, sizes in cells.sizes.items():
                if not block.awaits(name, max(part(sizes, start, stop - start))):
                    return False
        return True

    async def _put(self, blob: Blob, columns: Mapping[str, Jagged], *, promise: int = 0) -> Blob:
        try:
            if blob.columns:
                await self._backend.put(blob.number, columns)
        except BaseException:
            self.budget.release(blob.size, promise=promise)
            raise
        return blob

    def propose(self, entry: Entry, blob: Blob, *, outputs: Mapping[str, int]) -> PendingPut:
        """Keep what was stored until the controller has decided about ``entry``."""
        result: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        put = PendingPut(entry, entry.rows, blob, outputs, result, controller_of(blob.lease))
        self.puts[put] = None
        return put

    def decide(self, put: PendingPut, result: Verdict) -> None:
        """Hold those rows of ``put`` that were admitted, and free the others; set the future ``put.result``."""
        put.result.set_result(result)
        ok = result.each(len(put.rows))
        refused, void = self._write(put, put.entry, ok) if isinstance(put.entry, NewCells) else self._admit(put, ok)
        del self.puts[put]
        if refused or void:
            self._free(refused, promise=void)

    def _admit(self, put: PendingPut, ok: Sequence[bool]) -> tuple[list[Part], int]:
        """Hold new rows; return the parts that are not needed, and the bytes of promises that are void."""
        rows, refused, void = put.rows, [], 0
        if isinstance(put.entry, MovedRows):
            there = self._sent_after(put) | self.rows.keys()
            ok = [good and number not in there for number, good in zip(rows, ok, strict=True)]
        for start, stop in runs_of(rows, ok):
            block = Block.new(put, rows[start] - start)
            if ok[start]:
                self.rows.update(dict.fromkeys(rows[start:stop], block))
            else:
                refused += block.parts(rows[start], stop - start)
                void += block.promise * (stop - start)
        return refused, void

    def _sent_after(self, put: PendingPut) -> set[int]:
        """Return the rows that were sent here once more after ``put``, which then is not what the controller meant."""
        later = islice(itertools.dropwhile(lambda other: other is not put, self.puts), 1, None)
        return {row for other in later if isinstance(other.entry, MovedRows) for row in other.rows}

    def discard(self, blob: Blob, rows: int) -> None:
        """Free what was stored and is not proposed."""
        self._free([(Extent(blob, 0), blob.columns, 0, rows)])

    def _write(self, put: PendingPut, entry: NewCells, ok: Sequence[bool]) -> tuple[list[Part], int]:
        """Write to rows; return the parts that are not needed, and the bytes of promises that are kept.

        These parts were replaced, or came for a row that is gone or has this put already.
        """
        rows, blob, refused, kept = put.rows, put.blob, [], 0
        blocks = [self.rows.get(number) if good else None for number, good in zip(rows, ok, strict=True)]
        alike = blocks if len(set(rows)) == len(rows) else range(len(rows))
        for start, stop in runs_of(rows, alike):
            count, first = stop - start, rows[start]
            extent = Extent(blob, first - start, partial=bool(entry.reason))
            block = self.rows.get(first) if ok[start] else None
            if block is None or block.has_from(blob):
                refused.append((extent, blob.columns, first, count))
                continue
            tags = [] if entry.reason else entry.tags[start:stop]
            after, dropped = block.written(extent, range(first, first + count), tags)
            self.rows.update(dict.fromkeys(rows[start:stop], after))
            refused += dropped
            kept += (block.promise - after.promise) * count
        return refused, kept

    async def fetch(self, rows: Sequence[int], columns: Sequence[str]) -> dict[str, Jagged]:
        """Return ``columns`` of ``rows``, in that order.

        Raises ProtocolError for no row or one twice, StaleHandle for what is not there, Refused for too much at once.
        """
        if not rows or (not isinstance(rows, range) and len(set(rows)) < len(rows)):
            what = f"a fetch names {len(rows)} rows, of which {len(set(rows))} differ"
            raise ProtocolError(what, where=self._where, hint="Name at least one row, and each once")
        columns = list(dict.fromkeys(columns))
        await self.decided(rows, columns)
        got: dict[str, Jagged] = {}
        for places, names in self._find(rows, columns).items():
            try:
                got |= await self._backend.get(places, names)
            except BytesLost as gone:
                raise self._lose(gone) from gone
        return {name: got[name] for name in columns}

    def _find(self, rows: Sequence[int], columns: Sequence[str]) -> Mapping[tuple[Place, ...], list[str]]:
        """Return the columns of ``rows`` by the places of their cells."""
        blocks = list(map(self.rows.get, rows))
        found: dict[tuple[Place, ...], list[str]] = {}
        size, counted = 0, self.budget.used > self._most
        runs: list[tuple[Block, int, int]] = []
        for start, stop in runs_of(rows, blocks):
            if (block := blocks[start]) is None:
                hint = "It was cleared, or lost with the unit's earlier incarnation"
                raise StaleHandle(f"row {rows[start]} is not here", where=self._where, hint=hint)
            runs.append((block, rows[start], stop - start))
        for name in columns:
            places = []
            for block, row, count in runs:
                if (extent := block.cells.get(name)) is None:
                    hint = f"It has {', '.join(sorted(block.cells))}"
                    raise StaleHandle(f"row {row} has no column {name!r}", where=self._where, hint=hint)
                places.append(extent.place(row, count))
                if counted:
                    size += extent.size((name,), row, count)
            found.setdefault(tuple(places), []).append(name)
        if size > self._most:
            hint = f"Fetch fewer rows at a time: at most {self._most} bytes come from a unit at once"
            raise Refused(f"{size} bytes were asked for, of {len(rows)} rows", where=self._where, hint=hint)
        return found

    async def decided(self, rows: Iterable[int] | None = None, columns: Sequence[str] | None = None) -> None:
        """Wait until the controller has decided about all puts that may change these cells; None: all rows, columns."""
        if not self.puts:
            return
        asked = frozenset(rows) if rows is not None else None
        while pending := [put.result for put in self.puts if put.may_change(asked, columns)]:
            await asyncio.wait([pending[-1]])

    def _lose(self, gone: BytesLost) -> StaleHandle:
        """Report rows whose cells the store has lost; return the error for the caller that asked for them."""
        there = frozenset(gone.places)
        lost = [
            number
            for number, block in self.rows.items()
            if not there.isdisjoint(extent.place(number, 1) for extent in block.cells.values())
        ]
        self.clear(lost)
        self._lost(lost)
        return StaleHandle(f"the store has lost {len(lost)} rows", where=self._where, hint="They will be created again")

    def held(self) -> Iterable[Held]:
        """Describe all rows."""
        for number, block in self.rows.items():
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
        gone = list(map(self.rows.pop, asked, itertools.repeat(None)))
        parts: list[Part] = []
        void = 0
        for start, stop in runs_of(asked, gone):
            if (block := gone[start]) is not None:
                parts += block.parts(asked[start], stop - start)
                void += block.promise * (stop - start)
        self._free(parts, promise=void)

    def wipe(self) -> None:
        """Free everything: writers are fenced, creators may try again elsewhere."""
        self.clear(list(self.rows))
        for put in list(self.puts):
            again = PeerLost("the unit was given up and began anew", where=self._where)
            self.decide(put, Verdict([], None if isinstance(put.entry, NewCells) else again.to_wire()))

    def _free(self, parts: Sequence[Part], *, promise: int = 0) -> None:
        """Release promises now, and bytes when the store has let go of them."""
        if promise:
            self.budget.release(0, promise=promise)
        by_columns: dict[tuple[str, ...], list[Place]] = {}
        size = 0
        for extent, columns, first, rows in parts:
            if columns:
                by_columns.setdefault(columns, []).append(extent.place(first, rows))
                size += extent.size(columns, first, rows)
        if not by_columns:
            return
        freeing = asyncio.create_task(self._let_go(by_columns, size), name="free")
        self._freeing.add(freeing)
        freeing.add_done_callback(self._freeing.discard)

    async def _let_go(self, by_columns: Mapping[tuple[str, ...], Sequence[Place]], size: int) -> None:
        try:
            for columns, places in by_columns.items():
                await self._backend.free(places, columns)
        finally:
            self.budget.release(size)


def runs_of(rows: Sequence[int], alike: Sequence[object]) -> list[tuple[int, int]]:
    """Return start and stop of each run of consecutive ``rows`` that share one object in ``alike``."""
    cuts = [i for i in range(1, len(rows)) if alike[i] is not alike[i - 1] or rows[i] != rows[i - 1] + 1]
    return list(pairwise([0, *cuts, len(rows)])) if rows else []
