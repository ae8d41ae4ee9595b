"""The parts of a queue's state: rows, their groups, the progress of tasks with them, and leases.

A row's ``state`` is one of: ``LIVE`` (lease tasks work on it, or it waits for the trainer), ``BOUND`` (it belongs to a
slot of the running trainer attempt), ``WANTED`` (its bytes were lost and it must be put again), or a final state.
``TaskWork`` holds, for each task, whether the row is leased or done.

Invariants: a sample has one ``Row``, which has one state. A row id belongs to one ``Row`` forever, at any location. The
rows of a group are put on one unit, and move together. A row is in at most one lease of a task. A lease without rows
does not exist. Fields marked volatile are reported by the units and are not in the ledger.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from msgspec import Struct

from asyncflow.errors import ProtocolError
from asyncflow.flow.schedule import VersionWindow
from asyncflow.identity import NEWEST, SampleKey, location_of, unit_at
from asyncflow.queue.protocol.calls import LEASE_BITS
from asyncflow.queue.protocol.messages import TOKENS_TAG, Purpose, RowMeta, Tag
from asyncflow.queue.protocol.unit_calls import Cells
from asyncflow.rpc.access import HOLDER_SEPARATOR, place_of


def by_row(cells: Cells, count: int) -> list[dict[str, int]]:
    """Return the bytes of each column of each of ``count`` rows. Raises ProtocolError for another number of rows."""
    if wrong := set(map(len, cells.sizes.values())) - {count}:
        raise ProtocolError(f"sizes of {sorted(wrong)} rows came with {count} rows", where="controller")
    columns = [dict(zip(cells.sizes, sizes, strict=True)) for sizes in zip(*cells.sizes.values(), strict=True)]
    return columns or [{} for _ in range(count)]


class RowState(enum.IntEnum):
    """The state of a sample. CLEARED: a row of an open partition that its users have cleared."""

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
        """True if the state no longer changes, unless a trainer resumes from an older checkpoint."""
        return self >= FINAL


FINAL: Final = RowState.TRAINED
"""The first of the final states."""
LETTERS = {RowState.TRAINED: "t", RowState.FILTERED: "f", RowState.DROPPED: "d"}
STATES = {letter: state for state, letter in LETTERS.items()}


class TaskWork(Struct, frozen=True, gc=False):
    """Progress of a task with a row. lease, done: id of the lease in force, or of the lease that completed it; or 0.

    holder: the process that held the lease ``done``, as in the lease's name.
    """

    attempt: int = 0
    lease: int = 0
    done: int = 0
    holder: str = ""

    @property
    def busy(self) -> bool:
        """True if the task has leased or completed the row."""
        return bool(self.lease or self.done)


IDLE = TaskWork()
ANY_VERSION = VersionWindow(0, NEWEST)
NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class Row(Struct, eq=False):
    """One sample. lost: it is bound, but its bytes are lost; moved: its location, 0 if it is where it was put.

    work: progress by task. Mappings are replaced and never changed, so that rows may share them.

    Volatile: columns: bytes of each admitted column; partial: bytes of unfinished columns; tokens; tags; reported:
    whether the unit has reported the row; since: when this controller learned of it, on its clock.
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
    reported: bool = False

    def add(self, columns: Mapping[str, int], *, partial: bool = False) -> None:
        """Note admitted columns, which replace columns of the same name, or unfinished ones (``partial``)."""
        if partial:
            fresh = {name: size for name, size in columns.items() if name not in self.columns}
            self.partial = {**self.partial, **fresh}
        else:
            self.reported, self.columns = True, {**self.columns, **columns}
            if self.partial:
                self.partial = {name: size for name, size in self.partial.items() if name not in columns}

    def lose(self) -> None:
        """Note that its bytes are lost."""
        self.columns, self.partial, self.reported = NOTHING, NOTHING, False

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
        """The incarnation of the unit that holds it, see ``identity.location_at``."""
        return self.moved or location_of(self.row)

    @property
    def meta(self) -> RowMeta:
        """The sample's description, with all values that writers have added so far."""
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
        """Return a tag of the writer as a number from 0 to 2**32, or ``otherwise`` if it is not a number."""
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
    """The samples of one prompt. rows: by sample number; instead_of: the group that it replaced in its step."""

    partition: str
    purpose: Purpose
    serial: int
    step: int
    window: VersionWindow
    rows: list[Row] = []
    instead_of: int | None = None


class Finished(NamedTuple):
    """The only record of a group whose samples are final. outcome: a letter for each sample, see ``LETTERS``."""

    window: VersionWindow
    outcome: str


finished = lru_cache(maxsize=1024)(Finished)
"""The constructor of ``Finished``; groups of a step with the same outcome share one, as a long run has millions."""


_COUNTER_BITS = 40
_REMEMBERED = 4096


class Lease(Struct, eq=False):
    """One claim that was granted. rows: ids of the open rows, in the order leased; until: end, on the caller's clock.

    whole: no row of it was given back or dropped; holder: the process that the worker's name contains, ``ROLE-INDEX``,
    or "" if it contains none.
    """

    id: int
    partition: str
    task: str
    worker: str
    ticket: str
    rows: dict[int, None]
    until: float = math.inf
    whole: bool = True
    holder: str = ""

    def __post_init__(self) -> None:
        place = place_of(self.worker)
        self.holder = "" if place is None else f"{place[0]}-{place[1]}"

    @property
    def name(self) -> str:
        """The lease as clients name it: its id, and the process that holds it, which alone may use it."""
        return f"{self.id:x}{HOLDER_SEPARATOR}{self.holder}" if self.holder else f"{self.id:x}"


def lease_id(*, epoch: int, counter: int, controller: int = 0) -> int:
    """Return the id of the ``counter``-th lease of the controller with this epoch; no other lease ever has it."""
    return controller << LEASE_BITS | epoch << _COUNTER_BITS | counter


class LeaseTable:
    """The leases in force, and the last ones whose rows were all completed.

    next_deadline: no lease expires before this time, which may be too early; infinite if ``due`` found no lease.
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
        """Return the lease that was granted to the claim ``ticket`` of ``worker``, if it is in force."""
        return self._tickets.get((worker, ticket))

    def of_worker(self, worker: str) -> list[Lease]:
        """Return the leases that ``worker`` holds."""
        return [lease for lease in self._open.values() if lease.worker == worker]

    def add(self, lease: Lease) -> None:
        """Add a lease; it has no deadline before ``extend``."""
        self._open[lease.id] = lease
        self._tickets[lease.worker, lease.ticket] = lease

    def extend(self, lease: Lease, *, until: float) -> None:
        """Set the deadline of ``lease``."""
        lease.until = until
        self.next_deadline = min(self.next_deadline, until)

    def release(self, lease_id: int, rows: Iterable[int], *, done: bool = False) -> None:
        """Remove ``rows``, ``done`` or not, from their lease; the lease ends with its last row."""
        lease = self._open.get(lease_id)
        if lease is None:
            return
        lease.whole &= done
        for row in rows:
            lease.rows.pop(row, None)
        if not lease.rows:
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
