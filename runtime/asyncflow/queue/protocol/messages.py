"""The types of the arguments and results of ``QueueClient``.

Rows are samples (described by ``RowMeta``), columns are fields, tasks (``TaskSpec``) are consumers. A claim returns
``LeasedRow``s, and so does a slot of the gang of trainer ranks.

Invariant: all types are plain data that crosses sockets as msgpack. They contain no clock times; times are seconds from
now, sizes are bytes.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct, field

from asyncflow.errors import Refused
from asyncflow.identity import NEWEST, SampleKey

Tag = bool | int | float | str
Purpose = Literal["train", "eval", "open"]
"""The purpose of a partition: rows of the optimizer's steps, rows of an evaluation, or any other rows (``open``)."""

TOKENS_TAG = "tokens"
"""The tag with the number of a row's response tokens. Its sum with ``RowMeta.tokens``, the prompt's tokens, is the
weight that balances the trainer's ranks; the tag alone is summed in ``StepTotals.response_tokens``."""

KEY_TAG = "key"
"""The tag that names a row of an open partition, where it is unique."""

SERIAL_BITS = 32
"""In an open partition a serial is the number of its client, 31 bits, above the client's count of groups, 32 bits."""

FILTERED = "filtered"
"""Reasons with this prefix (``filtered:zero-variance``) count as filtered, all others as dropped."""


class RowMeta(Struct, frozen=True, array_like=True, kw_only=True):
    """One sample, as its creator describes it.

    step: its optimizer step; min_version, max_version: steps of the versions that may generate it; tokens: tokens of
    its prompt; tags: small values that travel with every claim; writers may add tags with each put.
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
    """The groups that a job puts into its own partition.

    serials: their numbers; step: their optimizer step; oldest, newest: steps of the versions that may generate them;
    tokens: tokens of the prompt of each row, or none; skipped: serials that never get any rows.
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

    needs: columns that make a row ready; writes: columns that every completion must contain; groups: take only whole
    groups; order: a selection (``flow.selection``), such as "fifo"; for a gang "fifo", or "key" for whole steps; kind:
    "lease", or "gang" for the trainer's ranks (its steps have whole groups, and with ``groups`` its slots and ranks
    too); shared_tokens: for a gang: the rows of a group share their ``RowMeta.tokens``, which count once on a rank, so
    groups are kept together as far as a slot's budget allows; lease_s: seconds until a lease ends; clears: rows of an
    open partition are cleared immediately when the task completes them; it acknowledges whole leases.
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
    """A row that a claim returned: the holder has ``until`` seconds to complete, renew or give back ``lease``.

    A row of a slot has no lease: it belongs to the trainer's attempt and step until the step is committed or repeated.
    attempt: how often it was given back or expired before; unit: index of the unit that holds it; bytes: size of each
    column there. A column of ``bytes`` that the task itself writes is what an earlier holder left unfinished.
    """

    row: int
    meta: RowMeta
    attempt: int
    lease: str
    until: float
    unit: int
    bytes: dict[str, int]


class StepTotals(Struct, frozen=True, kw_only=True):
    """The numbers of groups, samples and tokens in D_step, over all ranks and slots, which normalise its gradient."""

    groups: int = 0
    samples: int = 0
    response_tokens: int = 0


class Slot(Struct, frozen=True, kw_only=True):
    """One lockstep micro-batch of one rank. rows: by key; last: D_step is exhausted, and ``totals`` are its totals."""

    step: int
    slot: int
    rows: list[LeasedRow]
    last: bool
    totals: StepTotals | None = None


class Wanted(Struct, frozen=True, kw_only=True):
    """Samples whose bytes were lost before their commit, and which ``put`` accepts again.

    Their metas contain sample, step and versions; the creator derives tags and tokens from the serial.
    """

    revision: int
    keys: list[RowMeta]


class StepState(Struct, frozen=True, kw_only=True):
    """A step that is not yet committed: its groups and their progress.

    done: by task, rows that it has completed and that are neither final nor wanted; undone: by task, groups with a row
    that is neither done nor final; filtered: rows; excluded: groups that are final and of which no sample is trained.
    """

    serials: list[int]
    done: dict[str, int]
    undone: dict[str, int]
    filtered: int
    excluded: int


