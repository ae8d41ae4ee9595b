"""The calls of clients to the controller: one request and one reply class for each. ``unit_calls`` has the others.

Invariant: every call can be sent again after its answer was lost. Creation is told apart by sample and row, claims by
ticket, completions by lease, slots by number; the others set what they say.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from asyncflow.queue.messages import LeasedRow, PartitionSnapshot, Slot, TaskSpec

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


class ClaimRows(Struct, frozen=True):
    """Lease rows; parks for ``wait_s`` seconds."""

    partition: str
    task: str
    worker: str
    ticket: str
    max_rows: int
    max_groups: int | None
    version: int | None
    accept: list[int]
    wait_s: Seconds


class Claimed(Struct, frozen=True):
    """The rows, none if the time was over. ended: the partition is closed and holds nothing more for the task."""

    rows: list[LeasedRow]
    ended: bool


class Abandon(Struct, frozen=True):
    """Nobody waits for the claim ``ticket`` any more."""

    worker: str
    ticket: str


class Renew(Struct, frozen=True):
    """Begin the time of leases anew."""

    leases: list[str]


class Renewed(Struct, frozen=True):
    """The leases that are in force."""

    leases: list[str]


class EndRows(Struct, frozen=True):
    """Give rows back, or drop them for ever."""

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
    world: int


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
    """The slot; None when the time was over."""

    slot: Slot | None


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
