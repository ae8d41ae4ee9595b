"""Rows, their groups, how far tasks have come with them, and leases: what the state of a queue is made of.

A row's ``state`` is where it stands for good: ``LIVE`` (lease tasks work on it, or it waits for the trainer), ``BOUND``
(it belongs to a slot of the running trainer attempt), ``WANTED`` (its bytes were lost; to be put again), or final. What
is ready, leased or done is told for each task by ``TaskWork``.

There may be a million rows, so what many have in common they share: a ``Shape`` names the columns of all rows that got
the same ones in the same order, ``SharedSizes`` has the bytes of all rows of a put, a ``TaskWork`` serves all rows of a
lease, and none of these changes.

Invariants: a sample has one ``Row`` and that has one state; a row id belongs to one ``Row`` for ever, wherever it lies;
the rows of a group are put on one unit, and go to another together; a row is in at most one lease of a task; a lease
without rows does not exist. Fields marked volatile are told by the units and not by the ledger.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from msgspec import Struct

from asyncflow.errors import ProtocolError
from asyncflow.flow.schedule import VersionWindow
from asyncflow.identity import NEWEST, SampleKey, home_of, unit_at
from asyncflow.queue.protocol.batches import alike, fit, one, part
from asyncflow.queue.protocol.batches import chosen_sizes as chosen
from asyncflow.queue.protocol.calls import LEASE_BITS
from asyncflow.queue.protocol.messages import TOKENS_TAG, Purpose, RowMeta, Tag
from asyncflow.queue.protocol.unit_calls import Cells
from asyncflow.rpc.access import HELD_BY, place_of


class SharedSizes:
    """Bytes of the columns of rows that were put together. first: id of the first of them; the others follow."""

    __slots__ = ("_first", "_sizes")

    def __init__(self, cells: Cells, *, first: int) -> None:
        self._sizes = tuple(cells.sizes.values())
        self._first = first

    def of(self, row: int) -> tuple[int, ...]:
        """Return the bytes of each column of a row."""
        return tuple([part(sizes, row - self._first, 1)[0] for sizes in self._sizes])

    def columns(self, rows: Sequence[int]) -> list[bytes]:
        """Return the bytes of ``rows``, column by column."""
        start, count = rows[0] - self._first, len(rows)
        follow = list(rows) == list(range(rows[0], rows[0] + count))
        indices = range(start, start + count) if follow else [row - self._first for row in rows]
        return [chosen(sizes, indices) for sizes in self._sizes]


def sizes_of(cells: Cells, rows: Sequence[int]) -> SharedSizes | tuple[int, ...]:
    """Return the sizes that each of ``rows``, which were put together, keeps."""
    return SharedSizes(cells, first=rows[0]) if len(rows) > 1 else tuple(map(one, cells.sizes.values()))


def check(cells: Cells, count: int) -> None:
    """Raise ProtocolError where they are not those of ``count`` rows."""
    if wrong := {name: len(sizes) for name, sizes in cells.sizes.items() if not fit(sizes, count)}:
        raise ProtocolError(f"sizes in {wrong} bytes came with {count} rows", where="controller")


def by_row(cells: Cells, count: int) -> tuple[tuple[str, ...], list[tuple[int, ...]]]:
    """Return the columns' names, and the bytes of each of ``count`` rows. ProtocolError where there are not so many."""
    check(cells, count)
    names, sizes = tuple(cells.sizes), cells.sizes.values()
    if all(map(alike, sizes)):
        return names, [tuple(map(one, sizes))] * count
    return names, list(zip(*[part(of, 0, count) for of in sizes], strict=True))


class RowState(enum.IntEnum):
    """Where a sample stands. CLEARED: a row of an open partition that its users have cleared."""

    LIVE = 0
    BOUND = 1
    WANTED = 2
    TRAINED = 3
    FILTERED = 4
    DROPPED = 5
    CLEARED = 6

    __hash__ = int.__hash__

    @property
    def final(self) -> bool:
        """Nothing more happens to it, unless a trainer resumes from an older checkpoint."""
        return self >= FINAL


FINAL: Final = RowState.TRAINED
"""The first of the final states."""
LETTERS = {RowState.TRAINED: "t", RowState.FILTERED: "f", RowState.DROPPED: "d"}
STATES = {letter: state for state, letter in LETTERS.items()}


class TaskWork(Struct, frozen=True, gc=False):
    """Progress of a task with a row. lease, done: id of the lease in force or that completed it; 0 is none.

    holder: the process that held the lease ``done``, as the name of the lease says it.
    """

    attempt: int = 0
    lease: int = 0
    done: int = 0
    holder: str = ""


IDLE = TaskWork()
ANY_VERSION = VersionWindow(0, NEWEST)
NO_WORK: dict[str, TaskWork] = {}
NO_TAGS: dict[str, Tag] = {}
NO_SIZES: dict[str, int] = {}


