"""The durable state of a queue, as the fold of its events.

Commands (``table``, ``claims``, ``training``) decide events and ``record`` them; recovery replays them. Both go
through ``apply``, so a restarted controller knows what the old one knew, but for the volatile fields, which units tell.
What each event does is in ``folds`` and its like, of which ``folding`` has the list; here is what they have in common.

Invariants: nothing durable changes except in ``apply``; ``apply`` of an event that was recorded never fails; it uses no
volatile field.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from asyncflow.errors import LedgerCorrupt, Refused
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.table.leases import Leases
from asyncflow.queue.table.partition import Partition
from asyncflow.queue.table.readiness import TaskQueue
from asyncflow.queue.table.state import IDLE, Group, Row, State, Work, new_row

Fold: TypeAlias = Callable[["Books", Any], None]
"""What an event of one type does."""


class Books:
    """Partitions, leases, units and rows. folds: what each event does, by its type.

    rows: those that have bytes, by id; units: those there, by index; leaving: epochs of those that shall leave; outbox:
    events to be written; frees: rows whose bytes are not needed any more; touched: partitions whose indexes or gang may
    have changed since it was last emptied; now: clock of ``Row.since``; index: of the controller whose books these are;
    news: told of each event before it happens, for who follows.
    """

    def __init__(self, folds: Mapping[type, Fold]) -> None:
        self._folds = folds
        self.epoch = 0
        self.partitions: dict[str, Partition] = {}
        self.leases = Leases()
        self.units: dict[int, ev.UnitJoined] = {}
        self.leaving: set[int] = set()
        self.rows: dict[int, Row] = {}
        self.outbox: list[ev.Event] = []
        self.frees: list[Row] = []
        self.touched: set[str] = set()
        self.now = 0.0
        self.index = 0
        self.news: Callable[[ev.Event], None] | None = None

    def record(self, event: ev.Event) -> None:
        """Let ``event`` happen, and have it written."""
        if self.news is not None:
            self.news(event)
        self.apply(event)
        self.outbox.append(event)

    def apply(self, event: ev.Event) -> None:
        """Let ``event`` happen. LedgerCorrupt where it cannot have followed what happened before."""
        try:
            self._folds[type(event)](self, event)
        except (KeyError, IndexError, ValueError) as error:
            raise LedgerCorrupt(f"{event} does not follow from what went before: {error!r}") from error

    def replay(self, events: Iterable[ev.Event]) -> None:
        """Let ``events`` of a ledger happen; the garbage collector rests meanwhile, as none of it is garbage.

        Afterwards it is as before: it is the process's, and whoever runs here leaves garbage of his own.
        """
        rests = not gc.isenabled()
        gc.disable()
        try:
            for event in events:
                self.apply(event)
        finally:
            if not rests:
                gc.enable()

    def partition(self, name: str) -> Partition:
        """Return the partition, which exists from now on."""
        if name not in self.partitions:
            self.partitions[name] = Partition(name)
        self.touched.add(name)
        return self.partitions[name]

    def check_schema(self, partition: Partition, dtypes: Mapping[str, str]) -> None:
        """Have new columns hold these dtypes from now on. Refused where a known one holds another."""
        known = partition.schema
        if dtypes.items() <= known.items():
            return
        for name, dtype in dtypes.items():
            if known.get(name, dtype) != dtype:
                hint = "A column has one dtype in a partition"
                raise Refused(f"column {name} holds {known[name]}, not {dtype}", where=partition.name, hint=hint)
        for name in sorted(dtypes.keys() - known.keys()):
            self.record(ev.Typed(partition.name, name, dtypes[name]))

    def lose(self, rows: Iterable[Row]) -> None:
        """Lose rows whose bytes are gone, and all leases on them: they are wanted, once they are not bound."""
        groups: dict[Group, None] = {}
        for row in rows:
            del self.rows[row.row]
            groups[row.group] = None
            partition = self.partition(row.group.partition)
            row.absent(partition.bare)
            self.let_go(row)
            if row.state is State.BOUND:
                row.lost = True
                continue
            partition.move(row, State.WANTED)
        for group in groups:
            self.partition(group.partition).refresh(group)

    def let_go(self, row: Row) -> None:
        """End every lease on ``row``."""
        if not row.work:
            return
        queues = self.partitions[row.group.partition].queues
        for task, work in row.work.items():
            if work.lease:
                self.leases.release(work.lease, [row.row])
                self.advance(queues[task], [row], lambda work: Work(work.attempt, 0, work.done))
                queues[task].leased -= 1

    def advance(self, queue: TaskQueue, rows: Iterable[Row], step: Callable[[Work], Work]) -> None:
        """Replace how far the task of ``queue`` has come with ``rows``, as ``step`` says; equals share the result."""
        task, live, busy = queue.spec.name, State.LIVE, 0
        made: dict[int, tuple[Mapping[str, Work], Mapping[str, Work], int]] = {}
        known: Mapping[str, Work] | None = None
        for row in rows:
            if row.work is not known:
                known = row.work
                found = made.get(id(known))
                if found is None:
                    old = known.get(task, IDLE)
                    new = step(old)
                    change = bool(new.lease or new.done) - bool(old.lease or old.done)
                    made[id(known)] = found = (known, {**known, task: new}, change)
                _, after, change = found
            row.work = after
            if change and row.state is live:
                busy += change
        queue.busy += busy

    def enter(self, partition: Partition, group: Group, sample: int, number: int) -> None:
        """Add a new row to a group, in place of the wanted one if there is one."""
        self.rows[number] = row = new_row(group, sample, number, State.LIVE, partition.bare, self.now)
        partition.enter(row)

    def end_rows(self, number: int, numbers: list[int], *, done: bool) -> tuple[TaskQueue, list[Row]]:
        """Take rows out of their lease, completed or not; give the task's queue, and the rows."""
        lease = self.leases.get(number)
        if lease is None:
            raise ValueError(f"lease {number:x} is not in force")
        queue = self.partition(lease.partition).queues[lease.task]
        rows = list(map(self.rows.__getitem__, numbers))
        self.advance(queue, rows, lambda work: Work(work.attempt + (not done), 0, number if done else 0))
        queue.leased -= len(rows)
        self.leases.release(number, numbers, done=done)
        return queue, rows

    def clear(self, partition: Partition, rows: Iterable[Row]) -> None:
        """Forget open rows."""
        self.finish(rows, State.CLEARED)
        partition.cleared += partition.counts.pop(State.CLEARED, 0)

    def finish(self, rows: Iterable[Row], state: State) -> None:
        """Let nothing more happen to rows: free their bytes and their leases."""
        groups: dict[Group, None] = {}
        for row in rows:
            self.let_go(row)
            if self.rows.pop(row.row, None) is not None:
                self.frees.append(row)
            partition = self.partition(row.group.partition)
            partition.move(row, state)
            partition.unname(row)
            groups[row.group] = None
        for group in groups:
            self.partition(group.partition).settle(group)