class PartitionSnapshot(Struct, frozen=True, kw_only=True):
    """The state of a partition that a restarted driver needs to continue.

    next_serial: one above the highest serial created or skipped; missing: serials below it that were neither; skipped:
    number of skipped serials; steps: those above ``last_committed_step`` and those with unfinished samples; attempt:
    newest started trainer attempt, -1 if none; last_staged_step: the newest step that all ranks have finished.
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
    """Current counts. Keys of ``ready``, ``leased`` and ``parked`` are "partition/task"; the rest counts rows or bytes.

    live: rows whose bytes are held or expected, including staged ones; bytes, limit: of all units together, as last
    reported; lease_expiries, redeliveries: since the controller started; silent: controllers that did not answer, whose
    tasks are not included.
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
    the surviving history; closed: the run was marked complete; problems: the first findings, in words; resets, peeked:
    rows, including open ones, that were reset after a task had them, or read without a lease; put, cleared, remaining:
    open rows, each counted once, that were put, of these the cleared or dropped ones, and the rest; without_bytes:
    remaining rows that were lost with their storage unit and not put again; skipped: serials that their creator
    skipped; reasons: the most frequent reasons why rows were leased again (``redeliveries``), with counts.
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
        """True if nothing is lost or duplicated, and the sums are right."""
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
        raise Refused("tokens that rows share count in the slots of a gang, and this task is no gang", where=where)
    if spec.kind == "gang" and spec.clears:
        raise Refused("the rows of a gang are freed by a commit, not by their completion", where=where)
    if not spec.lease_s > 0:
        raise Refused(f"a lease of {spec.lease_s} s would end before it starts", where=where)


class Unready(Struct, frozen=True, kw_only=True):
    """A row that is not ready for a task. seconds: time since the controller learned of it; lacks: missing columns."""

    row: int
    serial: int
    sample: int
    seconds: float
    lacks: list[str]


class TaskView(Struct, frozen=True, kw_only=True):
    """One task. Counts are rows, except ``parked``: waiting claims. oldest: the oldest row that is not ready."""

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
    """One partition. rows: rows held or expected; wanted: lost rows, to be put again; columns: their dtypes.

    silent: controllers that did not answer, with those of their tasks that are not included.
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
    """Rows of a partition, in the order in which they were put; keys: "" if a row has none; tags: all other tags."""

    rows: list[int]
    keys: list[str]
    tags: list[dict[str, Tag]]


class PeekedRows(Struct, frozen=True, array_like=True):
    """Rows as they are now, one element for each row.

    ready: ready for the named task; leased, done: by that task; attempts: how often the task had leased the row before;
    lacks: columns that the task needs and the row does not have; sizes: bytes by column, -1 if it is missing.
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

    rows: existing rows; done: rows with all of the columns, or completed by the task; leased: rows leased to it;
    cleared: rows that were cleared one by one; expected: announced number of rows, None if it was not announced.
    """

    rows: int
    done: int
    leased: int = 0
    cleared: int = 0
    expected: int | None = None

    @property
    def all(self) -> bool:
        """True if every existing or expected row is done, and there is one. Cleared rows count as done."""
        known = self.rows + self.cleared
        return 0 < known >= (self.expected or 0) and self.done == self.rows


class Found(Struct, frozen=True):
    """The rows, 0 for a key without a row.

    lost: the keys whose rows were lost with their unit; unnamed: number of lost rows of the partition that had no key,
    or whose keys are unknown since the controller was restarted.
    """

    rows: list[int]
    lost: list[str] = []
    unnamed: int = 0


UnitState: TypeAlias = Literal["serving", "silent", "leaving", "away"]


class UnitView(Struct, frozen=True, kw_only=True):
    """A unit as the controller knows it. away: it has not reported its rows since it, or the controller, started.

    silent: it has not called for several times the expected interval; rows: rows that it holds, or still has to move if
    it leaves; bytes: used bytes; limit: most bytes; epoch: epoch of its rows.
    """

    unit: int
    state: UnitState
    rows: int
    bytes: int
    limit: int
    epoch: int = 0
    address: str = ""
