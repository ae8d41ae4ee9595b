"""What is ready for one task, and what one partition holds.

A row is ready for a task when it lives, has every column that the task needs, and the task neither holds it nor has
completed it. A group is ready when at least one of its rows is and none stands in the way: every other one is done or
final.

Invariant: after ``Partition.refresh(group)`` the indexes of all tasks agree with the rows of that group.
"""

from __future__ import annotations

from collections import Counter

from asyncflow.errors import Fenced
from asyncflow.flow.schedule import Window
from asyncflow.flow.selection import ReadyIndex
from asyncflow.queue.gang import Gang
from asyncflow.queue.messages import TaskSpec
from asyncflow.queue.state import Finished, Group, Row, State


class TaskQueue:
    """The rows or groups that are ready for one task."""

    def __init__(self, spec: TaskSpec) -> None:
        self.spec = spec
        self.index: ReadyIndex[Row | Group] = ReadyIndex()
        self.leased = 0
        self._needs = frozenset(spec.needs)

    @property
    def by_group(self) -> bool:
        """Whole groups only."""
        return self.spec.groups or self.spec.kind == "gang"

    def open_rows(self, group: Group) -> list[Row]:
        """Give the rows of ``group`` that are ready on their own, by sample."""
        return [group.rows[sample] for sample in sorted(group.rows) if self._open(group.rows[sample])]

    def refresh(self, group: Group) -> None:
        """Make the index agree with ``group``."""
        if self.by_group:
            ready = [] if any(self._blocks(row) for row in group.rows.values()) else self.open_rows(group)
            if ready:
                window = Window(group.step, group.step) if self.spec.kind == "gang" else group.window
                self.index.add(group, window=window, order=self._order(group, 0), weight=len(ready))
            else:
                self.index.discard(group)
            return
        for row in group.rows.values():
            if self._open(row):
                self.index.add(row, window=group.window, order=self._order(group, row.sample))
            else:
                self.index.discard(row)

    def forget(self, group: Group, row: Row) -> None:
        """Take ``row``, which is being replaced, and its group out of the index."""
        self.index.discard(row)
        self.index.discard(group)

    def _open(self, row: Row) -> bool:
        if row.state is not State.LIVE or not self._needs <= row.columns.keys():
            return False
        work = row.work.get(self.spec.name)
        return work is None or not (work.lease or work.done)

    def _blocks(self, row: Row) -> bool:
        if row.state.final or self._open(row):
            return False
        work = row.work.get(self.spec.name)
        return not (row.state is State.LIVE and work is not None and work.done)

    def _order(self, group: Group, sample: int) -> tuple[int, ...]:
        return (group.serial, sample) if self.spec.order == "key" else (group.step,)


class Partition:
    """Everything about one partition.

    schema: dtypes by column; revision: counts changes of ``wanted``; creator: the newest attempt of its creator.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.purpose = ""
        self.groups: dict[int, Group] = {}
        self.finished: dict[int, Finished] = {}
        self.queues: dict[str, TaskQueue] = {}
        self.gang = Gang()
        self.counts: Counter[State] = Counter()
        self.wanted: dict[Row, None] = {}
        self.revision = 0
        self.creator = 0
        self.next_serial = 0
        self.missing: set[int] = set()
        self.closed: int | None = None
        self.schema: dict[str, str] = {}
        self._kept: dict[Finished, Finished] = {}

    @property
    def gang_queue(self) -> TaskQueue | None:
        """The trainer's task, if one is declared."""
        return next((queue for queue in self.queues.values() if queue.spec.kind == "gang"), None)

    def check_creator(self, attempt: int) -> None:
        """Refuse a creator of whom a newer attempt has taken over."""
        if attempt < self.creator:
            hint = "A newer attempt of it creates; this one must end"
            raise Fenced(f"creator attempt {attempt} is over, {self.creator} has begun", where=self.name, hint=hint)

    def emptied(self) -> Partition:
        """Give the partition without any row: its tasks and its creator stay."""
        fresh = Partition(self.name)
        fresh.revision, fresh.creator = self.revision + 1, self.creator
        for queue in self.queues.values():
            fresh.declare(queue.spec)
        return fresh

    def declare(self, spec: TaskSpec) -> None:
        """Add a task, or replace the one of that name."""
        self.queues[spec.name] = queue = TaskQueue(spec)
        for group in self.groups.values():
            queue.refresh(group)
            queue.leased += sum(1 for row in group.rows.values() if (w := row.work.get(spec.name)) and w.lease)

    def refresh(self, group: Group) -> None:
        """Make all indexes agree with ``group``."""
        for queue in self.queues.values():
            queue.refresh(group)

    def number(self, serial: int) -> None:
        """Note that ``serial`` exists."""
        if serial >= self.next_serial:
            self.missing.update(range(self.next_serial, serial))
            self.next_serial = serial + 1
        else:
            self.missing.discard(serial)

    def enter(self, row: Row) -> None:
        """Add ``row``, in place of the wanted one of that sample if there is one."""
        old = row.group.rows.get(row.sample)
        if old is not None:
            self.move(old, row.state)
            for queue in self.queues.values():
                queue.forget(row.group, old)
        else:
            self.counts[row.state] += 1
            if row.state is State.WANTED:
                self.wanted[row] = None
                self.revision += 1
        row.group.rows[row.sample] = row

    def move(self, row: Row, state: State) -> None:
        """Change the state of ``row`` and the counts with it."""
        self.counts[row.state] -= 1
        self.counts[state] += 1
        if (row.state is State.WANTED) != (state is State.WANTED):
            self.revision += 1
            if state is State.WANTED:
                self.wanted[row] = None
            else:
                self.wanted.pop(row)
        row.state = state

    def settle(self, group: Group) -> None:
        """Bring the indexes up to date; keep only the outcome of a group that is finished."""
        outcome = group.outcome
        self.refresh(group)
        if outcome:
            del self.groups[group.serial]
            self.finish(group.serial, Finished(group.step, group.window, outcome))

    def finish(self, serial: int, finished: Finished) -> None:
        """Keep the outcome of a group; equal ones share their memory."""
        self.finished[serial] = self._kept.setdefault(finished, finished)
