"""The queue's vocabulary: what callers of ``QueueClient`` give and get.

Rows are samples (``RowMeta`` says which), columns are fields, tasks (``TaskSpec``) are consumers. A claim gives
``LeasedRow``s, and so does a slot of the gang of trainer ranks.

Invariant: everything here is plain data that crosses sockets as msgpack. Nothing names an address or a clock; times are
seconds from now, sizes are bytes.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct, field

from asyncflow.errors import Refused
from asyncflow.identity import NEWEST, SampleKey

Tag = bool | int | float | str
Purpose = Literal["train", "eval", "open"]
"""What a partition is for: rows of the optimizer's steps, rows of an evaluation, or anything else (``open``)."""

TOKENS_TAG = "tokens"
"""The tag that says how many response tokens a row holds. With ``RowMeta.tokens``, those of the prompt, it is the
weight that balances the trainer's ranks; alone it is summed up in ``StepTotals.response_tokens``."""

KEY_TAG = "key"
"""The tag that names a row of an open partition; no two rows of one have the same."""

SERIAL_BITS = 32
"""In an open partition a serial is the number of its client there, 31 bits, above the client's count of groups, 32."""

FILTERED = "filtered"
"""Reasons that begin so (``filtered:zero-variance``) count as filtered, all others as dropped."""


class RowMeta(Struct, frozen=True, array_like=True, kw_only=True):
    """One sample, as its creator describes it.

    step: the optimizer step it belongs to; min_version, max_version: steps of the versions that may generate it;
    tokens: of its prompt; tags: small values that travel with every claim; writers may add some with each put.
    """

    partition: str
    serial: int
    sample: int
    step: int
    purpose: Purpose = "train"
    min_version: int = 0
    max_version: int = NEWEST
    tokens: int = 0
    tags: dict[str, Tag] = field(default_factory=dict)

    @property
    def key(self) -> SampleKey:
        """The sample's name."""
        return SampleKey(self.serial, self.sample)


class Samples(Struct, frozen=True, kw_only=True):
    """Which groups a job puts into a partition of its own.

    serials: their numbers; step: the optimizer step to which they belong; oldest, newest: steps of the versions that
    may generate them; tokens: of the prompt of each row, or none; skipped: serials that never get any rows.
    """

    serials: list[int]
    step: int
    purpose: Literal["train", "eval"] = "train"
    oldest: int = 0
    newest: int = NEWEST
    tokens: list[int] = []
    skipped: list[int] = []


class TaskSpec(Struct, frozen=True, kw_only=True):
    """One consumer of a partition.

    needs: columns that make a row ready; writes: columns that every completion must bring; groups: whole groups only;
    order: a selection (``flow.selection``), "fifo" or another; of a gang "fifo" or "key", which is for whole steps;
    kind: "lease", or "gang" for the trainer's ranks (its steps have whole groups, with ``groups`` its slots and ranks
    too); shared_tokens: of a gang: the rows of a group have their ``RowMeta.tokens`` in common, which count once where
    they are together, so they are kept together as far as a slot's budget allows; lease_s: seconds until a lease ends;
    clears: rows of an open partition that it has completed are cleared at once; it acknowledges whole leases.
    """

    partition: str
    name: str
    needs: list[str]
    writes: list[str] = field(default_factory=list)
    groups: bool = False
    order: str = "fifo"
    kind: Literal["lease", "gang"] = "lease"
    shared_tokens: bool = False
    lease_s: float = 60.0
    clears: bool = False


class LeasedRow(Struct, frozen=True, array_like=True, kw_only=True):
    """A row that a claim gave: the holder has ``until`` seconds to complete, renew or give back lease ``lease``.

    One of a slot has no lease: it belongs to the trainer's attempt and its step until that is committed or begun anew.
    attempt: how often it was given back or expired before; unit: index of the unit that holds it; bytes: size of each
    column there. An output column of the task itself in ``bytes`` is what an earlier holder gave back unfinished.
    """

    row: int
    meta: RowMeta
    attempt: int
    lease: str
    until: float
    unit: int
    bytes: dict[str, int]


