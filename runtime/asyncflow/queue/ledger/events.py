"""The records of a ledger: one class for each thing that can happen, and the three of a snapshot.

``QueueState.apply`` makes the durable state of these, the audit reads them on its own. A snapshot stands at the
beginning of a ledger: ``SnapshotHead``, for each partition ``SnapshotPartition`` and its ``SnapshotGroups``, and then
the events that made the tasks, slots and leases that are still there.

Invariant: a ledger is read by the version of the format that wrote it. Records are added, and fields at the end of one
with a default; whatever else changes here needs another format, which the magic of each record names (``log``).
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct

from asyncflow.identity import NEWEST
from asyncflow.queue.protocol.messages import Purpose, TaskSpec


class ControllerStarted(Struct, frozen=True, array_like=True, tag="start"):
    """A controller began to serve with this epoch; lease ids of it and all rows of later epochs are new."""

    epoch: int


class Dated(Struct, frozen=True, array_like=True, tag="at"):
    """The unix time of what follows, in seconds; recorded once a second at most."""

    at: float


class UnitJoined(Struct, frozen=True, array_like=True, tag="unit"):
    """An incarnation of a storage unit was granted an epoch for its row ids."""

    epoch: int
    unit: int
    incarnation: str


class UnitLost(Struct, frozen=True, array_like=True, tag="lost"):
    """The rows of the unit with this epoch are gone."""

    epoch: int
    unit: int


class RowsGone(Struct, frozen=True, array_like=True, tag="gone"):
    """These rows are not on their unit any more, although the unit lives."""

    partition: str
    rows: list[int]


class UnitLeaving(Struct, frozen=True, array_like=True, tag="leave"):
    """The unit with this epoch takes nothing new, and its rows move to others."""

    epoch: int
    unit: int


class Moved(Struct, frozen=True, array_like=True, tag="moved"):
    """Rows moved to ``location`` (see ``identity.location_at``), under the ids that they always had."""

    location: int
    rows: list[int]


class Declared(Struct, frozen=True, array_like=True, tag="task"):
    """A task was declared, or declared anew. controller: which decides about its leases, once and for all."""

    spec: TaskSpec
    controller: int = 0


class Typed(Struct, frozen=True, array_like=True, tag="dtype"):
    """A column was written for the first time; it has this dtype in this partition."""

    partition: str
    column: str
    dtype: str


class RowsPut(Struct, frozen=True, array_like=True, tag="put"):
    """Groups of ``size`` rows were put, or put again where rows of them were wanted.

    rows: the ids of all of them, group by group; step, oldest, newest: of each group, as in ``RowMeta``.
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
    """These serials never get any rows: their creator left them out."""

    partition: str
    serials: list[int]


class Leased(Struct, frozen=True, array_like=True, tag="lease"):
    """Rows were leased together; ticket: the claimer's own name for its claim.

    whole: False in a snapshot, where other rows of the lease were given back or dropped.
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
    """Rows are ready again with attempt + 1: given back, expired, or their holder died."""

    lease: int
    rows: list[int]
    reason: str


MOST_REASONS, OTHER_REASON, NO_REASON = 64, "another reason", "not recorded"
"""Reasons for which rows came back that are counted apart, those beyond them, and those of older ledgers."""


class RowsDropped(Struct, frozen=True, array_like=True, tag="drop"):
    """Rows were given up for ever by the holder of the lease."""

    partition: str
    rows: list[int]
    reason: str


class Opened(Struct, frozen=True, array_like=True, tag="step"):
    """So many groups of this size will reach the trainer in D_step."""

    partition: str
    step: int
    groups: int
    size: int


class Began(Struct, frozen=True, array_like=True, tag="begin"):
    """A trainer attempt began with weights θ_step: later steps un-stage, steps up to it are committed."""

    partition: str
    attempt: int
    step: int
    world: int


class SlotDecided(Struct, frozen=True, array_like=True, tag="slot"):
    """A slot was decided.

    bound: serials that now belong to the step; ranks: row ids for each rank; the last three: the step's totals so far.
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
    """Two groups changed their steps with each other: the one that took a place, and the one that was late there."""

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

    closed: the run is complete, every sample of steps up to this one should be in a final state; creator: the attempt
    of whoever creates its rows, older ones create nothing any more; expected: so many rows will be put in all.
    """

    partition: str
    field: Literal["closed", "creator", "expected"]
    value: int


class Numbered(Struct, frozen=True, array_like=True, tag="client"):
    """A client put into an open partition for the first time: the serials of its groups begin with this number."""

    partition: str
    client: bytes
    number: int


class RowsCleared(Struct, frozen=True, array_like=True, tag="rows"):
    """Rows of an open partition were cleared by its users."""

    partition: str
    rows: list[int]


class TaskReset(Struct, frozen=True, array_like=True, tag="reset"):
    """A task gets all living rows again, also those that it held: their leases are over. rows: how many it had."""

    partition: str
    task: str
    rows: int


class Peeked(Struct, frozen=True, array_like=True, tag="peek"):
    """So many rows were looked at without a lease."""

    partition: str
    rows: int


OUTCOMES = {"t": "trained", "f": "filtered", "d": "dropped"}
"""The letters of a finished group's outcome, which has one for each sample."""


class SnapshotHead(Struct, frozen=True, array_like=True, tag="snapshot"):
    """The state of a queue apart from its partitions and leases.

    leaving: epochs of units that shall leave; completed: the leases that were completed last.
    """

    epoch: int
    units: list[UnitJoined]
    leaving: list[int]
    completed: list[int]


class SnapshotPartition(Struct, frozen=True, array_like=True, tag="snapshot_partition"):
    """The state of a partition apart from its tasks, groups and trainer; see ``PartitionState`` for most fields.

    ended: how many rows are trained, filtered and dropped, those in ``SnapshotGroups`` included; clients: their
    numbers; used, skipped: serials as (first, end); reasons: of the rows that were ``returned``, with how many each.
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

    state: 0 live or bound, 2 wanted, above that final; lost: bound, but without bytes; moved: the location where it
    lies, 0 where it was put; works: (task, attempt, lease that completed it, its holder).
    """

    row: int
    state: int
    lost: bool
    moved: int
    works: list[tuple[str, int, int, str]]


class GroupRecord(Struct, frozen=True, array_like=True):
    """A group: one that is finished has only an outcome, see ``OUTCOMES``, any other rows; instead_of: ``RowGroup``."""

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
