"""One partition: its groups and their outcomes, its tasks, the trainer's steps, the used serials, and counts.

A trainer's step binds a whole group when the first of its rows enters a slot; rows that do not fit wait in
``Step.carry`` for the next slot. A slot is decided once and stored, so that every rank gets the same one.

A serial numbers a group: its upper bits are the number of the client that put the group, the lower ``SERIAL_BITS`` are
the client's own count. A client has a unique name, and its first put assigns it a number. Number 0 is the creator of a
job's partition, who assigns serials itself. Clients count consecutively, so the serials that one has used are nearly
always one span, whatever became of the rows.

Invariants: after ``refresh(group)`` the indexes of all tasks agree with the rows of that group. ``counts`` and
``wanted`` always agree with the states of the rows. A group is bound only to its own step, which then cannot change. No
row is in two slots. A used serial never counts as new, and an unused one never counts as used.
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
from asyncflow.queue.table.state import LETTERS, Finished, Row, RowGroup, RowState, finished


class PartitionState:
    """The state of one partition.

    schema: dtypes by column; revision: number of changes of ``wanted``; creator: newest attempt of its creator;
    clients: numbers by client; used: serials that exist or are ``skipped``; finished: outcomes of groups by step and
    serial; keys: rows by their tag ``KEY_TAG``; cleared: number of former open rows, of which ``forgotten`` up to the
    last clear of the whole partition; expected: announced number of rows; closed: last step of a run, 0 if an open
    partition gets no more rows, None while more may come; resets, peeked: numbers of rows that were reset or shown;
    returned: number of rows whose lease ended undone, by reason; elsewhere: tasks of other controllers; attempts:
    started attempts of the gang.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.purpose: Purpose | None = None
        self.groups: dict[int, RowGroup] = {}
        self.finished: dict[int, dict[int, Finished]] = {}
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
        """Return the queue of a task, None if it is unknown. Raises Misdirected for a task of another controller."""
        queue = self.queues.get(name)
        if queue is None and (remote := self.elsewhere.get(name)) is not None:
            raise Misdirected.at(remote.controller, f"another controller decides about the task {self.name}/{name}")
        return queue

    def known_task(self, name: str) -> TaskQueue:
        """Return the queue of a task. Raises Refused if there is none, and Misdirected as ``task`` does."""
        queue = self.task(name)
        if queue is None:
            known = ", ".join(sorted(self.queues)) or "none"
            raise Refused(f"there is no task {name!r}", where=self.name, hint=f"It has {known}")
        return queue

    def check_creator(self, attempt: int) -> None:
        """Refuse an attempt of the creator after a newer attempt has taken over."""
        if attempt < self.creator:
            hint = "A newer attempt of the creator runs; this one must end"
            raise Fenced(f"creator attempt {attempt} is over, {self.creator} has started", where=self.name, hint=hint)

    def check_purpose(self, purpose: Purpose) -> None:
        """Refuse rows of another purpose than the partition's."""
        if self.purpose not in (None, purpose):
            hint = "Use another partition for them"
            raise Refused(f"the partition is for {self.purpose}, not {purpose}", where=self.name, hint=hint)

    @property
    def complete(self) -> bool:
        """True if no more rows come: it is closed, or it is open and has as many rows as were announced."""
        if self.closed is not None or self.expected is None or self.purpose not in (None, "open"):
            return self.closed is not None
        return self.counts.total() + self.cleared - self.forgotten >= self.expected

    def ended(self, task: str) -> bool:
        """Return whether it is complete and all of its rows are leased or done by ``task``."""
        if not self.complete or self.wanted or any(step > (self.closed or 0) for step in self.gang.steps):
            return False
        queue = self.queues.get(task)
        return self.counts[RowState.LIVE] == (queue.busy if queue is not None else 0)

    def emptied(self) -> PartitionState:
        """Return the partition without rows; tasks, creator and statistics stay; if it is open, used serials, too."""
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
        """Update the indexes of the tasks that need one of the ``columns`` that were added to rows."""
        for queue in self.queues.values():
            if not queue.needs.isdisjoint(columns):
                queue.freed(rows)

    def enter(self, row: Row) -> None:
        """Add ``row`` to its group; it replaces an existing row of that sample."""
        rows = row.group.rows
        if row.sample < len(rows):
            self.remove_key(rows[row.sample])
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
        """Add ``change`` to the counts for a row."""
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
        """Update the indexes. Keep only the outcome of a finished group, and nothing of a finished group of open rows.

        The finished group drops its rows, because they refer to it and the cycle would keep both in memory.
        """
        if not all(row.state.final for row in group.rows):
            self.refresh(group)
            return
        for queue in self.queues.values():
            queue.taken(group.rows)
        del self.groups[group.serial]
        if self.purpose != "open":
            outcome = "".join([LETTERS[row.state] for row in group.rows])
            self.finished.setdefault(group.step, {})[group.serial] = finished(group.window, outcome)
        group.rows = []

    def add_keys(self, rows: Iterable[Row]) -> None:
        """Note the keys of open rows."""
        for row in rows:
            if isinstance(key := row.tags.get(KEY_TAG), str):
                self.keys[key] = row

    def remove_key(self, row: Row) -> None:
        """Forget the key of a row that ends or is replaced."""
        key = row.tags.get(KEY_TAG)
        if isinstance(key, str) and self.keys.get(key) is row:
            del self.keys[key]


