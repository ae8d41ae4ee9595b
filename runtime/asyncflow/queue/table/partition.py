"""One partition: its groups and their outcomes, its tasks, the trainer's steps, the serials that were used, and counts.

A trainer's step binds groups whole when the first of their rows goes into a slot; rows that did not fit wait in
``Step.carry`` for the next slot. A slot is decided once and then remembered, so that every rank sees the same one.

A serial numbers a group: its upper bits are the number of the client that put the group, the lower ``SERIAL_BITS`` the
client's own count. A client is known by a name that nobody else has, and gets a number of its own with its first put. 0
is the creator of a job's partition, who gives serials itself. Clients count on, so what one of them has used is nearly
always one span, whatever became of the rows.

Invariants: after ``refresh(group)`` the indexes of all tasks agree with the rows of that group; ``counts`` and
``wanted`` always agree with the states of the rows; a group is bound to its own step only, and keeps that from then on;
no row is in two slots; a serial that was used is never taken for new, nor one that was not for used.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from asyncflow.errors import Fenced, Misdirected, Refused
from asyncflow.flow.slots import weight_of
from asyncflow.queue.ledger.events import Declared
from asyncflow.queue.protocol.messages import KEY_TAG, SERIAL_BITS, Purpose, StepTotals, TaskSpec
from asyncflow.queue.table.ready import TaskQueue
from asyncflow.queue.table.state import LETTERS, Finished, Row, RowGroup, RowState


class PartitionState:
    """Everything about one partition.

    schema: dtypes by column; revision: counts changes of ``wanted``; creator: the newest attempt of its creator;
    clients: their numbers; used: the serials that exist or are ``skipped``; finished: outcomes of groups by serial;
    keys: rows by their tag ``KEY_TAG``; cleared: how many open rows were, of which ``forgotten`` with the partition as
    a whole; expected: how many rows were announced; closed: the last step of a run, 0 where an open partition gets no
    more rows, None while more may come; resets, peeked, returned: rows that were taken from a task, looked at, and
    taken out of leases undone, by reason; elsewhere: tasks of other controllers; attempts: of the gang, that began.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.purpose: Purpose | None = None
        self.groups: dict[int, RowGroup] = {}
        self.finished: dict[int, Finished] = {}
        self.queues: dict[str, TaskQueue] = {}
        self.elsewhere: dict[str, Declared] = {}
        self.gang = Gang()
        self.counts: Counter[RowState] = Counter()
        self.wanted: dict[Row, None] = {}
        self.revision = 0
        self.creator = 0
        self.clients: dict[bytes, int] = {}
        self.used = Serials()
        self.skipped = Serials()
        self.keys: dict[str, Row] = {}
        self.cleared = 0
        self.forgotten = 0
        self.expected: int | None = None
        self.resets = 0
        self.peeked = 0
        self.returned: Counter[str] = Counter()
        self.attempts: set[int] = set()
        self.closed: int | None = None
        self.schema: dict[str, str] = {}

    @property
    def gang_queue(self) -> TaskQueue | None:
        """The trainer's task, if one is declared."""
        return next((queue for queue in self.queues.values() if queue.spec.kind == "gang"), None)

    def task(self, name: str) -> TaskQueue | None:
        """Return the queue of a task, None if it is not known. Raises Misdirected for one of another controller."""
        queue = self.queues.get(name)
        if queue is None and (there := self.elsewhere.get(name)) is not None:
            raise Misdirected.at(there.controller, f"the task {self.name}/{name} is not decided about here")
        return queue

    def known_task(self, name: str) -> TaskQueue:
        """Return the queue of a task. Raises Refused where there is none, and what ``task`` does."""
        queue = self.task(name)
        if queue is None:
            known = ", ".join(sorted(self.queues)) or "none"
            raise Refused(f"there is no task {name!r}", where=self.name, hint=f"It has {known}")
        return queue

    def check_creator(self, attempt: int) -> None:
        """Refuse a creator of whom a newer attempt has taken over."""
        if attempt < self.creator:
            hint = "A newer attempt of it creates; this one must end"
            raise Fenced(f"creator attempt {attempt} is over, {self.creator} has begun", where=self.name, hint=hint)

    def check_purpose(self, purpose: Purpose) -> None:
        """Refuse rows of a purpose that the partition has not."""
        if self.purpose not in (None, purpose):
            hint = "Use a partition of its own"
            raise Refused(f"the partition is for {self.purpose}, not {purpose}", where=self.name, hint=hint)

    @property
    def complete(self) -> bool:
        """True once no more rows come: it is closed, or an open one has as many rows as were announced."""
        if self.closed is not None or self.expected is None or self.purpose not in (None, "open"):
            return self.closed is not None
        return self.counts.total() + self.cleared - self.forgotten >= self.expected

    def ended(self, task: str) -> bool:
        """Tell whether it is complete and has nothing for ``task`` that is not done or in somebody's hands."""
        if not self.complete or self.wanted or any(step > (self.closed or 0) for step in self.gang.steps):
            return False
        queue = self.queues.get(task)
        return self.counts[RowState.LIVE] == (queue.busy if queue is not None else 0)

    def emptied(self) -> PartitionState:
        """Return the partition without any row: its tasks, its creator, the serials used and what was counted stay."""
        fresh = PartitionState(self.name)
        fresh.revision, fresh.creator = self.revision + 1, self.creator
        fresh.resets, fresh.peeked = self.resets, self.peeked
        fresh.returned, fresh.attempts = self.returned, self.attempts
        if self.purpose == "open":
            fresh.purpose, fresh.clients, fresh.used = "open", self.clients, self.used
            fresh.cleared = fresh.forgotten = self.cleared + self.counts.total()
        for queue in self.queues.values():
            fresh.declare(queue.spec)
        fresh.elsewhere = self.elsewhere
        return fresh

    def declare(self, spec: TaskSpec) -> None:
        """Add a task, or replace the one of that name."""
        self.queues[spec.name] = queue = TaskQueue(spec)
        for group in self.groups.values():
            queue.refresh(group)
            works = [(row.state, row.work[spec.name]) for row in group.rows if spec.name in row.work]
            queue.leased += sum(1 for _, work in works if work.lease)
            queue.busy += sum(work.busy for state, work in works if state is RowState.LIVE)

    def refresh(self, group: RowGroup) -> None:
        """Make all indexes agree with ``group``."""
        for queue in self.queues.values():
            queue.refresh(group)

    def changed(self, rows: Sequence[Row], columns: Iterable[str]) -> None:
        """Take rows into the indexes of those tasks that need one of the columns that they got."""
        for queue in self.queues.values():
            if not queue.needs.isdisjoint(columns):
                queue.freed(rows)

    def enter(self, row: Row) -> None:
        """Add ``row`` to its group, in place of the wanted one of that sample if there is one."""
        rows = row.group.rows
        if row.sample < len(rows):
            self.unname(rows[row.sample])
            self._count(rows[row.sample], -1)
            rows[row.sample] = row
        else:
            rows.append(row)
        self._count(row, 1)

    def move(self, row: Row, state: RowState) -> None:
        """Change the state of ``row`` and the counts with it."""
        if row.state is not state:
            self._count(row, -1)
            row.state = state
            self._count(row, 1)

    def _count(self, row: Row, change: int) -> None:
        """Count a row that came or went."""
        self.counts[row.state] += change
        if row.state is RowState.WANTED:
            self.revision += 1
            if change > 0:
                self.wanted[row] = None
            else:
                del self.wanted[row]
        elif row.state is RowState.LIVE:
            for task, work in row.work.items():
                self.queues[task].busy += change * work.busy

    def settle(self, group: RowGroup) -> None:
        """Bring the indexes up to date; keep only the outcome of a group that is finished, of open ones not even that.

        The group lets go of its rows then: they name it, and would otherwise keep each other.
        """
        if not all(row.state.final for row in group.rows):
            self.refresh(group)
            return
        for queue in self.queues.values():
            queue.taken(group.rows)
        del self.groups[group.serial]
        if self.purpose != "open":
            outcome = "".join([LETTERS[row.state] for row in group.rows])
            self.finished[group.serial] = Finished(group.step, group.window, outcome)
        group.rows = []

    def name_rows(self, rows: Iterable[Row]) -> None:
        """Take note of the keys of open rows."""
        for row in rows:
            if isinstance(key := row.tags.get(KEY_TAG), str):
                self.keys[key] = row

    def unname(self, row: Row) -> None:
        """Forget the key of a row that goes."""
        key = row.tags.get(KEY_TAG)
        if isinstance(key, str) and self.keys.get(key) is row:
            del self.keys[key]


