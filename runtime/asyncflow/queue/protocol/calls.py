"""The calls to controllers by clients and by other controllers, each with a request and a reply.

If a queue has several controllers, number 0, the *primary*, decides about rows. The others, *replicas*, copy its rows
and decide about the leases of their own tasks. A lease's id contains the controller that granted it.

Invariant: every call can be repeated after its reply was lost. Puts are identified by the numbers of their groups,
claims by ticket, completions by lease, slots by number; other calls set or return values.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Raw, Struct

from asyncflow.queue.protocol.messages import LeasedRow, Slot, TaskSpec
from asyncflow.rpc.access import HOLDER_SEPARATOR

Seconds = Annotated[float, Meta(ge=0)]
Bytes = Annotated[int, Meta(ge=0)]
Attempt = Annotated[int, Meta(ge=0)]
_Count = Annotated[int, Meta(ge=0)]

NOWHERE = -1
"""The unit of a row that does not exist, and of a move without a destination."""
WRITE = "write:"
"""The prefix of the name that a write without a lease sends in place of a lease; the writer chooses the rest."""
LEASE_BITS = 59
"""A lease's id contains its epoch and count in these lower bits, and the controller that granted it above them."""


class Done(Struct, frozen=True):
    """An empty reply: the request was carried out."""


class Nothing(Struct, frozen=True):
    """A request without parameters."""


class InPartition(Struct, frozen=True):
    """A request about a partition; used without more fields to read the partition's state."""

    partition: str


class TrainerStep(InPartition, frozen=True):
    """A step of a trainer attempt; used without more fields to report that a checkpoint contains the step."""

    attempt: int
    step: int


class Declare(Struct, frozen=True):
    """Declare tasks."""

    specs: list[TaskSpec]


class ClaimRows(InPartition, frozen=True, eq=False, omit_defaults=True):
    """Lease rows; parks for ``wait_s`` seconds. ticket: the worker's name for the claim, which gets at most one lease.

    max_rows: limit of rows, but at least one whole group if the task takes groups; max_groups: limit of groups;
    version, accept: see ``VersionFilter``; min_rows: granted only with this number of rows; until_done: do not report
    the end of the task while other workers hold rows of it, which may be returned.
    """

    task: str
    worker: str
    ticket: str
    max_rows: Annotated[int, Meta(ge=1)] = 1
    max_groups: int | None = None
    version: int | None = None
    accept: list[int] = []
    wait_s: Seconds = 0.0
    min_rows: Annotated[int, Meta(ge=1)] = 1
    until_done: bool = False


class Claimed(Struct, frozen=True, omit_defaults=True):
    """The rows, none if the wait timed out. ended: the partition is closed and has no more rows for the task.

    withdrawn: the caller withdrew the claim.
    """

    rows: list[LeasedRow] = []
    ended: bool = False
    withdrawn: bool = False


class Leases(Struct, frozen=True):
    """Leases to renew."""

    leases: list[str]


class ClaimTicket(Struct, frozen=True):
    """A claim to abandon because its caller no longer waits, or to withdraw, which answers it immediately if parked."""

    worker: str
    ticket: str


class EndRows(Struct, frozen=True):
    """Return rows to the queue, or drop them permanently."""

    lease: str
    rows: list[int]
    reason: str
    drop: bool


class OpenStep(InPartition, frozen=True):
    """Set the number of groups of D_step."""

    step: int
    groups: int
    group_size: int


class Exchange(InPartition, frozen=True):
    """Put a group into D_step in exchange for another one, which is late."""

    serial: int
    step: int
    late: int


class Begin(TrainerStep, frozen=True):
    """Start a trainer attempt with weights θ_step."""

    world: Annotated[int, Meta(le=1 << 16)]


class AskSlot(TrainerStep, frozen=True):
    """Request the rows that a rank trains in a slot; parks for ``wait_s`` seconds."""

    slot: int
    rank: int
    tokens: int
    wait_s: Seconds


class Slotted(Struct, frozen=True):
    """The slot, None if the wait timed out. ended: the partition was closed before that step, which never comes."""

    slot: Slot | None
    ended: bool = False


class StepDone(TrainerStep, frozen=True):
    """Report that a rank has finished a step."""

    rank: int


class AskWanted(InPartition, frozen=True):
    """Request the samples that must be created again; parks until the revision differs from ``known``."""

    known: int
    wait_s: Seconds


class Expire(Struct, frozen=True):
    """Report that a worker is dead."""

    worker: str


class AskSnapshot(InPartition, frozen=True):
    """Request the progress of a partition, of all its steps or only of ``step``."""

    step: int | None = None


class CreatorAttempt(InPartition, frozen=True):
    """An attempt of the partition's creator that takes over or clears the partition."""

    attempt: Attempt


class Close(InPartition, frozen=True):
    """Report that the run is complete up to a step."""

    step: int


class FindRows(InPartition, frozen=True):
    """Find the rows with these keys."""

    keys: list[str]


class Peek(InPartition, frozen=True):
    """Show rows as ``task`` (or no task) sees them: these rows, or the first ``most`` rows of the partition."""

    task: str
    rows: list[int]
    most: _Count


class Reset(InPartition, frozen=True):
    """Make every row ready again for one task or all tasks."""

    task: str | None


class Expect(InPartition, frozen=True):
    """Set the total number of rows that will be put."""

    total: _Count


class ClearRows(InPartition, frozen=True):
    """Forget rows permanently; rows that do not exist are ignored."""

    rows: list[int]


class AskProgress(InPartition, frozen=True):
    """Request the number of rows that have these columns, or that this task has completed; exactly one is given."""

    columns: list[str]
    task: str


class Drain(Struct, frozen=True):
    """Drain a unit. incarnation: only this incarnation of it, or any (empty)."""

    unit: Annotated[int, Meta(ge=0)]
    incarnation: str = ""


class AskWhere(Struct, frozen=True):
    """Request the locations of rows."""

    rows: list[int]


def parse_lease(name: str) -> tuple[int, str]:
    """Return the id and the holder in a lease's name (``Lease.name``); id 0, which no lease has, for other texts."""
    number, _, holder = name.partition(HOLDER_SEPARATOR)
    try:
        lease = int(number, 16)
    except ValueError:
        return 0, holder
    return lease if 0 < lease < 1 << 64 else 0, holder


def controller_of(lease: str) -> int:
    """Return the controller that granted ``lease``; the primary if ``lease`` names no lease."""
    return parse_lease(lease)[0] >> LEASE_BITS


class Follow(Struct, frozen=True):
    """Request the changes after ``position`` in the feed of the primary with this epoch; parks for ``wait_s``.

    epoch: 0 requests a snapshot.
    """

    replica: _Count
    epoch: _Count
    position: _Count
    wait_s: Seconds


class Feed(Struct, frozen=True):
    """The changes up to ``position``, each encoded on its own; or, if ``snapshot``, all rows at that position."""

    epoch: int
    position: int
    items: list[Raw]
    snapshot: bool = False


class Reach(Struct, frozen=True):
    """Wait until a replica knows everything up to ``position`` of the primary with this epoch; parks for ``wait_s``."""

    epoch: int
    position: int
    wait_s: Seconds


class EnterTypes(InPartition, frozen=True):
    """New columns of a partition, with their dtypes, that ``replica`` received."""

    replica: _Count
    dtypes: dict[str, str]


class DropRows(InPartition, frozen=True):
    """Drop rows permanently, for a holder that leased them from ``replica``."""

    replica: _Count
    rows: list[int]
    reason: str
