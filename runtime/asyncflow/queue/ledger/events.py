"""The records of a ledger: one class for each kind of event, and three for a snapshot.

``QueueState.apply`` builds the durable state from them; the audit reads them independently. A snapshot is at the start
of a ledger: ``SnapshotHead``, then ``SnapshotPartition`` and its ``SnapshotGroups`` for each partition, and then the
events of the current tasks, slots and leases.

Invariant: a ledger is read by the version of the format that wrote it. Record types may be added, and fields with a
default at the end of a record. Any other change needs another format, which the magic of each record names (``log``).
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct

from asyncflow.identity import NEWEST
from asyncflow.queue.protocol.messages import Purpose, TaskSpec


class ControllerStarted(Struct, frozen=True, array_like=True, tag="start"):
    """A controller started to serve with this epoch; its lease ids, and all rows of later epochs, are new."""

    epoch: int


class Dated(Struct, frozen=True, array_like=True, tag="at"):
    """The unix time, in seconds, of the records that follow; recorded at most once a second."""

    at: float


class UnitJoined(Struct, frozen=True, array_like=True, tag="unit"):
    """An incarnation of a storage unit was granted an epoch for its row ids."""

    epoch: int
    unit: int
    incarnation: str


class UnitLost(Struct, frozen=True, array_like=True, tag="lost"):
    """The rows of the unit with this epoch are lost."""

    epoch: int
    unit: int


class RowsGone(Struct, frozen=True, array_like=True, tag="gone"):
    """These rows are no longer on their unit, although the unit lives."""

    partition: str
    rows: list[int]


class UnitLeaving(Struct, frozen=True, array_like=True, tag="leave"):
    """The unit with this epoch accepts nothing new, and its rows move to other units."""

    epoch: int
    unit: int


class Moved(Struct, frozen=True, array_like=True, tag="moved"):
    """Rows moved to ``location`` (see ``identity.location_at``) and kept their ids."""

    location: int
    rows: list[int]


class Declared(Struct, frozen=True, array_like=True, tag="task"):
    """A task was declared or changed. controller: decides about the task's leases, permanently."""

    spec: TaskSpec
    controller: int = 0


class Typed(Struct, frozen=True, array_like=True, tag="dtype"):
    """A column was written for the first time, and has this dtype in this partition."""

    partition: str
    column: str
    dtype: str


class RowsPut(Struct, frozen=True, array_like=True, tag="put"):
    """Groups of ``size`` rows were put, or put again because some of their rows were wanted.

    rows: the ids of all rows, group by group; step, oldest, newest: values of each group, as in ``RowMeta``.
    """

    partition: str
    purpose: Purpose
    serials: list[int]
    size: int
    rows: list[int]
    step: int = 0
    oldest: int = 0
    newest: int = NEWEST


class Skipped(Struct, frozen=True, array_like=True, tag="skip"):
    """These serials never get rows, because their creator skipped them."""

    partition: str
    serials: list[int]


class Leased(Struct, frozen=True, array_like=True, tag="lease"):
    """Rows were leased together. ticket: the worker's own name for its claim.

    whole: False in a snapshot if other rows of the lease were given back or dropped.
    """

    lease: int
    partition: str
    task: str
    worker: str
    ticket: str
    rows: list[int]
    whole: bool = True


class Completed(Struct, frozen=True, array_like=True, tag="done"):
    """Rows were completed by the holder of the lease."""

    lease: int
    rows: list[int]


class Returned(Struct, frozen=True, array_like=True, tag="back"):
    """Rows are ready again with attempt + 1: they were given back, their lease expired, or its holder died."""

    lease: int
    rows: list[int]
    reason: str


MOST_REASONS, OTHER_REASON, NO_REASON = 64, "another reason", "not recorded"
"""The number of reasons for returned rows that are counted separately, and the names for other and unknown ones."""


class RowsDropped(Struct, frozen=True, array_like=True, tag="drop"):
    """The holder of the lease gave up rows permanently."""

    partition: str
    rows: list[int]
    reason: str


class Opened(Struct, frozen=True, array_like=True, tag="step"):
    """D_step will have this number of groups of this size."""

    partition: str
    step: int
    groups: int
    size: int


class Began(Struct, frozen=True, array_like=True, tag="begin"):
    """A trainer attempt started from weights θ_step: later steps are reset, and steps up to it are committed."""

    partition: str
    attempt: int
    step: int
    world: int


class SlotDecided(Struct, frozen=True, array_like=True, tag="slot"):
    """A slot was decided.

    bound: serials that now belong to the step; ranks: row ids of each rank; groups, samples, response_tokens: totals of
    the step so far.
    """

    partition: str
    step: int
    slot: int
    bound: list[int]
    ranks: list[list[int]]
    last: bool
    groups: int
    samples: int
    response_tokens: int


