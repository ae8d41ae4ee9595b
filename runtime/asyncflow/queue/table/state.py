"""Rows, their groups, how far tasks have come with them, and leases: what the state of a queue is made of.

A row's ``state`` is where it stands for good: ``LIVE`` (lease tasks work on it, or it waits for the trainer), ``BOUND``
(it belongs to a slot of the running trainer attempt), ``WANTED`` (its bytes were lost; to be put again), or final. What
is ready, leased or done is told for each task by ``TaskWork``.

Invariants: a sample has one ``Row`` and that has one state; a row id belongs to one ``Row`` for ever, wherever it lies;
the rows of a group are put on one unit, and go to another together; a row is in at most one lease of a task; a lease
without rows does not exist. Fields marked volatile are told by the units and not by the ledger.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from msgspec import Struct

from asyncflow.errors import ProtocolError
from asyncflow.flow.schedule import VersionWindow
from asyncflow.identity import NEWEST, SampleKey, location_of, unit_at
from asyncflow.queue.protocol.calls import LEASE_BITS
from asyncflow.queue.protocol.messages import TOKENS_TAG, Purpose, RowMeta, Tag
from asyncflow.queue.protocol.unit_calls import Cells
from asyncflow.rpc.access import HELD_BY, place_of


def by_row(cells: Cells, count: int) -> list[dict[str, int]]:
    """Return the bytes of each column of each of ``count`` rows. ProtocolError where the cells are those of others."""
    if wrong := {name: len(sizes) for name, sizes in cells.sizes.items() if len(sizes) != count}:
        raise ProtocolError(f"sizes of {wrong} rows came with {count} rows", where="controller")
    names = tuple(cells.sizes)
    if not names:
        return [{} for _ in range(count)]
    return [dict(zip(names, sizes, strict=True)) for sizes in zip(*cells.sizes.values(), strict=True)]


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

    @property
    def busy(self) -> bool:
        """It holds the row, or has completed it."""
        return bool(self.lease or self.done)


IDLE = TaskWork()
ANY_VERSION = VersionWindow(0, NEWEST)
NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class Row(Struct, eq=False):
    """One sample. lost: its bytes are gone although it is bound; moved: its location, 0 while it lies where it was put.

    work: by task. Mappings are replaced and never changed, so that rows may share them.

    Volatile: columns, the bytes of each that was admitted; partial, bytes of what was given back unfinished; tokens,
    tags; here, whether its unit has told of it; since, when this controller learnt of it, on its clock.
    """

    group: RowGroup
    sample: int
    row: int
    state: RowState = RowState.LIVE
    since: float = 0.0
    work: Mapping[str, TaskWork] = NOTHING
    columns: Mapping[str, int] = NOTHING
    partial: Mapping[str, int] = NOTHING
    tags: dict[str, Tag] = {}
    tokens: int = 0
    moved: int = 0
    lost: bool = False
    here: bool = False

    def add(self, columns: Mapping[str, int], *, partial: bool = False) -> None:
        """Take note of columns that were admitted, in place of those of that name, or given back unfinished."""
        if partial:
            fresh = {name: size for name, size in columns.items() if name not in self.columns}
            self.partial = {**self.partial, **fresh}
        else:
            self.here, self.columns = True, {**self.columns, **columns}
            if self.partial:
                self.partial = {name: size for name, size in self.partial.items() if name not in columns}

    def lose(self) -> None:
        """Take note that its bytes are gone."""
        self.columns, self.partial, self.here = NOTHING, NOTHING, False

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
        """The place where it lies: an incarnation of a unit, see ``identity.location_at``."""
        return self.moved or location_of(self.row)

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
        return self.number(TOKENS_TAG)

    def number(self, tag: str, *, otherwise: int = 0) -> int:
        """Return a tag, which its writer chose, as a number from 0 to 2**32; ``otherwise`` where it is none."""
        value = self.tags.get(tag)
        return int(min(max(0, value), 1 << 32)) if isinstance(value, int | float) and value == value else otherwise

    @property
    def weight(self) -> int:
        """Tokens of prompt and response, at least 1."""
        return max(1, self.tokens + self.response_tokens)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of every column that can be fetched."""
        return {**self.partial, **self.columns} if self.partial else self.columns


class RowGroup(Struct, eq=False):
    """The samples of one prompt. rows: all, by sample number; instead_of: the group whose place in its step it took."""

    partition: str
    purpose: Purpose
    serial: int
    step: int
    window: VersionWindow
    rows: list[Row] = []
    instead_of: int | None = None


class Finished(NamedTuple):
    """All that is kept of a group whose samples are final. outcome: a letter for each of them, see ``LETTERS``."""

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


class LeaseTable:
    """The leases in force, and the last ones whose rows were all completed.

    next_deadline: a time before which no lease ends, perhaps long before; infinite without leases since ``due``.
    """

    def __init__(self) -> None:
        self.completed: dict[int, None] = {}
        self._open: dict[int, Lease] = {}
        self._tickets: dict[tuple[str, str], Lease] = {}
        self.next_deadline = math.inf

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
        lease.until = until
        self.next_deadline = min(self.next_deadline, until)

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

    def _end(self, lease: Lease) -> None:
        del self._open[lease.id]
        if self._tickets.get((lease.worker, lease.ticket)) is lease:
            del self._tickets[lease.worker, lease.ticket]
        if lease.whole:
            self.remember(lease.id)

    def remember(self, lease_id: int) -> None:
        """Note that a lease has ended because all its rows were completed."""
        self.completed[lease_id] = None
        if len(self.completed) > _REMEMBERED:
            del self.completed[next(iter(self.completed))]

    def due(self, now: float) -> list[Lease]:
        """Return the leases whose deadline has passed. They stay in force until their rows are released."""
        self.next_deadline = min((lease.until for lease in self if lease.until > now), default=math.inf)
        return [lease for lease in self if lease.until <= now]
