"""The rows that a unit holds, their admitted cells, and puts about which the controller has not yet decided.

The cells of one put are a *blob* in the backend. A put is stored first, then reported, then decided. Until then its
cells are neither old nor new: a fetch of them waits for the decision. A row is created together with a promise of room
for its outputs, so that a full unit accepts them. A cell is *unfinished* if a holder wrote it and did not complete its
row with it.

Invariants: every byte is in the budget from before it is stored until after it is freed. The budget promises, for each
row, the outputs that its creator named and that are not yet written. A row has one cell per column, and an unfinished
cell never replaces a finished one. A refused put leaves nothing behind. A fetch that exceeds one message, or of a
missing row or column, is refused before a byte is read.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from asyncflow.errors import PeerLost, ProtocolError, Refused, StaleHandle, from_wire
from asyncflow.queue.peers import gather_all
from asyncflow.queue.protocol.calls import controller_of
from asyncflow.queue.protocol.messages import Tag
from asyncflow.queue.protocol.unit_calls import Cells, Entry, EntryResult, Held, MovedRows, NewCells, NewRows
from asyncflow.queue.storage.backend import Backend, BytesLost, Place
from asyncflow.queue.storage.budget import ByteBudget
from asyncflow.rpc.columns import Jagged
from asyncflow.rpc.framing import MAX_MESSAGE

Tags: TypeAlias = dict[str, Tag]


class Blob:
    """The columns that one put brought to the backend.

    number: its number there; sizes: bytes of each row by column; partial: the unfinished columns; lease: lease of the
    writer; controller: number of the deciding controller; outputs: most bytes of each column that new rows get later.
    """

    def __init__(
        self,
        number: int,
        columns: Mapping[str, Jagged],
        *,
        lease: str = "",
        partial: Collection[str] = (),
        outputs: Mapping[str, int] | None = None,
    ) -> None:
        self.number = number
        self.sizes = {name: column.sizes for name, column in columns.items()}
        self.size = sum([column.values.nbytes for column in columns.values()])
        self.partial = frozenset(partial)
        self.lease = lease
        self.controller = controller_of(lease)
        self.outputs = outputs or {}
        self.cells = Cells(dtypes={name: column.form for name, column in columns.items()}, sizes=self.sizes)


@dataclass(slots=True, eq=False)
class BlobRow:
    """The cells of one row that came with a blob. index: index of the row there, from 0."""

    blob: Blob
    index: int

    @property
    def place(self) -> Place:
        """Its place in the backend."""
        return Place(self.blob.number, self.index)

    def size(self, columns: Iterable[str]) -> int:
        """Bytes of these columns."""
        return sum([self.blob.sizes[name][self.index] for name in columns])


Parts: TypeAlias = Iterable[tuple[BlobRow, Iterable[str]]]
"""Rows of blobs, each with some of its columns."""


@dataclass(slots=True, eq=False)
class HeldRow:
    """One row.

    cells: the blob row with each column; outputs: most bytes of each column that is written later; tokens, tags: values
    of its creator and its writers.
    """

    cells: dict[str, BlobRow]
    outputs: Mapping[str, int]
    tokens: int
    tags: Tags

    def has(self, column: str) -> bool:
        """Return whether the row has a finished cell of the column."""
        part = self.cells.get(column)
        return part is not None and column not in part.blob.partial

    @property
    def promise(self) -> int:
        """Bytes that are reserved for later writes."""
        return sum([size for name, size in self.outputs.items() if not self.has(name)])

    @property
    def size(self) -> int:
        """Bytes of all cells."""
        return sum([part.size((name,)) for name, part in self.cells.items()])

    @property
    def parts(self) -> Parts:
        """All blob rows of its cells, each with its columns."""
        found: dict[BlobRow, list[str]] = {}
        for name, part in self.cells.items():
            found.setdefault(part, []).append(name)
        return found.items()

    def was_written(self, blob: Blob) -> bool:
        """Return whether the lease of ``blob`` has already written one of its columns."""
        return any(self.has(name) and self.cells[name].blob.lease == blob.lease for name in blob.sizes)

    def write(self, part: BlobRow) -> Parts:
        """Add the cells of a blob row; return the columns, of it or of older blob rows, that are not needed."""
        for name in part.blob.sizes:
            if name in part.blob.partial and self.has(name):
                yield part, [name]
            elif (old := self.cells.get(name)) is not None:
                yield old, [name]
                self.cells[name] = part
            else:
                self.cells[name] = part

    def described(self, number: int) -> Held:
        """Describe the row for the controller."""
        whole = {name: part.size((name,)) for name, part in self.cells.items() if self.has(name)}
        partial = {name: part.size((name,)) for name, part in self.cells.items() if not self.has(name)}
        return Held(row=number, columns=whole, partial=partial, tokens=self.tokens, tags=self.tags)


@dataclass(slots=True, eq=False)
class PendingPut:
    """A blob that is stored and not yet decided about. result: future of the controller's decision."""

    entry: Entry
    blob: Blob
    result: asyncio.Future[EntryResult]

    @property
    def rows(self) -> Sequence[int]:
        """The ids of the rows."""
        return self.entry.rows

    async def decided(self) -> EntryResult:
        """Return the decision, which contains for each row whether it was admitted. Raises an error that it contains.

        A cancelled caller does not cancel the decision, because other callers wait for it too.
        """
        decision = await asyncio.shield(self.result)
        if decision.error is not None:
            raise from_wire(decision.error)
        return EntryResult(decision.each(len(self.rows)), rows=decision.rows)

    def may_change(self, rows: frozenset[int] | None, columns: Iterable[str] | None) -> bool:
        """Return whether this put may change one of these cells. None: all rows, or all columns."""
        if rows is not None and rows.isdisjoint(self.rows):
            return False
        return columns is None or not self.blob.sizes.keys().isdisjoint(columns)


