"""The durable state of a queue, as the fold of its events.

Commands (``table``, ``claims``, ``training``) decide events and ``record`` them; recovery replays them. Both go
through ``apply``, so a restarted controller knows what the old one knew, but for the volatile fields, which units tell.

Invariants: nothing durable changes except in ``apply``; ``apply`` of an event that was recorded never fails; it uses no
volatile field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from asyncflow.errors import LedgerCorrupt
from asyncflow.flow.schedule import Window
from asyncflow.identity import RowPlace
from asyncflow.queue import events as ev
from asyncflow.queue.gang import Decision, Step
from asyncflow.queue.leases import Lease, Leases
from asyncflow.queue.messages import FILTERED, StepTotals
from asyncflow.queue.readiness import Partition
from asyncflow.queue.state import STATES, Finished, Group, Row, State, Work


class Books:
    """Partitions, leases, units and rows.

    rows: those that have bytes, by id; outbox: events to be written; frees: rows whose bytes are not needed any more;
    touched: partitions whose indexes or gang may have changed since it was last emptied.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.partitions: dict[str, Partition] = {}
        self.leases = Leases()
        self.units: dict[int, ev.UnitJoined] = {}
        self.rows: dict[int, Row] = {}
        self.outbox: list[ev.Event] = []
        self.frees: list[int] = []
        self.touched: set[str] = set()
        self._folds: dict[type, Callable[[Any], None]] = {
            ev.Started: self._started,
            ev.UnitJoined: self._unit_joined,
            ev.UnitLost: self._unit_lost,
            ev.RowsLost: self._rows_lost,
            ev.Declared: self._declared,
            ev.Typed: self._typed,
            ev.Created: self._created,
            ev.Leased: self._leased,
            ev.Completed: self._completed,
            ev.Returned: self._returned,
            ev.Dropped: self._dropped,
            ev.Opened: self._opened,
            ev.Began: self._began,
            ev.Slotted: self._slotted,
            ev.RankDone: self._rank_done,
            ev.Committed: self._committed,
            ev.Cleared: self._cleared,
            ev.Closed: self._closed,
            ev.Kept: self._kept,
            ev.Finals: self._finals,
            ev.TakenOver: self._taken_over,
        }

    def record(self, event: ev.Event) -> None:
        """Let ``event`` happen, and have it written."""
        self.apply(event)
        self.outbox.append(event)

    def apply(self, event: ev.Event) -> None:
        """Let ``event`` happen. LedgerCorrupt where it cannot have followed what happened before."""
        try:
            self._folds[type(event)](event)
        except (KeyError, IndexError, ValueError) as error:
            raise LedgerCorrupt(f"{event} does not follow from what went before: {error!r}") from error

    def partition(self, name: str) -> Partition:
        """Give the partition, which exists from now on."""
        if name not in self.partitions:
            self.partitions[name] = Partition(name)
        self.touched.add(name)
        return self.partitions[name]

    def _started(self, event: ev.Started) -> None:
        self.epoch = event.epoch

    def _unit_joined(self, event: ev.UnitJoined) -> None:
        self.epoch = event.epoch
        self.units[event.unit] = event

    def _unit_lost(self, event: ev.UnitLost) -> None:
        if (unit := self.units.get(event.unit)) and unit.epoch == event.epoch:
            del self.units[event.unit]
        self._lose([row for row in self.rows.values() if RowPlace.of(row.row).epoch == event.epoch])

    def _rows_lost(self, event: ev.RowsLost) -> None:
        self._lose([self.rows[row] for row in event.rows])

    def _lose(self, rows: Iterable[Row]) -> None:
        groups: dict[Group, None] = {}
        for row in rows:
            del self.rows[row.row]
            groups[row.group] = None
            row.columns, row.partial = {}, {}
            if row.state is State.BOUND:
                row.lost = True
                continue
            self._let_go(row)
            self.partition(row.group.partition).move(row, State.WANTED)
        for group in groups:
            self.partition(group.partition).refresh(group)

    def _let_go(self, row: Row) -> None:
        """End every lease on ``row``."""
        queues = self.partitions[row.group.partition].queues
        for task, work in row.work.items():
            if work.lease:
                self.leases.release(work.lease, row.row)
                work.lease = 0
                queues[task].leased -= 1

    def _declared(self, event: ev.Declared) -> None:
        self.partition(event.spec.partition).declare(event.spec)

    def _typed(self, event: ev.Typed) -> None:
        self.partition(event.partition).schema[event.column] = event.dtype

    def _created(self, event: ev.Created) -> None:
        partition = self.partition(event.partition)
        partition.purpose = event.purpose
        group = partition.groups.get(event.serial)
        if group is None:
            window = Window(event.oldest, event.newest)
            group = Group(event.partition, event.purpose, event.serial, event.size, event.step, window)
            partition.groups[event.serial] = group
            partition.number(event.serial)
        for sample, number in event.rows:
            row = Row(group, sample, number)
            partition.enter(row)
            self.rows[number] = row
        partition.refresh(group)

    def _leased(self, event: ev.Leased) -> None:
        partition = self.partition(event.partition)
        rows = dict.fromkeys(event.rows)
        self.leases.add(Lease(event.lease, event.partition, event.task, event.worker, event.ticket, rows))
        for row in self._rows(event.rows):
            row.work.setdefault(event.task, Work()).lease = event.lease
        partition.queues[event.task].leased += len(rows)
        self._refresh(event.rows)

    def _completed(self, event: ev.Completed) -> None:
        self._end(event.lease, event.rows, done=True)

    def _returned(self, event: ev.Returned) -> None:
        self._end(event.lease, event.rows, done=False)

    def _end(self, number: int, rows: list[int], *, done: bool) -> None:
        lease = self.leases.get(number)
        if lease is None:
            raise ValueError(f"lease {number:x} is not in force")
        queue = self.partition(lease.partition).queues[lease.task]
        for row in self._rows(rows):
            work = row.work[lease.task]
            work.lease = 0
            work.done = number if done else 0
            work.attempt += not done
            queue.leased -= 1
            self.leases.release(number, row.row)
        self._refresh(rows)

    def _dropped(self, event: ev.Dropped) -> None:
        state = State.FILTERED if event.reason.startswith(FILTERED) else State.DROPPED
        self._finish([self.rows[row] for row in event.rows], state)

    def _finish(self, rows: Iterable[Row], state: State) -> None:
        groups: dict[Group, None] = {}
        for row in rows:
            self._let_go(row)
            if self.rows.pop(row.row, None) is not None:
                self.frees.append(row.row)
            self.partition(row.group.partition).move(row, state)
            groups[row.group] = None
        for group in groups:
            self.partition(group.partition).settle(group)

    def _opened(self, event: ev.Opened) -> None:
        step = self.partition(event.partition).gang.step(event.step)
        step.groups, step.size = event.groups, event.size

    def _began(self, event: ev.Began) -> None:
        partition = self.partition(event.partition)
        gang = partition.gang
        self._commit(partition, event.step)
        for step in gang.steps.values():
            self._unstage(partition, step)
        if gang.committed > event.step:
            self._uncommit(partition, event.step)
        gang.attempt, gang.theta, gang.world = event.attempt, event.step, event.world
        gang.committed = event.step

    def _unstage(self, partition: Partition, step: Step) -> None:
        for group in step.reset():
            for row in group.rows.values():
                if row.state is State.BOUND:
                    partition.move(row, State.WANTED if row.lost else State.LIVE)
            partition.refresh(group)

    def _uncommit(self, partition: Partition, theta: int) -> None:
        for serial, finished in [(s, f) for s, f in partition.finished.items() if f.step > theta and "t" in f.outcome]:
            del partition.finished[serial]
            letters = finished.outcome
            group = Group(partition.name, partition.purpose, serial, len(letters), finished.step, finished.window)
            partition.groups[serial] = group
            for sample, letter in enumerate(letters):
                state = STATES[letter]
                partition.counts[state] -= 1
                state = State.WANTED if state is State.TRAINED else state
                partition.enter(Row(group, sample, 0, state))

    def _slotted(self, event: ev.Slotted) -> None:
        partition = self.partition(event.partition)
        step = partition.gang.step(event.step)
        pool = {row.row: row for row in step.carry}
        for serial in event.bound:
            group = partition.groups[serial]
            step.bound[serial] = group
            for sample in sorted(group.rows):
                row = group.rows[sample]
                if row.state is State.LIVE:
                    partition.move(row, State.BOUND)
                    pool[row.row] = row
            partition.refresh(group)
        ranks = [[pool.pop(number) for number in rank] for rank in event.ranks]
        totals = StepTotals(groups=event.groups, samples=event.samples, response_tokens=event.response_tokens)
        step.slots.append(Decision(ranks, event.last, totals))
        step.carry = list(pool.values())

    def _rank_done(self, event: ev.RankDone) -> None:
        self.partition(event.partition).gang.step(event.step).ranks_done.add(event.rank)

    def _committed(self, event: ev.Committed) -> None:
        self._commit(self.partition(event.partition), event.step)

    def _commit(self, partition: Partition, upto: int) -> None:
        gang = partition.gang
        for step in gang.steps.values():
            if step.number <= upto:
                rows = [row for group in step.reset() for row in group.rows.values() if row.state is State.BOUND]
                self._finish(rows, State.TRAINED)
        gang.committed = max(gang.committed, upto)

    def _cleared(self, event: ev.Cleared) -> None:
        old = self.partition(event.partition)
        for group in old.groups.values():
            for row in group.rows.values():
                self._let_go(row)
                if self.rows.pop(row.row, None) is not None:
                    self.frees.append(row.row)
        self.partitions[event.partition] = old.emptied()

    def _closed(self, event: ev.Closed) -> None:
        self.partition(event.partition).closed = event.step

    def _taken_over(self, event: ev.TakenOver) -> None:
        self.partition(event.partition).creator = event.attempt

    def _kept(self, event: ev.Kept) -> None:
        partition = self.partition(event.partition)
        partition.purpose = event.purpose
        window = Window(event.oldest, event.newest)
        group = Group(event.partition, event.purpose, event.serial, event.size, event.step, window)
        partition.groups[event.serial] = group
        partition.number(event.serial)
        for sample, number, state, lost, works in event.rows:
            row = Row(group, sample, number, State(state), lost)
            row.work = {task: Work(attempt, 0, done) for task, attempt, done in works}
            partition.enter(row)
            if row.state is State.LIVE and not lost:
                self.rows[number] = row

    def _finals(self, event: ev.Finals) -> None:
        partition = self.partition(event.partition)
        partition.purpose = event.purpose
        for serial, step, oldest, newest, outcome in event.groups:
            partition.finish(serial, Finished(step, Window(oldest, newest), outcome))
            partition.number(serial)
            for letter in outcome:
                partition.counts[STATES[letter]] += 1

    def _rows(self, numbers: Iterable[int]) -> list[Row]:
        return [self.rows[number] for number in numbers]

    def _refresh(self, numbers: Iterable[int]) -> None:
        for group in dict.fromkeys(self.rows[number].group for number in numbers):
            self.partition(group.partition).refresh(group)