@dataclass(slots=True)
class Decision:
    """A slot: the rows of each rank, by key; totals: of the step so far."""

    ranks: list[list[Row]]
    last: bool
    totals: StepTotals


@dataclass(slots=True)
class Step:
    """D_step on its way through the trainer.

    groups, size: as it was opened; bound: by serial, in order of binding; carry: by id, what no slot has had.
    """

    number: int
    groups: int | None = None
    size: int | None = None
    slots: list[Decision] = field(default_factory=list)
    bound: dict[int, RowGroup] = field(default_factory=dict)
    carry: dict[int, Row] = field(default_factory=dict)
    ranks_done: set[int] = field(default_factory=set)

    @property
    def exhausted(self) -> bool:
        """Its last slot was decided."""
        return bool(self.slots) and self.slots[-1].last

    @property
    def totals(self) -> StepTotals:
        """The totals of its slots so far."""
        return self.slots[-1].totals if self.slots else StepTotals()

    def loads(self, world: int, spec: TaskSpec) -> list[int]:
        """Return the weight of what each rank has had so far."""
        return [
            sum([weight_of(slot.ranks[rank], shared=spec.shared_tokens) for slot in self.slots])
            for rank in range(world)
        ]

    def reset(self) -> list[RowGroup]:
        """Forget slots, bindings and reports; return the groups that were bound."""
        groups = list(self.bound.values())
        self.slots, self.bound, self.carry, self.ranks_done = [], {}, {}, set()
        return groups


