"""The calls to controllers, of clients and of each other: one request and one reply for each. ``unit_calls`` has the
others.

Where a queue has several controllers, number 0, the *primary*, decides about rows; the others, *replicas*, follow its
rows and decide about the leases of their own tasks. A lease's id says which controller gave it.

Invariant: every call can be sent again after its answer was lost. Puts are told apart by the numbers of their groups,
claims by ticket, completions by lease, slots by number; the others set or tell what they say.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Raw, Struct

from asyncflow.queue.protocol.messages import LeasedRow, Slot, TaskSpec
from asyncflow.rpc.access import HELD_BY

Seconds = Annotated[float, Meta(ge=0)]
Bytes = Annotated[int, Meta(ge=0)]
Attempt = Annotated[int, Meta(ge=0)]
_Count = Annotated[int, Meta(ge=0)]

NOWHERE = -1
"""The unit of a row that is not there, and of a move that has no unit to go to."""
WRITE = "write:"
"""What stands in place of a lease where there is none begins so; the rest is the writer's own name for the write."""
LEASE_BITS = 59
"""Below these bits of a lease's id are its epoch and count, above is the controller that gave it."""


class Done(Struct, frozen=True):
    """It was done."""


class Nothing(Struct, frozen=True):
    """A request that says all by its name."""


class InPartition(Struct, frozen=True):
    """A request about a partition; with no more, a question what it holds."""

    partition: str


class TrainerStep(InPartition, frozen=True):
    """A step of a trainer attempt; with no more, a checkpoint contains it."""

    attempt: int
    step: int


class Declare(Struct, frozen=True):
    """Make tasks known."""

    specs: list[TaskSpec]


class ClaimRows(InPartition, frozen=True, eq=False, omit_defaults=True):
    """Lease rows; parks for ``wait_s`` seconds. ticket: the worker's own name for the claim, by which it has one lease.

    max_rows: most rows, but at least one whole group where the task takes groups; max_groups: most groups; version,
    accept: see ``VersionFilter``; min_rows: met only with at least so many; until_done: the task has not ended while
    others hold rows of it, which may come back.
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
    """The rows, none if the time was over. ended: the partition is closed and holds nothing more for the task.

    withdrawn: the caller asked for this answer.
    """

    rows: list[LeasedRow] = []
    ended: bool = False
    withdrawn: bool = False


class Leases(Struct, frozen=True):
    """Leases to be renewed."""

    leases: list[str]


class ClaimTicket(Struct, frozen=True):
    """A claim to be abandoned, as nobody waits for it any more; or to be withdrawn: answered now, if it waits."""

    worker: str
    ticket: str


class EndRows(Struct, frozen=True):
    """Return rows, or drop them for ever."""

    lease: str
    rows: list[int]
    reason: str
    drop: bool


class OpenStep(InPartition, frozen=True):
    """D_step has so many groups."""

    step: int
    groups: int
    group_size: int


class Exchange(InPartition, frozen=True):
    """D_step has a group in place of another one, which is late."""

    serial: int
    step: int
    late: int


class Begin(TrainerStep, frozen=True):
    """A trainer attempt begins with weights θ_step."""

    world: Annotated[int, Meta(le=1 << 16)]


class AskSlot(TrainerStep, frozen=True):
    """Ask for the rows that a rank trains in a slot; parks for ``wait_s`` seconds."""

    slot: int
    rank: int
    tokens: int
    wait_s: Seconds


class Slotted(Struct, frozen=True):
    """The slot; None when the time was over. ended: the partition was closed below that step, which never comes."""

    slot: Slot | None
    ended: bool = False


class StepDone(TrainerStep, frozen=True):
    """A rank has finished a step."""

    rank: int


class AskWanted(InPartition, frozen=True):
    """Ask which samples must be created again; parks until the revision is not ``known``."""

    known: int
    wait_s: Seconds


class Expire(Struct, frozen=True):
    """A worker is dead."""

    worker: str


class AskSnapshot(InPartition, frozen=True):
    """Ask how far a partition has come; of its steps only ``step`` is told, unless it is None."""

    step: int | None = None


class CreatorAttempt(InPartition, frozen=True):
    """An attempt of the partition's creator, which takes over, or clears the partition."""

    attempt: Attempt


class Close(InPartition, frozen=True):
    """The run is complete up to a step."""

    step: int


class FindRows(InPartition, frozen=True):
    """A question: the rows with these keys."""

    keys: list[str]


class Peek(InPartition, frozen=True):
    """Look at rows as ``task`` (or nobody) sees them: at these, or at the first ``most`` of the partition."""

    task: str
    rows: list[int]
    most: _Count


class Reset(InPartition, frozen=True):
    """Make every row ready again for a task, or all."""

    task: str | None


class Expect(InPartition, frozen=True):
    """So many rows will be put in all."""

    total: _Count


class ClearRows(InPartition, frozen=True):
    """Forget rows for ever; those that are not there are passed over."""

    rows: list[int]


class AskProgress(InPartition, frozen=True):
    """Ask how many rows have these columns, or were completed by this task: one of the two is given."""

    columns: list[str]
    task: str


class Drain(Struct, frozen=True):
    """A unit shall leave. incarnation: only this one of it, or any (empty)."""

    unit: Annotated[int, Meta(ge=0)]
    incarnation: str = ""


class AskWhere(Struct, frozen=True):
    """A question: where these rows lie."""

    rows: list[int]


def parse_lease(name: str) -> tuple[int, str]:
    """Return the id and the holder that ``Lease.name`` wrote; the id 0, which no lease has, for anything else."""
    number, _, holder = name.partition(HELD_BY)
    try:
        lease = int(number, 16)
    except ValueError:
        return 0, holder
    return lease if 0 < lease < 1 << 64 else 0, holder


def controller_of(lease: str) -> int:
    """Return the controller that gave ``lease``; the primary for anything that is no lease."""
    return parse_lease(lease)[0] >> LEASE_BITS


class Follow(Struct, frozen=True):
    """Ask for the changes after ``position`` in the time of the primary with this epoch; parks for ``wait_s``.

    epoch: 0 asks for a snapshot.
    """

    replica: _Count
    epoch: _Count
    position: _Count
    wait_s: Seconds


class Feed(Struct, frozen=True):
    """The changes up to ``position``, encoded one by one; or, in a ``snapshot``, all rows as they were there."""

    epoch: int
    position: int
    items: list[Raw]
    snapshot: bool = False


class Reach(Struct, frozen=True):
    """Answer when everything up to ``position`` of the primary with this epoch is known; parks for ``wait_s``."""

    epoch: int
    position: int
    wait_s: Seconds


class EnterTypes(InPartition, frozen=True):
    """New columns of a partition, with their dtypes, that ``replica`` was given."""

    replica: _Count
    dtypes: dict[str, str]


class DropRows(InPartition, frozen=True):
    """Rows whose holder, who has them from ``replica``, gives them up for ever."""

    replica: _Count
    rows: list[int]
    reason: str