class StepTotals(Struct, frozen=True, kw_only=True):
    """The contents of D_step, over all ranks and slots: the normalisers of its gradient."""

    groups: int = 0
    samples: int = 0
    response_tokens: int = 0


class Slot(Struct, frozen=True, kw_only=True):
    """One lockstep micro-batch of one rank. rows: by key; last: D_step is exhausted, ``totals`` says what it held."""

    step: int
    slot: int
    rows: list[LeasedRow]
    last: bool
    totals: StepTotals | None = None


class Wanted(Struct, frozen=True, kw_only=True):
    """Samples whose bytes were lost before their commit: ``put`` takes them again.

    Their metas name sample, step and versions; tags and tokens follow from the serial and are left to the creator.
    """

    revision: int
    keys: list[RowMeta]


class StepState(Struct, frozen=True, kw_only=True):
    """A step not yet committed: the groups that were created, and how far they came.

    done: rows that a task has done and that are not final; undone: groups with a row that is neither; filtered: rows;
    excluded: groups that are final and of which nothing is trained.
    """

    serials: list[int]
    done: dict[str, int]
    undone: dict[str, int]
    filtered: int
    excluded: int


class PartitionSnapshot(Struct, frozen=True, kw_only=True):
    """The state of a partition that a restarted driver needs to go on.

    next_serial: one above the highest created or skipped; missing: serials below it that were neither; skipped: how
    many were skipped; steps: those above ``last_committed_step`` and those with unfinished samples; attempt: of the
    newest trainer that began, -1 if none; last_staged_step: the newest step that all ranks have finished.
    """

    next_serial: int
    missing: list[int]
    steps: dict[int, StepState]
    attempt: int
    last_committed_step: int
    last_staged_step: int
    closed: int | None
    skipped: int = 0


class QueueStats(Struct, frozen=True, kw_only=True):
    """Counts of now. Keys of ``ready``, ``leased`` and ``parked`` are "partition/task"; the rest counts rows or bytes.

    live: rows whose bytes are held or awaited, the staged ones included; bytes, limit: of all units together, as they
    last said; lease_expiries, redeliveries: since the controller started; silent: controllers that did not answer, of
    whose tasks nothing is told.
    """

    ready: dict[str, int]
    leased: dict[str, int]
    parked: dict[str, int]
    live: int
    staged: int
    committed: int
    filtered: int
    dropped: int
    wanted: int
    bytes: int
    limit: int
    units: int
    lease_expiries: int
    redeliveries: int
    fenced: int
    ledger_bytes: int
    silent: list[int] = []


class AuditReport(Struct, frozen=True, kw_only=True):
    """The ledger's account of every training sample; ``dispatched = trained + filtered + dropped + unfinished`` if
    nothing is lost.

    lost: samples that should exist or be finished and are not; duplicated: samples created or trained more than once in
    the history that survives; closed: the run was marked complete; problems: the first findings, in words; resets,
    peeked: rows, open ones too, that were taken from a task that had had them, or looked at without a lease; put: open
    rows, each counted once, of which so many were cleared or dropped, and so many remain; without_bytes: of those that
    remain, how many were lost with their storage unit and were not put again; skipped: serials without samples, because
    their creator left them out; reasons: why rows were given out again (``redeliveries``), the most frequent, counted.
    """

    dispatched: int
    trained: int
    filtered: int
    dropped: int
    unfinished: int
    lost: int
    duplicated: int
    last_committed_step: int
    attempts: int
    redeliveries: int
    closed: bool
    problems: list[str]
    resets: int = 0
    peeked: int = 0
    put: int = 0
    cleared: int = 0
    remaining: int = 0
    without_bytes: int = 0
    skipped: int = 0
    reasons: dict[str, int] = {}

    @property
    def ok(self) -> bool:
        """Nothing lost, nothing duplicated, and the sum is right."""
        finished = self.trained + self.filtered + self.dropped + self.unfinished
        sums = finished == self.dispatched and self.cleared + self.remaining == self.put
        return sums and not (self.lost or self.duplicated or self.problems)


