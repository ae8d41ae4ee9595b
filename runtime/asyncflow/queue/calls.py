"""The calls between clients, units and the controller: one request and one reply class for each.

Invariant: every call can be sent again after its answer was lost. Creation is told apart by sample and row, claims by
ticket, completions by lease, slots by number; the others set what they say.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from asyncflow.net.frames import BatchHeader
from asyncflow.queue.messages import LeasedRow, PartitionSnapshot, RowMeta, Slot, Tag, TaskSpec
from asyncflow.queue.table import Cells, Held

Seconds = Annotated[float, Meta(ge=0)]


class Done(Struct, frozen=True):
    """It was done."""


class Verdicts(Struct, frozen=True):
    """What became of each row."""

    ok: list[bool]


class Nothing(Struct, frozen=True):
    """A request that says all by its name."""


# --- client -> unit


class CreateRows(Struct, frozen=True):
    """Put new samples; the frames hold their columns in the order of ``metas``. wait_s: for room."""

    metas: list[RowMeta]
    group_size: int
    header: BatchHeader
    wait_s: Seconds


class WriteRows(Struct, frozen=True):
    """Put columns of leased rows. reason: empty to complete them, else to give them back with what there is."""

    lease: str
    rows: list[int]
    header: BatchHeader
    tags: list[dict[str, Tag]]
    reason: str
    wait_s: Seconds


class FetchRows(Struct, frozen=True):
    """Get columns of rows."""

    rows: list[int]
    columns: list[str]


class Fetched(Struct, frozen=True):
    """The frames hold the columns."""

    header: BatchHeader


# --- unit -> controller


class Hello(Struct, frozen=True):
    """A unit asks for the epoch of its rows."""

    unit: int
    incarnation: str
    limit: int


class Welcome(Struct, frozen=True):
    """controller: the epoch of the controller; epoch: that of the unit's rows; it must forget rows of any other.

    watch_s: how long the unit may be silent while it has nothing to say.
    """

    controller: int
    epoch: int
    watch_s: float


class Session(Struct, frozen=True):
    """Who speaks to whom; the controller refuses one that it did not begin."""

    unit: int
    controller: int
    epoch: int


class Announce(Struct, frozen=True):
    """Some of the rows that a unit holds. last: there are no others."""

    session: Session
    held: list[Held]
    last: bool


class Strangers(Struct, frozen=True):
    """Rows that nobody needs any more."""

    rows: list[int]


class NewRows(Struct, frozen=True, tag="new"):
    """Samples that a unit was given."""

    metas: list[RowMeta]
    rows: list[int]
    group_size: int
    cells: Cells


class NewCells(Struct, frozen=True, tag="cells"):
    """Columns of leased rows that a unit was given, to complete them or, with a reason, to give them back."""

    lease: str
    rows: list[int]
    cells: Cells
    tags: list[dict[str, Tag]]
    reason: str


Entry: TypeAlias = NewRows | NewCells


class Admit(Struct, frozen=True):
    """What a unit was given since its last call, in order."""

    session: Session
    entries: list[Entry]


class Verdict(Struct, frozen=True):
    """What became of each row of an entry; error: that of ``to_wire`` when the whole entry is refused."""

    ok: list[bool]
    error: dict[str, str] | None = None


class Admitted(Struct, frozen=True):
    """A verdict for each entry."""

    verdicts: list[Verdict]


class Watch(Struct, frozen=True):
    """A unit says how full it is and waits for orders. done: number of the last order that it carried out."""

    session: Session
    done: int
    used: int
    wait_s: Seconds


class Orders(Struct, frozen=True):
    """Rows to free; number: of the last of these orders."""

    number: int
    rows: list[int]


# --- client -> controller


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
    """A question about a partition, or the order to clear it."""

    partition: str


class Snapshot(Struct, frozen=True):
    """The state of a partition."""

    snapshot: PartitionSnapshot


class Close(Struct, frozen=True):
    """The run is complete up to a step."""

    partition: str
    step: int
