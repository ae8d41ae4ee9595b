"""The calls of clients to the controller: one request and one reply class for each. ``unit_calls`` has the others.

Invariant: every call can be sent again after its answer was lost. Creation is told apart by sample and row (by serial
in an open partition), claims by ticket, completions by lease, slots by number; the others set what they say.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from asyncflow.queue.protocol.lot import Lot, Slot
from asyncflow.queue.protocol.messages import LeasedRow, PartitionSnapshot, TaskSpec

Seconds = Annotated[float, Meta(ge=0)]
Bytes = Annotated[int, Meta(ge=0)]
Attempt = Annotated[int, Meta(ge=0)]


class Done(Struct, frozen=True):
    """It was done."""


class Verdicts(Struct, frozen=True):
    """What became of each row."""

    ok: list[bool]


class Nothing(Struct, frozen=True):
    """A request that says all by its name."""


class Declare(Struct, frozen=True):
    """Make tasks known."""

    specs: list[TaskSpec]


class ClaimRows(Struct, frozen=True, omit_defaults=True):
    """Lease rows; parks for ``wait_s`` seconds.

    min_rows: met only with at least so many; max_tokens: most tokens of prompts and responses, 0 for any number, but at
    least one row or group; done: leases of tasks that write nothing, whose rows are completed before this claim is met;
    until_done: the task has not ended while others hold rows of it, which may come back.
    """

    partition: str
    task: str
    worker: str
    ticket: str
    max_rows: Annotated[int, Meta(ge=1)]
    max_groups: int | None
    version: int | None
    accept: list[int]
    wait_s: Seconds
    done: list[str] = []
    min_rows: Annotated[int, Meta(ge=1)] = 1
    max_tokens: Annotated[int, Meta(ge=0)] = 0
    until_done: bool = False


class Claimed(Struct, frozen=True, omit_defaults=True):
    """The rows, None if the time was over. ended: the partition is closed and holds nothing more for the task.

    late: those of ``done`` that were not in force any more; withdrawn: the caller asked for this answer.
    """

    lot: Lot | None
    ended: bool
    late: list[str] = []
    withdrawn: bool = False

    @property
    def rows(self) -> list[LeasedRow]:
        """The rows one by one."""
        return self.lot.leased() if self.lot is not None else []


class Acknowledge(Struct, frozen=True):
    """The rows of these leases are completed; for tasks that write nothing."""

    leases: list[str]


class Abandon(Struct, frozen=True):
    """Nobody waits for the claim ``ticket`` any more."""

    worker: str
    ticket: str


class Withdraw(Struct, frozen=True):
    """Answer the claim ``ticket`` now, without rows, if it waits; one that was met has its answer."""

    worker: str
    ticket: str


class Renew(Struct, frozen=True):
    """Begin the time of leases anew."""

    leases: list[str]


class Renewed(Struct, frozen=True):
    """The leases that are in force."""

    leases: list[str]


class EndRows(Struct, frozen=True):
    """Return rows, or drop them for ever."""

    lease: str
    rows: list[int]
    reason: str
    drop: bool


class OpenStep(Struct, frozen=True):
    """D_step has so many groups."""

    partition: str
    step: int
    groups: int
    group_size: int


class Begin(Struct, frozen=True):
    """A trainer attempt begins with weights θ_step."""

    partition: str
    attempt: int
    step: int
    world: Annotated[int, Meta(le=1 << 16)]


class AskSlot(Struct, frozen=True):
    """What does a rank train in a slot? Parks for ``wait_s`` seconds."""

    partition: str
    attempt: int
    step: int
    slot: int
    rank: int
    tokens: int
    wait_s: Seconds


class Slotted(Struct, frozen=True):
    """The slot; None when the time was over. ended: the partition was closed below that step, which never comes."""

    slot: Slot | None
    ended: bool = False


class StepDone(Struct, frozen=True):
    """A rank has finished a step."""

    partition: str
    attempt: int
    step: int
    rank: int


class Commit(Struct, frozen=True):
    """A checkpoint contains a step."""

    partition: str
    attempt: int
    step: int


class AskWanted(Struct, frozen=True):
    """Which samples must be created again? Parks until the revision is not ``known``."""

    partition: str
    known: int
    wait_s: Seconds


class Expire(Struct, frozen=True):
    """A worker is dead."""

    worker: str


class InPartition(Struct, frozen=True):
    """A question about a partition."""

    partition: str


class AskSnapshot(Struct, frozen=True):
    """How far a partition has come; of its steps only ``step`` is told, unless it is None."""

    partition: str
    step: int | None = None


class TakeOver(Struct, frozen=True):
    """An attempt of the partition's creator begins."""

    partition: str
    attempt: Attempt


class Clear(Struct, frozen=True):
    """An attempt of the partition's creator clears it."""

    partition: str
    attempt: Attempt


class Snapshot(Struct, frozen=True):
    """The state of a partition."""

    snapshot: PartitionSnapshot


class Close(Struct, frozen=True):
    """The run is complete up to a step."""

    partition: str
    step: int
