"""What the ledger records: one class for each thing that can happen; ``compacted`` has the pieces of a state.

``Books.apply`` folds these into the durable state, the audit reads them on its own.

Invariant: records are only ever added here, and fields only at the end of one with a default, so that an old ledger
can always be read.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from asyncflow.queue.ledger import compacted
from asyncflow.queue.protocol.messages import Purpose, TaskSpec

Cell: TypeAlias = tuple[int, int]
"""(sample, row id)"""


class Started(Struct, frozen=True, array_like=True, tag="start"):
    """A controller began to serve with this epoch; lease ids of it and all rows of later epochs are new."""

    epoch: int


class UnitJoined(Struct, frozen=True, array_like=True, tag="unit"):
    """An incarnation of a storage unit was granted an epoch for its row ids."""

    epoch: int
    unit: int
    incarnation: str


class UnitLost(Struct, frozen=True, array_like=True, tag="lost"):
    """What the unit with this epoch held is gone."""

    epoch: int
    unit: int


class RowsLost(Struct, frozen=True, array_like=True, tag="gone"):
    """These rows are not on their unit any more, although the unit lives."""

    partition: str
    rows: list[int]


class UnitLeaving(Struct, frozen=True, array_like=True, tag="leave"):
    """The unit with this epoch takes nothing new, and its rows move to others."""

    epoch: int
    unit: int


class Moved(Struct, frozen=True, array_like=True, tag="moved"):
    """These rows lie at ``home`` now (see ``identity.home``), under the ids that they always had."""

    home: int
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


class Created(Struct, frozen=True, array_like=True, tag="new"):
    """The samples of one prompt were created, or created again where they were wanted."""

    partition: str
    purpose: Purpose
    serial: int
    size: int
    step: int
    oldest: int
    newest: int
    rows: list[Cell]


class Leased(Struct, frozen=True, array_like=True, tag="lease"):
    """Rows were handed out under one lease; ticket: the claimer's own name for its claim."""

    lease: int
    partition: str
    task: str
    worker: str
    ticket: str
    rows: list[int]


class Completed(Struct, frozen=True, array_like=True, tag="done"):
    """Rows were completed by the holder of the lease."""

    lease: int
    rows: list[int]


class Returned(Struct, frozen=True, array_like=True, tag="back"):
    """Rows are ready again with attempt + 1: given back, expired, or their holder died."""

    lease: int
    rows: list[int]
    reason: str


class Dropped(Struct, frozen=True, array_like=True, tag="drop"):
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


class Slotted(Struct, frozen=True, array_like=True, tag="slot"):
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


class Closed(Struct, frozen=True, array_like=True, tag="close"):
    """The run is complete: every sample of steps up to this one should be in a final state."""

    partition: str
    step: int


class TakenOver(Struct, frozen=True, array_like=True, tag="over"):
    """An attempt of whoever creates the partition's rows began; older ones create nothing from now on."""

    partition: str
    attempt: int


class Put(Struct, frozen=True, array_like=True, tag="put"):
    """Groups of an open partition were created, or created again where they were wanted.

    Serials, and row ids from ``row`` on, are consecutive; ``groups`` groups of ``size`` rows each.
    """

    partition: str
    serial: int
    groups: int
    size: int
    row: int


class Numbered(Struct, frozen=True, array_like=True, tag="client"):
    """A client put into an open partition for the first time: the serials of its groups begin with this number."""

    partition: str
    client: bytes
    number: int


class RowsCleared(Struct, frozen=True, array_like=True, tag="rows"):
    """Rows of an open partition were cleared by its users."""

    partition: str
    rows: list[int]


class Reset(Struct, frozen=True, array_like=True, tag="reset"):
    """A task gets all living rows again, also those that it held: their leases are over. rows: how many it had."""

    partition: str
    task: str
    rows: int


class Expected(Struct, frozen=True, array_like=True, tag="total"):
    """So many rows will be put in all."""

    partition: str
    total: int


class Peeked(Struct, frozen=True, array_like=True, tag="peek"):
    """So many rows were looked at without a lease."""

    partition: str
    rows: int


Event: TypeAlias = (
    Started
    | UnitJoined
    | UnitLost
    | RowsLost
    | Declared
    | Typed
    | Created
    | Leased
    | Completed
    | Returned
    | Dropped
    | Opened
    | Began
    | Slotted
    | RankDone
    | Committed
    | Cleared
    | Closed
    | compacted.Kept
    | compacted.Alike
    | compacted.Finals
    | TakenOver
    | Put
    | RowsCleared
    | compacted.Acknowledged
    | compacted.Used
    | compacted.Ended
    | Reset
    | Expected
    | Peeked
    | compacted.Counted
    | compacted.Again
    | UnitLeaving
    | Moved
    | Numbered
    | compacted.Clients
)