class Gang:
    """The trainer of one partition.

    attempt: -1 before the first ``begin``; theta: the step of the weights it began with; world: its number of ranks;
    committed: the newest step that a checkpoint holds.
    """

    def __init__(self) -> None:
        self.attempt = -1
        self.theta = 0
        self.world = 0
        self.committed = 0
        self.steps: dict[int, Step] = {}

    def step(self, number: int) -> Step:
        """Return D_number, which is known from now on."""
        if number not in self.steps:
            self.steps[number] = Step(number)
        return self.steps[number]

    @property
    def last_staged(self) -> int:
        """The newest step that all ranks have finished."""
        finished = [step for step in self.steps.values() if step.exhausted and len(step.ranks_done) == self.world]
        return max((step.number for step in finished), default=self.committed)

    def check_attempt(self, attempt: int, *, where: str) -> None:
        """Refuse a trainer that is not the one which began last."""
        if attempt < self.attempt:
            hint = "A newer attempt of the trainer runs; this one must end"
            raise Fenced(f"trainer attempt {attempt} is over, {self.attempt} has begun", where=where, hint=hint)
        if attempt > self.attempt:
            raise Refused(f"trainer attempt {attempt} has not begun", where=where, hint="Call begin first")

    def check_contained(self, step: int, *, where: str) -> None:
        """Refuse weights that hold steps of which the ledger does not know that all their rows were in slots."""
        for number in range(self.committed + 1, step + 1):
            known = self.steps.get(number)
            if known is None or not known.exhausted:
                raise Refused(
                    f"weights θ{step} contain step {number}, whose samples were never all in slots",
                    where=where,
                    hint="The ledger is older than the checkpoint: resume from an older checkpoint",
                )

    def check_slot(self, step: int, slot: int, rank: int, *, where: str) -> Decision | None:
        """Return the slot if it was decided; refuse one that cannot be the next to decide."""
        self.check_rank(rank, where=where)
        known = self.steps.get(step)
        slots = known.slots if known else []
        if 0 <= slot < len(slots):
            return slots[slot]
        before = self.steps.get(step - 1)
        if step <= self.committed or not (step == self.committed + 1 or (before and before.exhausted)):
            hint = f"Steps go one after another, and {self.committed} are committed"
            raise Refused(f"step {step} cannot be trained now", where=where, hint=hint)
        if slot != len(slots) or (known and known.exhausted):
            hint = (
                f"{len(slots)} slots were decided{' and the last was among them' if known and known.exhausted else ''}"
            )
            raise Refused(f"there is no slot {slot} in step {step}", where=where, hint=hint)
        return None

    def check_rank(self, rank: int, *, where: str) -> None:
        """Refuse a rank that the gang does not have."""
        if not 0 <= rank < self.world:
            raise Refused(f"there is no rank {rank} in a gang of {self.world}", where=where)


class Serials:
    """The serials that were used, as spans: sorted, and no two of them touch."""

    def __init__(self, spans: Iterable[tuple[int, int]] = ()) -> None:
        self._firsts: list[int] = []
        self._ends: list[int] = []
        for first, end in spans:
            self.add(first, end)

    def __contains__(self, serial: int) -> bool:
        return self.overlaps(serial, serial + 1)

    def __len__(self) -> int:
        return sum(self._ends) - sum(self._firsts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield each span: its first serial, and the one after its last."""
        return zip(self._firsts, self._ends, strict=True)

    def overlaps(self, first: int, end: int) -> bool:
        """Tell whether one of the serials from ``first`` up to ``end`` was used."""
        at = bisect_right(self._ends, first)
        return at < len(self._firsts) and self._firsts[at] < end

    def add(self, first: int, end: int) -> None:
        """Note that these serials are used: one span with those that it touches."""
        low, high = bisect_left(self._ends, first), bisect_right(self._firsts, end)
        if low < high:
            first, end = min(first, self._firsts[low]), max(end, self._ends[high - 1])
        self._firsts[low:high], self._ends[low:high] = [first], [end]

    def next(self) -> int:
        """Return the serial above all that the creator who gives serials itself has used."""
        own = bisect_left(self._firsts, 1 << SERIAL_BITS)
        return self._ends[own - 1] if own else 0

    def missing(self) -> list[int]:
        """Return the serials below ``next`` that were not used; in training they say which prompt is next."""
        own = bisect_left(self._firsts, 1 << SERIAL_BITS)
        gaps = zip([0, *self._ends[:own]], self._firsts[:own], strict=False)
        return [serial for end, first in gaps for serial in range(end, first)]