class Holdings:
    """The rows of a unit, by number.

    lost: called with rows whose cells the store lost; most: limit of bytes of a fetch.
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
        self.rows: dict[int, HeldRow] = {}
        self._lost = lost
        self._backend = backend
        self._where = where
        self._most = most
        self._numbers = itertools.count(1)
        self._freeing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self.rows)

    async def store(
        self,
        columns: Mapping[str, Jagged],
        *,
        new: int = 0,
        rows: Sequence[int] = (),
        lease: str = "",
        partial: Collection[str] = (),
        outputs: Mapping[str, int] | None = None,
        timeout: float,
    ) -> Blob:
        """Store ``columns`` of ``new`` rows, or of existing ``rows``, when there is room.

        Promised cells do not wait for room. lease: lease of the writer; partial: unfinished columns; outputs: most
        bytes of each column that a new row gets later, for which there must be room, too.
        """
        blob = Blob(next(self._numbers), columns, lease=lease, partial=partial, outputs=outputs)
        outputs_later = [size for name, size in blob.outputs.items() if name not in blob.sizes or name in blob.partial]
        promise = new * sum(outputs_later)
        if not new and not partial and self._is_promised(rows, blob):
            await self.budget.draw(blob.size, timeout=timeout)
        else:
            await self.budget.reserve(blob.size, promise=promise, timeout=timeout)
        try:
            if columns:
                await self._backend.put(blob.number, columns)
        except BaseException:
            self.budget.release(blob.size, promise=promise)
            raise
        return blob

    def _is_promised(self, rows: Sequence[int], blob: Blob) -> bool:
        """Return whether each of these cells was promised to its row and is not written yet."""
        return all(
            (row := self.rows.get(number)) is not None
            and all(
                sizes[index] <= row.outputs.get(name, 0) and not row.has(name) for name, sizes in blob.sizes.items()
            )
            for index, number in enumerate(rows)
        )

    def discard(self, blob: Blob, rows: int) -> None:
        """Free a stored blob that is not proposed."""
        self._free([(BlobRow(blob, index), blob.sizes) for index in range(rows)])

    def propose(self, entry: Entry, blob: Blob) -> PendingPut:
        """Keep a stored blob until the controller has decided about ``entry``."""
        put = PendingPut(entry, blob, asyncio.get_running_loop().create_future())
        self.puts[put] = None
        return put

    def decide(self, put: PendingPut, result: EntryResult) -> None:
        """Hold the admitted rows of ``put``, and free the others; set the result of ``put.result``."""
        put.result.set_result(result)
        ok = result.each(len(put.rows))
        if isinstance(put.entry, NewCells):
            self._write(put.entry, put.blob, ok)
        else:
            self._admit(put, ok)
        del self.puts[put]

    def _admit(self, put: PendingPut, ok: Sequence[bool]) -> None:
        """Hold new rows."""
        entry, blob, refused = put.entry, put.blob, list[HeldRow]()
        if isinstance(entry, MovedRows):
            tokens, existing = entry.tokens, self._sent_after(put) | self.rows.keys()
        else:
            tokens, existing = entry.samples.tokens if isinstance(entry, NewRows) and entry.samples else [], set()
        for index, number in enumerate(put.rows):
            cells = dict.fromkeys(blob.sizes, BlobRow(blob, index))
            tags = entry.tags[index] if entry.tags else {}
            row = HeldRow(cells, blob.outputs, tokens[index] if tokens else 0, tags)
            if ok[index] and number not in existing:
                self.rows[number] = row
            else:
                refused.append(row)
        if refused:
            self._drop(refused)

    def _sent_after(self, put: PendingPut) -> set[int]:
        """Return rows that were sent here again after ``put``, which is then not what the controller admitted."""
        newer = itertools.islice(itertools.dropwhile(lambda other: other is not put, self.puts), 1, None)
        return {row for other in newer if isinstance(other.entry, MovedRows) for row in other.rows}

    def _write(self, entry: NewCells, blob: Blob, ok: Sequence[bool]) -> None:
        """Write to rows; free replaced cells, and cells of rows that have ended or already contain this put."""
        freed, fulfilled = list[tuple[BlobRow, Iterable[str]]](), 0
        for index, number in enumerate(entry.rows):
            part, row = BlobRow(blob, index), self.rows.get(number)
            if row is None or not ok[index] or row.was_written(blob):
                freed.append((part, blob.sizes))
                continue
            promise = row.promise
            freed += row.write(part)
            fulfilled += promise - row.promise
            if entry.tags and entry.outcome == "complete":
                row.tags = row.tags | entry.tags[index]
        self._free(freed, promise=fulfilled)

    async def fetch(self, rows: Sequence[int], columns: Sequence[str]) -> dict[str, Jagged]:
        """Return ``columns`` of ``rows``, in that order.

        Raises ProtocolError for no or repeated rows, StaleHandle for missing rows, Refused for missing columns and for
        too many bytes.
        """
        if not rows or len(set(rows)) < len(rows):
            what = f"a fetch names {len(rows)} rows, of which {len(set(rows))} differ"
            raise ProtocolError(what, where=self._where, hint="Name at least one row, and each once")
        columns = list(dict.fromkeys(columns))
        await self.decided(rows, columns)
        found = self._find(rows, columns).items()
        gets = [self._backend.get([part.place for part in parts], names) for parts, names in found]
        try:
            results = await gather_all(gets)  # concurrently, since cells of one may be freed while another waits
        except BytesLost as error:
            raise self._lose(error) from error
        cells = {name: column for part in results for name, column in part.items()}
        return {name: cells[name] for name in columns}

    def _find(self, rows: Sequence[int], columns: Sequence[str]) -> Mapping[tuple[BlobRow, ...], list[str]]:
        """Return the columns of ``rows``, by the blob rows that contain them."""
        found: dict[tuple[BlobRow, ...], list[str]] = {}
        if missing := [number for number in rows if number not in self.rows]:
            hint = "It was cleared, or lost with the unit's earlier incarnation"
            raise StaleHandle(f"row {missing[0]} is not on this unit", where=self._where, hint=hint)
        cells = [self.rows[number].cells for number in rows]
        try:
            held = {name: tuple([of[name] for of in cells]) for name in columns}
        except KeyError as lacking:
            number, there = next((row, of) for row, of in zip(rows, cells, strict=True) if lacking.args[0] not in of)
            hint = f"It has {', '.join(sorted(there))}"
            raise Refused(f"row {number} has no column {lacking}", where=self._where, hint=hint) from None
        for name, parts in held.items():
            found.setdefault(parts, []).append(name)
        size = sum([part.blob.sizes[name][part.index] for name, parts in held.items() for part in parts])
        if size > self._most:
            hint = f"Fetch fewer rows at a time: at most {self._most} bytes come from a unit at once"
            raise Refused(f"{size} bytes were requested, of {len(rows)} rows", where=self._where, hint=hint)
        return found

    async def decided(self, rows: Iterable[int] | None = None, columns: Iterable[str] | None = None) -> None:
        """Wait until the controller has decided about all puts that may change these cells. None: all of them."""
        requested = frozenset(rows) if rows is not None else None
        while pending := [put.result for put in self.puts if put.may_change(requested, columns)]:
            await asyncio.wait([pending[-1]])

    def _lose(self, error: BytesLost) -> StaleHandle:
        """Report rows whose cells the store has lost; return the error for the caller that requested them."""
        places = frozenset(error.places)
        lost = [row for row, of in self.rows.items() if not places.isdisjoint(part.place for part in of.cells.values())]
        self.clear(lost)
        self._lost(lost)
        return StaleHandle(f"the store has lost {len(lost)} rows", where=self._where, hint="They will be created again")

    def held(self, rows: Iterable[int]) -> list[Held]:
        """Describe those of ``rows`` that are here."""
        return [row.described(number) for number in rows if (row := self.rows.get(number)) is not None]

    def clear(self, rows: Iterable[int]) -> None:
        """Free rows; rows that are not here are ignored."""
        self._drop([self.rows.pop(number) for number in list(rows) if number in self.rows])

    def wipe(self) -> None:
        """Free everything: writers are fenced, and creators may try again elsewhere."""
        self.clear(self.rows)
        for put in list(self.puts):
            again = PeerLost("the unit was given up and has restarted", where=self._where)
            self.decide(put, EntryResult([], None if isinstance(put.entry, NewCells) else again.to_wire()))

    def _drop(self, rows: Iterable[HeldRow]) -> None:
        """Free all cells and promises of rows."""
        self._free([part for row in rows for part in row.parts], promise=sum([row.promise for row in rows]))

    def _free(self, parts: Parts, *, promise: int = 0) -> None:
        """Release promises now, and bytes after the store has freed them."""
        if promise:
            self.budget.release(0, promise=promise)
        by_columns: dict[tuple[str, ...], list[Place]] = {}
        size = 0
        for part, columns in parts:
            if columns:
                by_columns.setdefault(tuple(columns), []).append(part.place)
                size += part.size(columns)
        if by_columns:
            freeing = asyncio.create_task(self._free_cells(by_columns, size), name="free")
            self._freeing.add(freeing)
            freeing.add_done_callback(self._freeing.discard)

    async def _free_cells(self, by_columns: Mapping[tuple[str, ...], Sequence[Place]], size: int) -> None:
        try:
            for columns, places in by_columns.items():
                await self._backend.free(places, columns)
        finally:
            self.budget.release(size)