class Shape:
    """The columns that a row has, in the order in which it got them."""

    __slots__ = ("_next", "has", "names")

    def __init__(self, names: tuple[str, ...] = ()) -> None:
        self.names = names
        self.has = frozenset(names)
        self._next: dict[tuple[str, ...], Shape] = {}

    def plus(self, names: tuple[str, ...]) -> Shape:
        """Return the shape of a row of this one that gets further columns."""
        shape = self._next.get(names)
        if shape is None:
            fresh = tuple(name for name in names if name not in self.has)
            shape = self._next[names] = self._next.setdefault(fresh, Shape(self.names + fresh)) if fresh else self
        return shape


class Row(Struct, eq=False):
    """One sample. lost: its bytes are gone although it is bound; moved: its location, 0 while it lies where it was put.

    work (by task), tags and partial are replaced and never changed, so that rows may share them.

    Volatile: shape and cells, the admitted columns and their bytes, as they were told or of this row alone; partial,
    bytes of what was given back unfinished; tokens, tags; here, whether its unit has told of it; since, when this
    controller learnt of it, on its clock.
    """

    group: RowGroup
    sample: int
    row: int
    state: RowState
    shape: Shape
    since: float
    work: Mapping[str, TaskWork]
    partial: Mapping[str, int]
    tags: dict[str, Tag]
    cells: SharedSizes | tuple[int, ...] = ()
    tokens: int = 0
    moved: int = 0
    lost: bool = False
    here: bool = False

    def present(self, names: tuple[str, ...], sizes: tuple[int, ...]) -> None:
        """Take note of columns that were admitted, in place of those of that name."""
        shape = self.shape.plus(names)
        if len(shape.names) == len(self.shape.names) + len(names):
            self.cells = self.own_cells + sizes
        elif names:
            known = self.columns | dict(zip(names, sizes, strict=True))
            self.cells = tuple([known[name] for name in shape.names])
        self.shape = shape
        self.here = True
        if self.partial:
            self.partial = {name: size for name, size in self.partial.items() if name not in names}

    def absent(self, shape: Shape) -> None:
        """Take note that its bytes are gone. shape: that of a row without columns."""
        self.shape, self.cells, self.partial, self.here = shape, (), NO_SIZES, False

    @property
    def own_cells(self) -> tuple[int, ...]:
        """Bytes of the columns of its shape."""
        return self.cells.of(self.row) if isinstance(self.cells, SharedSizes) else self.cells

    @property
    def columns(self) -> dict[str, int]:
        """Bytes of each admitted column."""
        return dict(zip(self.shape.names, self.own_cells, strict=True))

    @property
    def key(self) -> SampleKey:
        """The sample's name."""
        return SampleKey(self.group.serial, self.sample)

    @property
    def unit(self) -> int:
        """Index of the unit that holds it."""
        return unit_at(self.location)

    @property
    def location(self) -> int:
        """The place where it lies: an incarnation of a unit, see ``identity.home``."""
        return self.moved or home_of(self.row)

    @property
    def meta(self) -> RowMeta:
        """The sample's description, with everything its writers have added so far."""
        group = self.group
        return RowMeta(
            partition=group.partition,
            serial=group.serial,
            sample=self.sample,
            step=group.step,
            purpose=group.purpose,
            min_version=group.window.oldest,
            max_version=group.window.newest,
            tokens=self.tokens,
            tags=self.tags,
        )

    @property
    def response_tokens(self) -> int:
        """Tokens of its response, as its writer tagged it."""
        return int(self.tags.get(TOKENS_TAG, 0))

    @property
    def weight(self) -> int:
        """Tokens of prompt and response, at least 1."""
        return max(1, self.tokens + self.response_tokens)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of every column that can be fetched."""
        return {**self.partial, **self.columns}


class RowGroup(Struct, eq=False):
    """The samples of one prompt. rows: by sample number; all ``size`` of them, in whatever state."""

    partition: str
    purpose: Purpose
    serial: int
    size: int
    step: int
    window: VersionWindow
    rows: list[Row] = []

    @property
    def outcome(self) -> str:
        """A letter for each sample, once all are final; empty before, and for those of an open partition."""
        if not all(row.state.final for row in self.rows):
            return ""
        return "".join([LETTERS[row.state] for row in self.rows])


def new_row(group: RowGroup, sample: int, row: int, state: RowState, shape: Shape, since: float) -> Row:
    """Return a row with which nothing has happened, and of which its unit has not told yet."""
    return Row(group, sample, row, state, shape, since, NO_WORK, NO_SIZES, NO_TAGS)


class Finished(NamedTuple):
    """All that is kept of a group whose samples are final."""

    step: int
    window: VersionWindow
    outcome: str


_COUNTER_BITS = 40
_REMEMBERED = 4096


class Lease(Struct, eq=False):
    """One claim that was met. rows: ids of those still open, as they were given; until: on the caller's clock.

    whole: no row of it was given back or dropped.
    """

    id: int
    partition: str
    task: str
    worker: str
    ticket: str
    rows: dict[int, None]
    until: float = math.inf
    whole: bool = True

    @property
    def holder(self) -> str:
        """The process after which the worker is named, ``ROLE-INDEX``; "" where it is named after none."""
        place = place_of(self.worker)
        return "" if place is None else f"{place[0]}-{place[1]}"

    @property
    def name(self) -> str:
        """The lease as clients name it: its id, and the process that holds it, which alone may use it."""
        return f"{self.id:x}{HELD_BY}{holder}" if (holder := self.holder) else f"{self.id:x}"


def lease_id(*, epoch: int, counter: int, controller: int = 0) -> int:
    """Return the id of the ``counter``-th lease of the controller with this epoch: never used again."""
    return controller << LEASE_BITS | epoch << _COUNTER_BITS | counter


def parse_lease(name: str) -> tuple[int, str]:
    """Return the id and the holder that ``Lease.name`` wrote; the id 0, which no lease has, for anything else."""
    number, _, holder = name.partition(HELD_BY)
    try:
        return int(number, 16), holder
    except ValueError:
        return 0, holder


class LeaseTable:
    """The leases in force, and the last ones whose rows were all completed.

    Deadlines lie in a heap, where a renewal costs nothing and an entry that is too early is put back when it comes up.
    """

    def __init__(self) -> None:
        self._completed: dict[int, None] = {}
        self._open: dict[int, Lease] = {}
        self._tickets: dict[tuple[str, str], Lease] = {}
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._open.values())

    def get(self, lease: int) -> Lease | None:
        """Return the lease if it is in force."""
        return self._open.get(lease)

    def of_ticket(self, worker: str, ticket: str) -> Lease | None:
        """Return the lease that the claim ``ticket`` of ``worker`` was given, if it is in force."""
        return self._tickets.get((worker, ticket))

    def of_worker(self, worker: str) -> list[Lease]:
        """Return the leases that ``worker`` holds."""
        return [lease for lease in self._open.values() if lease.worker == worker]

    def add(self, lease: Lease) -> None:
        """Enter a lease; it has no deadline before ``extend``."""
        self._open[lease.id] = lease
        self._tickets[lease.worker, lease.ticket] = lease

    def extend(self, lease: Lease, *, until: float) -> None:
        """Keep ``lease`` in force until then."""
        if lease.until == math.inf:
            heapq.heappush(self._heap, (until, lease.id))
        lease.until = until

    def release(self, lease_id: int, rows: Iterable[int], *, done: bool = False) -> None:
        """Take ``rows``, ``done`` or not, out of their lease; the lease ends with its last row."""
        lease = self._open.get(lease_id)
        if lease is None:
            return
        lease.whole &= done
        for row in rows:
            lease.rows.pop(row, None)
        if not lease.rows:
            self._end(lease)

    def cancel(self, lease_id: int) -> None:
        """End a lease, if it is in force: none of its rows was completed."""
        if (lease := self._open.get(lease_id)) is not None:
            lease.whole = False
            self._end(lease)

    def _end(self, lease: Lease) -> None:
        del self._open[lease.id]
        if self._tickets.get((lease.worker, lease.ticket)) is lease:
            del self._tickets[lease.worker, lease.ticket]
        if lease.whole:
            self.remember(lease.id)

    def remember(self, lease_id: int) -> None:
        """Note that a lease has ended because all its rows were completed."""
        self._completed[lease_id] = None
        if len(self._completed) > _REMEMBERED:
            del self._completed[next(iter(self._completed))]

    def completed(self) -> list[int]:
        """Return the leases that ended so last."""
        return list(self._completed)

    def was_completed(self, lease_id: int) -> bool:
        """Tell whether a lease is one of them."""
        return lease_id in self._completed

    def due(self, now: float) -> list[Lease]:
        """Return the leases whose deadline has passed. They stay in force until their rows are released."""
        ended: list[Lease] = []
        while self._heap and self._heap[0][0] <= now:
            _, number = heapq.heappop(self._heap)
            lease = self._open.get(number)
            if lease is None:
                continue
            if lease.until <= now:
                ended.append(lease)
            else:
                heapq.heappush(self._heap, (lease.until, number))
        while self._heap and self._heap[0][1] not in self._open:
            heapq.heappop(self._heap)
        return ended

    @property
    def next_deadline(self) -> float:
        """A time before which no lease ends, perhaps long before; infinite without leases since ``due``."""
        return self._heap[0][0] if self._heap else math.inf
