"""Blobs in a key-value store: one key a sample, whose value holds the sample's columns of that blob back to back.

The store knows only keys and bytes (``Store``); the unit keeps the position of each cell in a value, and the digest of
the whole value. A value is written once, under a key that was never used before. A write whose answer was lost is
repeated under another key.

Invariants: bytes are returned only from a value that has the digest of the stored value. A value that the store has
lost raises ``BytesLost`` and never yields other bytes. No value is removed while it is read. Freed values, and values
of incomplete puts, are removed from the store, with as many attempts as needed, and ``free`` returns after the removal.
A sample is rewritten before less than half of its value is needed. A sample without bytes is not stored at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncflow.errors import PeerLost
from asyncflow.queue.storage.backend import Backend, BytesLost, Outcome, Place, Store, split
from asyncflow.rpc.columns import DTYPES, Array, Jagged, batches, weighed_batches
from asyncflow.rpc.retry import delays

log = logging.getLogger(__name__)

TRIES = 4
"""Failed reads of a value after which it counts as lost."""
PATIENCE_S = 20.0
"""Time for which a read retries while the store does not answer."""
_LEAVE_S = 5.0
_FIRST_DELAY_S = 0.02

Sizes = npt.NDArray[np.int64]


class Layout:
    """The lengths of all cells of a blob. names: names of its columns; sizes: bytes of the value of each row."""

    def __init__(self, columns: Mapping[str, Jagged]) -> None:
        self.names = tuple(columns)
        self.forms = {name: (column.dtype, column.inner) for name, column in columns.items()}
        lengths = [column.lengths * column.values.itemsize for column in columns.values()]
        self._ends: Sizes = np.cumsum(lengths, axis=0, dtype=np.int64)
        self.sizes: Sizes = self._ends[-1]

    def cell(self, column: str, row: int) -> slice:
        """Return the position of a cell in the value of its row."""
        place = self.names.index(column)
        return slice(int(self._ends[place - 1, row]) if place else 0, int(self._ends[place, row]))


@dataclass(slots=True)
class Sample:
    """A row of a blob. key: "" if it has no bytes; digest: of its value; freed: columns that were freed."""

    layout: Layout
    row: int
    key: str = ""
    digest: bytes = b""
    freed: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        """Bytes of its value."""
        return int(self.layout.sizes[self.row])

    @property
    def columns(self) -> list[str]:
        """The columns that are needed."""
        return [name for name in self.layout.names if name not in self.freed]

    def needed(self, columns: Sequence[str]) -> int:
        """Return the total bytes of ``columns``."""
        cells = [self.layout.cell(name, self.row) for name in columns]
        return sum(cell.stop - cell.start for cell in cells)


class _Draft:
    """A put in progress. samples: the stored ones, by row; doubtful: keys under which something may be stored."""

    def __init__(self, columns: Mapping[str, Jagged]) -> None:
        self.columns = columns
        self.layout = Layout(columns)
        self.samples: dict[int, Sample] = {}
        self.doubtful: list[str] = []
        self.given_up = False


class PackedBackend(Backend):
    """Blobs in ``store``. prefix: of all keys, unique among living processes; lasting: the store outlives the queue."""

    def __init__(self, store: Store, *, prefix: str, lasting: bool = False) -> None:
        self._store = store
        self._prefix = prefix
        self._lasting = lasting
        self._numbers = itertools.count()
        self._samples: dict[Place, Sample] = {}
        self._reading: Counter[str] = Counter()
        self._jobs: set[asyncio.Task[None]] = set()
        self._opened = asyncio.Event()
        self._lookup = asyncio.Lock()

    async def open(self) -> None:
        """Wait until the store can be used; earlier puts wait, too."""
        await self._store.open()
        self._opened.set()

    async def put(self, blob: int, columns: Mapping[str, Jagged]) -> None:
        """Store all rows, waiting for room and for the store; a cancelled put leaves nothing behind."""
        draft = _Draft(columns)
        await self._opened.wait()
        job = self._spawn(self._write(draft))
        try:
            await asyncio.shield(job)
        except BaseException:
            draft.given_up = True
            self._spawn(self._undo(draft, job))
            raise
        self._samples |= {Place(blob, row): sample for row, sample in draft.samples.items()}

    async def get(self, places: Sequence[Place], columns: Sequence[str]) -> dict[str, Jagged]:
        """Return cells of rows from the values that hold them.

        Raises BytesLost, which also names rows that were lost together with these rows, and PeerLost if the store did
        not answer for ``PATIENCE_S``.
        """
        samples = [self._samples[place] for place in places]
        needed = [number for number, sample in enumerate(samples) if sample.needed(columns)]
        keys = [samples[number].key for number in needed]
        self._reading.update(keys)
        try:
            values, lost = await self._read(samples, needed)
        finally:
            self._reading -= Counter(keys)
        if lost:
            lost_places = await self._lost_with({samples[number].key for number, moved in lost.items() if not moved})
            raise BytesLost(list(dict.fromkeys([*(places[number] for number in lost), *lost_places])))
        return {name: _column(name, samples, values) for name in columns}

    async def free(self, places: Sequence[Place], columns: Sequence[str]) -> None:
        """Remove the values of which no column is needed."""
        unneeded = []
        for place in places:
            sample = self._samples[place]
            sample.freed |= frozenset(columns)
            if not sample.columns:
                del self._samples[place]
                unneeded.append(sample.key)
            elif 2 * sample.needed(sample.columns) < sample.size:
                self._spawn(self._shrink(place, sample))
        await asyncio.shield(self._spawn(self._remove(unneeded)))

    async def close(self) -> None:
        """Close the store. Values are removed now if it outlives the queue, otherwise with it or by a successor."""
        for job in self._jobs:
            job.cancel()
        if self._jobs:
            await asyncio.wait(self._jobs)
        if self._lasting:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    await self._remove([sample.key for sample in self._samples.values()])
        await self._store.close()

    async def _write(self, draft: _Draft) -> None:
        """Store all rows of a draft, with as many attempts as needed, unless it is given up."""
        sizes = draft.layout.sizes
        left = np.flatnonzero(sizes).tolist()
        waits = delays(first=_FIRST_DELAY_S)
        while left and not draft.given_up:
            parts = (self._write_some(draft, rows) for rows in self._parts(left, sizes))
            for failed in filter(None, await asyncio.gather(*parts, return_exceptions=True)):
                raise failed  # after all parts have ended, so that it is known which values to remove
            left = [row for row in left if row not in draft.samples]
            doubtful, draft.doubtful = draft.doubtful, []
            await self._remove(doubtful)
            if left:
                await asyncio.sleep(next(waits))
        draft.samples |= {row: Sample(draft.layout, row) for row in np.flatnonzero(sizes == 0).tolist()}

    async def _write_some(self, draft: _Draft, rows: Sequence[int]) -> None:
        keys = [f"{self._prefix}{next(self._numbers):x}" for _ in rows]
        sizes = draft.layout.sizes[list(rows)].tolist()
        values, digests = await asyncio.to_thread(_pack, draft.columns, rows, sizes)
        outcomes = await self._store.write(keys, sizes, values)
        for number, (row, key, outcome) in enumerate(zip(rows, keys, outcomes, strict=True)):
            if outcome is Outcome.DONE:
                draft.samples[row] = Sample(draft.layout, row, key, digests[number])
            elif outcome is not Outcome.FULL:
                draft.doubtful.append(key)

    async def _undo(self, draft: _Draft, job: asyncio.Task[None]) -> None:
        await asyncio.wait([job])
        await self._remove([*(sample.key for sample in draft.samples.values()), *draft.doubtful])

    async def _read(self, samples: Sequence[Sample], left: list[int]) -> tuple[dict[int, Array], dict[int, bool]]:
        """Return the values of samples ``left``, and for each lost sample whether the store reported the loss."""
        now = asyncio.get_running_loop().time
        deadline = now() + PATIENCE_S
        waits, tries = delays(first=_FIRST_DELAY_S), Counter[int]()
        values, lost = dict[int, Array](), dict[int, bool]()
        sizes = np.array([sample.size for sample in samples])

        def check(number: int, value: Array, outcome: Outcome) -> Outcome:
            if outcome is Outcome.DONE and _digest(value) != samples[number].digest:
                log.warning("the value of %s has changed in the store", samples[number].key)
                return Outcome.LOST
            values[number] = value
            return outcome

        async def read(some: list[int]) -> Sequence[Outcome]:
            keys, lengths = [samples[number].key for number in some], sizes[some].tolist()
            buffer = np.empty(sum(lengths), np.uint8)
            outcomes = await self._store.read(keys, lengths, buffer)
            return await asyncio.to_thread(lambda: list(map(check, some, split(buffer, lengths), outcomes)))

        while left:
            parts = self._parts(left, sizes)
            answers = await asyncio.gather(*map(read, parts))
            left = []
            for number, outcome in zip(itertools.chain(*parts), itertools.chain(*answers), strict=True):
                tries[number] += outcome is Outcome.FAILED
                if outcome is Outcome.LOST or tries[number] == TRIES:
                    lost[number] = outcome is Outcome.LOST
                elif outcome is not Outcome.DONE:
                    left.append(number)
            if left:
                if now() >= deadline:
                    hint = "It may recover; the rows are not given up"
                    raise PeerLost(f"the store has not answered for {PATIENCE_S:g} s", where=self._prefix, hint=hint)
                await asyncio.sleep(next(waits))
        return values, lost

    async def _lost_with(self, unmoved: set[str]) -> list[Place]:
        """Return the places of all samples that were lost together with the ``unmoved`` ones."""
        async with self._lookup:
            place_of = {sample.key: place for place, sample in self._samples.items() if sample.key}
            lost = await self._store.find_lost(sorted(unmoved), [key for key in place_of if key not in unmoved])
        log.warning("%d values cannot be read, and %d other values are lost with them", len(unmoved), len(lost))
        return [place_of[key] for key in lost if place_of[key] in self._samples]

    async def _remove(self, keys: Sequence[str]) -> None:
        """Remove values that are not being read, with as many attempts as needed."""
        left = [key for key in keys if key]
        waits = delays(first=_FIRST_DELAY_S)
        while left:
            free = [key for key in left if not self._reading[key]]
            answers = await asyncio.gather(*map(self._store.remove, batches(free, self._store.most_keys)))
            outcomes = zip(free, itertools.chain(*answers), strict=True)
            done = {key for key, outcome in outcomes if outcome in (Outcome.DONE, Outcome.LOST)}
            if left := [key for key in left if key not in done]:
                await asyncio.sleep(next(waits))

    async def _shrink(self, place: Place, sample: Sample) -> None:
        """Replace the value of a sample by a value of its needed columns."""
        names = sample.columns
        if not names or self._samples.get(place) is not sample:
            return
        with contextlib.suppress(BytesLost, PeerLost, TimeoutError):
            draft = _Draft(await asyncio.wait_for(self.get([place], names), PATIENCE_S))
            await self._write(draft)
            small = draft.samples[0]
            if self._samples.get(place) is sample and sample.columns == names:
                self._samples[place] = small
                await self._remove([sample.key])
            else:
                await self._remove([small.key])

    def _parts(self, rows: Sequence[int], sizes: Sizes) -> list[list[int]]:
        store = self._store
        return list(weighed_batches(rows, sizes.tolist().__getitem__, heaviest=store.most_bytes, most=store.most_keys))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        job = asyncio.create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return job


def _digest(value: Array) -> bytes:
    return hashlib.sha256(value.data).digest()


def _pack(columns: Mapping[str, Jagged], rows: Sequence[int], sizes: Sequence[int]) -> tuple[Array, list[bytes]]:
    """Return the values of ``rows`` back to back, and their digests."""
    flat = [np.ascontiguousarray(column.values).view(np.uint8) for column in columns.values()]
    bounds = [(column.offsets * column.values.itemsize).tolist() for column in columns.values()]
    cells = [data[at[row] : at[row + 1]] for row in rows for data, at in zip(flat, bounds, strict=True)]
    values = np.concatenate(cells)
    return values, list(map(_digest, split(values, sizes)))


def _column(name: str, samples: Sequence[Sample], values: Mapping[int, Array]) -> Jagged:
    """Return the cells of samples from ``values``, which lack empty samples. Raises ValueError if forms differ."""
    forms = {sample.layout.forms[name] for sample in samples}
    if len(forms) > 1:
        raise ValueError(f"rows of several forms cannot be one column {name!r}")
    ((dtype, inner),) = forms
    nothing = np.empty(0, np.uint8)
    cells = [values.get(i, nothing)[sample.layout.cell(name, sample.row)] for i, sample in enumerate(samples)]
    lengths = np.fromiter(map(len, cells), np.int64, len(cells)) // DTYPES[dtype].itemsize
    return Jagged.trusted(np.concatenate(cells).view(DTYPES[dtype]), lengths, dtype, inner)