@dataclass(slots=True)
class Decision:
    """A slot. ranks: the rows of each rank, by key; totals: of the step up to this slot."""

    ranks: list[list[Row]]
    last: bool
    totals: StepTotals


@dataclass(slots=True)
class Step:
    """The progress of D_step through the trainer.

    groups, size: as declared; bound: groups by serial, in order of binding; carry: bound rows that are in no slot yet;
    settled: number of the first slots whose weights no longer change; settled_loads: their sum for each rank.
    """

    number: int
    groups: int | None = None
    size: int | None = None
    slots: list[Decision] = field(default_factory=list)
    bound: dict[int, RowGroup] = field(default_factory=dict)
    carry: dict[int, Row] = field(default_factory=dict)
    ranks_done: set[int] = field(default_factory=set)
    settled: int = 0
    settled_loads: list[int] = field(default_factory=list)

    @property
    def exhausted(self) -> bool:
        """True if its last slot was decided."""
        return bool(self.slots) and self.slots[-1].last

    @property
    def totals(self) -> StepTotals:
        """The totals of its slots so far."""
        return self.slots[-1].totals if self.slots else StepTotals()

    def loads(self, world: int, spec: TaskSpec) -> list[int]:
        """Return the total weight of the rows that each rank got so far. Slots of reported rows are summed once."""
        loads = self.settled_loads or [0] * world
        for slot in self.slots[self.settled :]:
            loads = [load + weight_of(slot.ranks[rank], shared=spec.shared_tokens) for rank, load in enumerate(loads)]
            if slot is self.slots[self.settled] and all(row.reported for rows in slot.ranks for row in rows):
                self.settled, self.settled_loads = self.settled + 1, loads
        return loads

    def reset(self) -> list[RowGroup]:
        """Forget slots, bindings and reports; return the groups that were bound."""
        groups = list(self.bound.values())
        self.slots, self.bound, self.carry, self.ranks_done, self.settled, self.settled_loads = [], {}, {}, set(), 0, []
        return groups


class Gang:
    """The trainer of one partition.

    attempt: -1 before the first ``begin``; theta: step of the weights that it started with; world: number of ranks;
    committed: the newest step that a checkpoint contains.
    """

    def __init__(self) -> None:
        self.attempt = -1
        self.theta = 0
        self.world = 0
        self.committed = 0
        self.steps: dict[int, Step] = {}

    def step(self, number: int) -> Step:
        """Return D_number, adding it if it is unknown."""
        if number not in self.steps:
            self.steps[number] = Step(number)
        return self.steps[number]

    @property
    def last_staged(self) -> int:
        """The newest step that all ranks have finished."""
        finished = [step for step in self.steps.values() if step.exhausted and len(step.ranks_done) == self.world]
        return max((step.number for step in finished), default=self.committed)

    def check_attempt(self, attempt: int, *, where: str) -> None:
        """Refuse a trainer attempt that is not the one started last."""
        if attempt < self.attempt:
            hint = "A newer attempt of the trainer runs; this one must end"
            raise Fenced(f"trainer attempt {attempt} is over, {self.attempt} has started", where=where, hint=hint)
        if attempt > self.attempt:
            raise Refused(f"trainer attempt {attempt} has not started", where=where, hint="Call begin first")

    def check_contained(self, step: int, *, where: str) -> None:
        """Refuse weights that contain a step whose rows, according to the ledger, were not all in slots."""
        for number in range(self.committed + 1, step + 1):
            known = self.steps.get(number)
            if known is None or not known.exhausted:
                raise Refused(
                    f"weights θ{step} contain step {number}, whose samples were never all in slots",
                    where=where,
                    hint="The ledger is lost, or older than the checkpoint: resume from an older checkpoint, or none",
                )

    def check_slot(self, step: int, slot: int, rank: int, *, where: str) -> Decision | None:
        """Return the slot if it was decided; refuse one that cannot be decided next."""
        self.check_rank(rank, where=where)
        known = self.steps.get(step)
        slots = known.slots if known else []
        if 0 <= slot < len(slots):
            return slots[slot]
        before = self.steps.get(step - 1)
        if step <= self.committed or not (step == self.committed + 1 or (before and before.exhausted)):
            hint = f"Steps are trained in order, and the last committed step is {self.committed}"
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
    """The serials that were used, as sorted spans with gaps between them."""

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
        """Return whether one of the serials from ``first`` up to ``end`` was used."""
        at = bisect_right(self._ends, first)
        return at < len(self._firsts) and self._firsts[at] < end

    def add(self, first: int, end: int) -> None:
        """Mark serials as used, and merge the spans that they touch."""
        low, high = bisect_left(self._ends, first), bisect_right(self._firsts, end)
        if low < high:
            first, end = min(first, self._firsts[low]), max(end, self._ends[high - 1])
        self._firsts[low:high], self._ends[low:high] = [first], [end]

    def next(self) -> int:
        """Return the serial after the highest one that the creator of a job's partition has used."""
        own = bisect_left(self._firsts, 1 << SERIAL_BITS)
        return self._ends[own - 1] if own else 0

    def missing(self) -> list[int]:
        """Return the unused serials below ``next``; in training they determine the next prompts."""
        own = bisect_left(self._firsts, 1 << SERIAL_BITS)
        gaps = zip([0, *self._ends[:own]], self._firsts[:own], strict=False)
        return [serial for end, first in gaps for serial in range(end, first)]
