"""What one partition holds: groups and their outcomes, tasks, the trainer, counts.

Invariant: after ``Partition.refresh(group)`` the indexes of all tasks agree with the rows of that group; ``counts`` and
``wanted`` always agree with the states of the rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from asyncflow.errors import Fenced, Misdirected, Refused
from asyncflow.queue.ledger.events import Declared
from asyncflow.queue.protocol.messages import KEY_TAG, Purpose, TaskSpec
from asyncflow.queue.table.gang import Gang
from asyncflow.queue.table.outcomes import Outcomes
from asyncflow.queue.table.readiness import TaskQueue
from asyncflow.queue.table.serials import Serials
from asyncflow.queue.table.state import Finished, Group, Row, Shape, State


class Partition:
    """Everything about one partition.

    schema: dtypes by column; revision: counts changes of ``wanted``; creator: the newest attempt of its creator; used:
    serials of open rows; keys: rows by their tag ``KEY_TAG``; cleared: how many open rows were; bare: no columns;
    expected: how many rows were announced; closed: the last step of a run, 0 where an open partition gets no more rows,
    None while more may come; resets, peeked: rows that were taken from a task, and looked at; forgotten:
    how many were cleared when the partition was last cleared as a whole; elsewhere: tasks of other controllers;
    returned: rows that were taken out of leases undone; attempts: of the gang, that began.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.purpose: Purpose | None = None
        self.groups: dict[int, Group] = {}
        self.finished = Outcomes()
        self.queues: dict[str, TaskQueue] = {}
        self.elsewhere: dict[str, Declared] = {}
        self.gang = Gang()
        self.counts: Counter[State] = Counter()
        self.wanted: dict[Row, None] = {}
        self.revision = 0
        self.creator = 0
        self.next_serial = 0
        self.used = Serials()
        self.keys: dict[str, Row] = {}
        self.cleared = 0
        self.forgotten = 0
        self.expected: int | None = None
        self.resets = 0
        self.peeked = 0
        self.returned = 0
        self.attempts: set[int] = set()
        self.closed: int | None = None
        self.schema: dict[str, str] = {}
        self.bare = Shape()
        self._gains: dict[tuple[Shape, Shape], list[TaskQueue]] = {}

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
        """Whether no more rows come: it is closed, or an open one has as many rows as were announced."""
        if self.closed is not None or self.expected is None or self.purpose not in (None, "open"):
            return self.closed is not None
        return self.counts.total() + self.cleared - self.forgotten >= self.expected

    def ended(self, task: str) -> bool:
        """Tell whether it is complete and has nothing for ``task`` that is not done or in somebody's hands."""
        if not self.complete or self.wanted or any(step > (self.closed or 0) for step in self.gang.steps):
            return False
        queue = self.queues.get(task)
        return self.counts[State.LIVE] == (queue.busy if queue is not None else 0)

    def emptied(self) -> Partition:
        """Return the partition without any row: its tasks, its creator, the serials used and what was counted stay."""
        fresh = Partition(self.name)
        fresh.revision, fresh.creator = self.revision + 1, self.creator
        fresh.resets, fresh.peeked = self.resets, self.peeked
        fresh.returned, fresh.attempts = self.returned, self.attempts
        if self.purpose == "open":
            fresh.purpose, fresh.used = "open", self.used
            fresh.cleared = fresh.forgotten = self.cleared + self.counts.total()
        for queue in self.queues.values():
            fresh.declare(queue.spec)
        fresh.elsewhere = self.elsewhere
        return fresh

    def declare(self, spec: TaskSpec) -> None:
        """Add a task, or replace the one of that name."""
        self.queues[spec.name] = queue = TaskQueue(spec)
        self._gains.clear()
        for group in self.groups.values():
            queue.refresh(group)
            works = [(row.state, row.work[spec.name]) for row in group.rows if spec.name in row.work]
            queue.leased += sum(1 for _, work in works if work.lease)
            queue.busy += sum(1 for state, work in works if state is State.LIVE and (work.lease or work.done))

    def refresh(self, group: Group) -> None:
        """Make all indexes agree with ``group``."""
        for queue in self.queues.values():
            queue.refresh(group)

    def created(self, rows: Sequence[Row], shape: Shape) -> None:
        """Take new rows of open groups, all of ``shape``, into the indexes."""
        for queue in self.gains(self.bare, shape):
            queue.created(rows)

    def gained(self, changed: Iterable[tuple[Row, Shape]]) -> None:
        """Take rows, each with its shape before, into the indexes of those tasks that waited for their new columns."""
        gained: dict[TaskQueue, list[Row]] = {}
        for row, before in changed:
            if row.shape is not before:
                for queue in self.gains(before, row.shape):
                    gained.setdefault(queue, []).append(row)
        for queue, rows in gained.items():
            queue.freed(rows)

    def gains(self, before: Shape, after: Shape) -> list[TaskQueue]:
        """Return the tasks that ``after`` suits and ``before`` did not."""
        gains = self._gains.get((before, after))
        if gains is None:
            gains = [q for q in self.queues.values() if q.suits(after) and not q.suits(before)]
            self._gains[before, after] = gains
        return gains

    def number(self, serial: int) -> None:
        """Note that ``serial`` exists."""
        self.next_serial = max(self.next_serial, serial + 1)

    def enter(self, row: Row) -> None:
        """Add ``row``, in place of the wanted one of that sample if there is one."""
        rows = row.group.rows
        if row.sample < len(rows):
            old = rows[row.sample]
            old.work = {}
            self.unname(old)
            self.move(old, row.state)
            for queue in self.queues.values():
                queue.taken([old])
            rows[row.sample] = row
            return
        rows.append(row)
        self.counts[row.state] += 1
        if row.state is State.WANTED:
            self.wanted[row] = None
            self.revision += 1
        elif row.state is State.LIVE and row.work:
            self._count_busy(row, 1)

    def move(self, row: Row, state: State) -> None:
        """Change the state of ``row`` and the counts with it."""
        before = row.state
        self.counts[before] -= 1
        self.counts[state] += 1
        if before is state:
            return
        if row.work and State.LIVE in (before, state):
            self._count_busy(row, 1 if state is State.LIVE else -1)
        if before is State.WANTED:
            self.revision += 1
            del self.wanted[row]
        elif state is State.WANTED:
            self.revision += 1
            self.wanted[row] = None
        row.state = state

    def bind(self, rows: Sequence[Row]) -> None:
        """Let live rows belong to the trainer: no task can claim them any more."""
        self.counts[State.LIVE] -= len(rows)
        self.counts[State.BOUND] += len(rows)
        for row in rows:
            if row.work:
                self._count_busy(row, -1)
            row.state = State.BOUND
        for queue in self.queues.values():
            queue.taken(rows)

    def _count_busy(self, row: Row, change: int) -> None:
        for task, work in row.work.items():
            if work.lease or work.done:
                self.queues[task].busy += change

    def settle(self, group: Group) -> None:
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
            self.finished[group.serial] = Finished(group.step, group.window, group.outcome)
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