def check_task(spec: TaskSpec) -> None:
    """Refuse a task that cannot work."""
    where = f"task {spec.partition}/{spec.name}"
    if not spec.partition or not spec.name or not spec.needs:
        raise Refused("a task needs a partition, a name and at least one column", where=where)
    if spec.kind == "gang" and spec.writes:
        raise Refused(f"a gang writes no columns, but this one names {spec.writes}", where=where)
    if spec.kind != "gang" and spec.shared_tokens:
        raise Refused("tokens that rows share count in the slots of a gang, and this is none", where=where)
    if spec.kind == "gang" and spec.clears:
        raise Refused("the rows of a gang are freed by a commit, not by their completion", where=where)
    if not spec.lease_s > 0:
        raise Refused(f"a lease of {spec.lease_s} s would end before it began", where=where)


class Unready(Struct, frozen=True, kw_only=True):
    """A row that is not ready for a task. seconds: since the controller knows it; lacks: columns that it needs yet."""

    row: int
    serial: int
    sample: int
    seconds: float
    lacks: list[str]


class TaskView(Struct, frozen=True, kw_only=True):
    """One task. Counts are rows, but for ``parked``: claims that wait. oldest: the oldest row that is not ready."""

    name: str
    kind: str
    needs: list[str]
    writes: list[str]
    groups: bool
    lease_s: float
    ready: int
    leased: int
    done: int
    parked: int
    oldest: Unready | None


class PartitionView(Struct, frozen=True, kw_only=True):
    """One partition. rows: there or awaited; wanted: lost, to be put again; columns: their dtypes.

    silent: controllers that did not answer, with those of their tasks of which nothing is told.
    """

    name: str
    purpose: str
    rows: int
    wanted: int
    cleared: int
    expected: int | None
    columns: dict[str, str]
    tasks: list[TaskView]
    silent: dict[int, list[str]] = {}


class Listing(Struct, frozen=True, array_like=True):
    """Rows of a partition, in the order in which they were put; keys: empty where a row has none; tags: the others."""

    rows: list[int]
    keys: list[str]
    tags: list[dict[str, Tag]]


class PeekedRows(Struct, frozen=True, array_like=True):
    """Rows as they are, a place for each.

    ready: for the task that was named, now; leased, done: by it; attempts: how often it had the row before; lacks: the
    columns that the task needs and the row has not got; sizes: bytes by column, -1 where a row has not got it.
    """

    rows: list[int]
    keys: list[str]
    tags: list[dict[str, Tag]]
    ready: list[bool]
    leased: list[bool]
    done: list[bool]
    attempts: list[int]
    lacks: list[list[str]]
    sizes: dict[str, list[int]]


class Progress(Struct, frozen=True, kw_only=True):
    """The rows of a partition that have some columns, or that a task has completed.

    rows: that there are; done: that have all of the columns, or that the task has completed; leased: that it holds;
    cleared: that were there and were cleared one by one; expected: that there will be, None if nobody said so.
    """

    rows: int
    done: int
    leased: int = 0
    cleared: int = 0
    expected: int | None = None

    @property
    def all(self) -> bool:
        """Every row that there is or will be is done; False where there is none. Cleared rows were done."""
        known = self.rows + self.cleared
        return 0 < known >= (self.expected or 0) and self.done == self.rows


class Found(Struct, frozen=True):
    """The rows, 0 for a key that none has.

    lost: those of these keys whose rows were lost with their unit; unnamed: how many rows of the partition were lost
    that had no key, or whose keys are not known any more since the controller was restarted.
    """

    rows: list[int]
    lost: list[str] = []
    unnamed: int = 0


UnitState: TypeAlias = Literal["serving", "silent", "leaving", "away"]


class UnitView(Struct, frozen=True, kw_only=True):
    """A unit as the controller knows it. away: it has not told what it holds since it, or the controller, began.

    silent: it has not been heard for several times as long as it should be; rows: that it holds, those still to be
    moved where it leaves; bytes: used; limit: most bytes; epoch: of its rows.
    """

    unit: int
    state: UnitState
    rows: int
    bytes: int
    limit: int
    epoch: int = 0
    address: str = ""