class Exchanged(Struct, frozen=True, array_like=True, tag="exchange"):
    """Two groups exchanged their steps: the first took the place of the second, which was late."""

    partition: str
    serials: tuple[int, int]


class RankDone(Struct, frozen=True, array_like=True, tag="rank"):
    """A rank finished the optimizer step."""

    partition: str
    step: int
    rank: int


class Committed(Struct, frozen=True, array_like=True, tag="commit"):
    """A checkpoint contains all steps up to this one."""

    partition: str
    step: int


class Cleared(Struct, frozen=True, array_like=True, tag="clear"):
    """All rows of the partition were forgotten."""

    partition: str


class PartitionSet(Struct, frozen=True, array_like=True, tag="set"):
    """A value of a partition was set.

    closed: the run is complete, and every sample of steps up to this one should be final; creator: the attempt that
    creates its rows, so that older attempts are refused; expected: the total number of rows that will be put.
    """

    partition: str
    field: Literal["closed", "creator", "expected"]
    value: int


class Numbered(Struct, frozen=True, array_like=True, tag="client"):
    """A client put rows into an open partition for the first time; the serials of its groups start with this number."""

    partition: str
    client: bytes
    number: int


class RowsCleared(Struct, frozen=True, array_like=True, tag="rows"):
    """Rows of an open partition were cleared by its users."""

    partition: str
    rows: list[int]


class TaskReset(Struct, frozen=True, array_like=True, tag="reset"):
    """All living rows became ready again for a task; its leases ended. rows: number leased or completed before."""

    partition: str
    task: str
    rows: int


class Peeked(Struct, frozen=True, array_like=True, tag="peek"):
    """This number of rows was read without a lease."""

    partition: str
    rows: int


OUTCOMES = {"t": "trained", "f": "filtered", "d": "dropped"}
"""The letters in the outcome of a finished group, which has one letter for each sample."""


class SnapshotHead(Struct, frozen=True, array_like=True, tag="snapshot"):
    """The state of a queue apart from its partitions and leases.

    leaving: epochs of units that are to leave; completed: the last leases whose rows were all completed.
    """

    epoch: int
    units: list[UnitJoined]
    leaving: list[int]
    completed: list[int]


class SnapshotPartition(Struct, frozen=True, array_like=True, tag="snapshot_partition"):
    """The state of a partition apart from its tasks, groups and trainer; see ``PartitionState`` for most fields.

    ended: numbers of trained, filtered and dropped rows, including those in ``SnapshotGroups``; clients: numbers by
    client; used, skipped: spans of serials as (first, end); reasons: number of ``returned`` rows by reason.
    """

    name: str
    purpose: Purpose | None
    schema: dict[str, str]
    creator: int
    expected: int | None
    closed: int | None
    resets: int
    peeked: int
    returned: int
    cleared: int
    forgotten: int
    attempts: list[int]
    ended: list[int]
    clients: dict[bytes, int]
    used: list[tuple[int, int]]
    skipped: list[tuple[int, int]] = []
    reasons: dict[str, int] = {}


class RowRecord(Struct, frozen=True, array_like=True):
    """A row of an unfinished group.

    state: 0 live or bound, 2 wanted, higher is final; lost: bound, but without bytes; moved: its location, 0 if it is
    where it was put; works: (task, attempt, lease that completed it, its holder).
    """

    row: int
    state: int
    lost: bool
    moved: int
    works: list[tuple[str, int, int, str]]


class GroupRecord(Struct, frozen=True, array_like=True):
    """A group: a finished one has an outcome (see ``OUTCOMES``), others have rows; instead_of: see ``RowGroup``."""

    serial: int
    step: int
    oldest: int
    newest: int
    outcome: str
    rows: list[RowRecord]
    instead_of: int | None = None


class SnapshotGroups(Struct, frozen=True, array_like=True, tag="snapshot_groups"):
    """Some of the groups of a partition."""

    partition: str
    groups: list[GroupRecord]


Event: TypeAlias = (
    ControllerStarted
    | Dated
    | UnitJoined
    | UnitLost
    | RowsGone
    | Declared
    | Typed
    | RowsPut
    | Skipped
    | Leased
    | Completed
    | Returned
    | RowsDropped
    | Opened
    | Began
    | SlotDecided
    | Exchanged
    | RankDone
    | Committed
    | Cleared
    | PartitionSet
    | RowsCleared
    | TaskReset
    | Peeked
    | UnitLeaving
    | Moved
    | Numbered
    | SnapshotHead
    | SnapshotPartition
    | SnapshotGroups
)
