"""The durable state of a queue, and the effect of each event on it.

Commands (``rows``, ``leases``, ``training``, ``moves``) decide events and ``record`` them; recovery replays them. Both
use ``apply``, so a restarted controller has the state of the old one, except for the volatile fields, which the units
report.

Invariants: nothing durable changes except in ``apply``. ``apply`` of an event that was recorded never fails, and uses
no volatile field. Every type of event has one entry in ``APPLY``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import repeat
from typing import Any, Final, TypeAlias

from asyncflow.errors import LedgerCorrupt, ManifestError, Refused
from asyncflow.flow.schedule import VersionWindow
from asyncflow.identity import location_at
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.protocol.messages import FILTERED, StepTotals
from asyncflow.queue.table.partition import Decision, PartitionState, Serials, Step
from asyncflow.queue.table.ready import TaskQueue
from asyncflow.queue.table.state import IDLE, STATES, Lease, LeaseTable, Row, RowGroup, RowState, TaskWork, finished

Apply: TypeAlias = Callable[["QueueState", Any], None]
"""The function that applies one type of event."""


class QueueState:
    """Partitions, leases, units and rows.

    rows: rows that have bytes, by id; units: the joined units, by index; leaving: epochs of units that are to leave;
    silent: epochs of the units that have not reported their rows since the controller started, so keys cannot be
    trusted yet; outbox: events to write; to_free: rows whose bytes are no longer needed; changed: partitions whose
    indexes or gang may have changed since it was last emptied; now: clock of ``Row.since``; index: index of this
    controller; observer: called with each event before it is applied, for replica controllers.
    """

    def __init__(self, index: int = 0) -> None:
        self.epoch = 0
        self.partitions: dict[str, PartitionState] = {}
        self.leases = LeaseTable()
        self.units: dict[int, ev.UnitJoined] = {}
        self.leaving: set[int] = set()
        self.silent: set[int] = set()
        self.rows: dict[int, Row] = {}
        self.outbox: list[ev.Event] = []
        self.to_free: list[Row] = []
        self.changed: set[str] = set()
        self.now = 0.0
        self.index = index
        self.observer: Callable[[ev.Event], None] | None = None

    def record(self, event: ev.Event) -> None:
        """Apply ``event``, and queue it for writing."""
        if self.observer is not None:
            self.observer(event)
        self.apply(event)
        self.outbox.append(event)

    def apply(self, event: ev.Event) -> None:
        """Apply ``event``. Raises LedgerCorrupt if it contradicts the current state."""
        try:
            APPLY[type(event)](self, event)
        except (KeyError, IndexError, ValueError, ManifestError) as error:
            raise LedgerCorrupt(f"{event} does not follow from the events before it: {error!r}") from error

    def replay(self, events: Iterable[ev.Event]) -> None:
        """Apply the ``events`` of a ledger."""
        for event in events:
            self.apply(event)

    def partition(self, name: str) -> PartitionState:
        """Return the partition, creating it if it does not exist."""
        if name not in self.partitions:
            self.partitions[name] = PartitionState(name)
        self.changed.add(name)
        return self.partitions[name]

    def check_schema(self, partition: PartitionState, dtypes: Mapping[str, str]) -> None:
        """Set the dtypes of new columns. Raises Refused if a known column has another dtype."""
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
        """Note that rows have lost their bytes, and end their leases; the rows become wanted unless they are bound."""
        groups: dict[RowGroup, None] = {}
        for row in rows:
            del self.rows[row.row]
            groups[row.group] = None
            partition = self.partition(row.group.partition)
            row.lose()
            self.end_leases(row)
            if row.state is RowState.BOUND:
                row.lost = True
                continue
            partition.move(row, RowState.WANTED)
        for group in groups:
            self.partition(group.partition).refresh(group)

    def end_leases(self, row: Row) -> None:
        """End every lease on ``row``."""
        if not row.work:
            return
        queues = self.partitions[row.group.partition].queues
        for task, work in row.work.items():
            if work.lease:
                self.leases.release(work.lease, [row.row])
                self.advance(queues[task], [row], lambda work: TaskWork(work.attempt, 0, work.done, work.holder))
                queues[task].leased -= 1

    def advance(self, queue: TaskQueue, rows: Iterable[Row], step: Callable[[TaskWork], TaskWork]) -> None:
        """Apply ``step`` to the progress of ``queue``'s task with ``rows``; rows with equal work share one mapping."""
        task, change = queue.spec.name, 0
        known = worked = None
        for row in rows:
            if worked is None or row.work is not known:
                known, old = row.work, row.work.get(task, IDLE)
                new = step(old)
                worked, change = {**known, task: new}, new.busy - old.busy
            row.work = worked
            if row.state is RowState.LIVE:
                queue.busy += change

    def enter(self, partition: PartitionState, row: Row) -> None:
        """Add a new row to its group; it replaces a wanted row of that sample."""
        row.since = self.now
        partition.enter(row)
        if row.state is RowState.LIVE and not row.lost:
            self.rows[row.row] = row

    def end_rows(self, number: int, numbers: list[int], *, done: bool) -> tuple[TaskQueue, list[Row]]:
        """Remove rows from their lease, completed or not; return the task's queue, and the rows."""
        lease = self.leases.get(number)
        if lease is None:
            raise ValueError(f"lease {number:x} is not in force")
        queue = self.partition(lease.partition).queues[lease.task]
        rows = list(map(self.rows.__getitem__, numbers))
        ended, holder = (number, lease.holder) if done else (0, "")
        self.advance(queue, rows, lambda work: TaskWork(work.attempt + (not done), 0, ended, holder))
        queue.leased -= len(rows)
        self.leases.release(number, numbers, done=done)
        return queue, rows

    def clear(self, partition: PartitionState, rows: Iterable[Row]) -> None:
        """Forget rows of an open partition."""
        self.finish(rows, RowState.CLEARED)
        partition.cleared += partition.counts.pop(RowState.CLEARED, 0)

    def finish(self, rows: Iterable[Row], outcome: RowState) -> None:
        """Move rows to the final state ``outcome``, and free their bytes and leases."""
        groups: dict[RowGroup, None] = {}
        for row in rows:
            self.end_leases(row)
            if self.rows.pop(row.row, None) is not None:
                self.to_free.append(row)
            partition = self.partition(row.group.partition)
            partition.move(row, outcome)
            partition.remove_key(row)
            groups[row.group] = None
        for group in groups:
            self.partition(group.partition).settle(group)


def _started(state: QueueState, event: ev.ControllerStarted) -> None:
    state.epoch = event.epoch


def _unit_joined(state: QueueState, event: ev.UnitJoined) -> None:
    state.epoch = event.epoch
    state.units[event.unit] = event


def _unit_lost(state: QueueState, event: ev.UnitLost) -> None:
    if (unit := state.units.get(event.unit)) and unit.epoch == event.epoch:
        del state.units[event.unit]
    state.leaving.discard(event.epoch)
    location = location_at(event.epoch, event.unit)
    state.lose([row for row in state.rows.values() if row.location == location])


def _moved(state: QueueState, event: ev.Moved) -> None:
    for number in event.rows:
        state.rows[number].moved = event.location


def _declared(state: QueueState, event: ev.Declared) -> None:
    partition = state.partition(event.spec.partition)
    if event.controller == state.index:
        partition.declare(event.spec)
    else:
        partition.elsewhere[event.spec.name] = event


def _rows_put(state: QueueState, event: ev.RowsPut) -> None:
    """Create groups, or replace the wanted rows of existing groups."""
    partition, size, serials = state.partition(event.partition), event.size, event.serials
    partition.purpose = event.purpose
    if size < 1 or len(event.rows) != len(serials) * size:
        raise ValueError(f"{len(event.rows)} rows do not make {len(serials)} groups of {size}")
    if serials == list(range(serials[0], serials[0] + len(serials))):
        partition.used.add(serials[0], serials[0] + len(serials))
    else:
        for serial in serials:
            partition.used.add(serial, serial + 1)
    window = VersionWindow(event.oldest, event.newest)
    for index, serial in enumerate(serials):
        numbers = event.rows[index * size : (index + 1) * size]
        group = partition.groups.get(serial)
        if group is None:
            group = partition.groups[serial] = RowGroup(event.partition, event.purpose, serial, event.step, window)
            group.rows = [Row(group, sample, row, since=state.now) for sample, row in enumerate(numbers)]
            partition.counts[RowState.LIVE] += size
            state.rows.update(zip(numbers, group.rows, strict=True))
        else:
            for sample in [row.sample for row in group.rows if row.state is RowState.WANTED]:
                state.enter(partition, Row(group, sample, numbers[sample]))


def _leased(state: QueueState, event: ev.Leased) -> None:
    queue = state.partition(event.partition).queues[event.task]
    held = dict.fromkeys(event.rows)
    lease = Lease(event.lease, event.partition, event.task, event.worker, event.ticket, held, whole=event.whole)
    state.leases.add(lease)
    rows = list(map(state.rows.__getitem__, event.rows))
    state.advance(queue, rows, lambda work: TaskWork(work.attempt, event.lease, work.done, work.holder))
    queue.taken(rows)
    queue.leased += len(held)


def _completed(state: QueueState, event: ev.Completed) -> None:
    queue, rows = state.end_rows(event.lease, event.rows, done=True)
    if queue.spec.clears and rows and rows[0].group.purpose == "open":
        state.clear(state.partition(rows[0].group.partition), rows)
    elif queue.by_group:
        for group in dict.fromkeys([row.group for row in rows]):
            queue.refresh(group)


def _returned(state: QueueState, event: ev.Returned) -> None:
    queue, rows = state.end_rows(event.lease, event.rows, done=False)
    queue.freed(rows)
    returned = state.partition(queue.spec.partition).returned
    known = event.reason in returned or len(returned) < ev.MOST_REASONS
    returned[event.reason if known else ev.OTHER_REASON] += len(rows)


def _dropped(state: QueueState, event: ev.RowsDropped) -> None:
    outcome = RowState.FILTERED if event.reason.startswith(FILTERED) else RowState.DROPPED
    state.finish([state.rows[row] for row in event.rows], outcome)


def _cleared(state: QueueState, event: ev.Cleared) -> None:
    old = state.partition(event.partition)
    for lease in [lease for lease in state.leases if lease.partition == event.partition]:
        state.leases.release(lease.id, list(lease.rows))
    rows = [row for group in old.groups.values() for row in group.rows]
    state.to_free += filter(None, map(state.rows.pop, [row.row for row in rows], repeat(None)))
    for group in old.groups.values():
        group.rows = []
    state.partitions[event.partition] = old.emptied()


def _opened(state: QueueState, event: ev.Opened) -> None:
    step = state.partition(event.partition).gang.step(event.step)
    step.groups, step.size = event.groups, event.size


def _began(state: QueueState, event: ev.Began) -> None:
    partition = state.partition(event.partition)
    gang = partition.gang
    partition.attempts.add(event.attempt)
    _commit(state, partition, event.step)
    for step in gang.steps.values():
        _unstage(partition, step)
    if gang.committed > event.step:
        _uncommit(state, partition, event.step)
    gang.attempt, gang.theta, gang.world = event.attempt, event.step, event.world
    gang.committed = event.step


def _unstage(partition: PartitionState, step: Step) -> None:
    for group in step.reset():
        for row in group.rows:
            if row.state is RowState.BOUND:
                partition.move(row, RowState.WANTED if row.lost else RowState.LIVE)
        partition.refresh(group)


def _uncommit(state: QueueState, partition: PartitionState, theta: int) -> None:
    later = [(s, step, f) for step, of in partition.finished.items() if step > theta for s, f in of.items()]
    for serial, step, (window, letters) in sorted(each for each in later if "t" in each[2].outcome):
        del partition.finished[step][serial]
        assert partition.purpose is not None
        group = partition.groups[serial] = RowGroup(partition.name, partition.purpose, serial, step, window)
        for sample, letter in enumerate(letters):
            outcome = STATES[letter]
            partition.counts[outcome] -= 1
            state.enter(partition, Row(group, sample, 0, RowState.WANTED if outcome is RowState.TRAINED else outcome))


def _slotted(state: QueueState, event: ev.SlotDecided) -> None:
    partition = state.partition(event.partition)
    step = partition.gang.step(event.step)
    started = {serial: partition.groups[serial] for serial in event.bound}
    rows = [row for group in started.values() for row in group.rows if row.state is RowState.LIVE]
    for row in rows:
        partition.move(row, RowState.BOUND)
    for queue in partition.queues.values():
        queue.taken(rows)
    step.bound.update(started)
    step.carry.update({row.row: row for row in rows})
    ranks = [list(map(step.carry.pop, rank)) for rank in event.ranks]
    totals = StepTotals(groups=event.groups, samples=event.samples, response_tokens=event.response_tokens)
    step.slots.append(Decision(ranks, event.last, totals))


def _exchanged(state: QueueState, event: ev.Exchanged) -> None:
    partition = state.partition(event.partition)
    one, other = map(partition.groups.__getitem__, event.serials)
    one.step, other.step = other.step, one.step
    one.instead_of, other.instead_of = other.serial, None
    partition.revision += any(row.state is RowState.WANTED for row in (*one.rows, *other.rows))
    for queue in partition.queues.values():
        queue.taken([*one.rows, *other.rows])
    partition.refresh(one)
    partition.refresh(other)


def _commit(state: QueueState, partition: PartitionState, upto: int) -> None:
    gang = partition.gang
    for number in sorted(number for number in gang.steps if gang.committed < number <= upto):
        rows = [row for group in gang.steps[number].reset() for row in group.rows if row.state is RowState.BOUND]
        state.finish(rows, RowState.TRAINED)
    gang.committed = max(gang.committed, upto)


def _numbered(state: QueueState, event: ev.Numbered) -> None:
    partition = state.partition(event.partition)
    partition.purpose = "open"
    partition.clients[event.client] = event.number


def _rows_cleared(state: QueueState, event: ev.RowsCleared) -> None:
    partition = state.partition(event.partition)
    lost = {row.row: row for row in partition.wanted}
    state.clear(partition, [state.rows.get(number) or lost[number] for number in event.rows])


def _reset(state: QueueState, event: ev.TaskReset) -> None:
    partition = state.partition(event.partition)
    queue = partition.queues[event.task]
    for group in partition.groups.values():
        for row in group.rows:
            work = row.work.get(event.task, IDLE)
            if row.state is not RowState.LIVE or not (work.lease or work.done):
                continue
            if work.lease:
                state.leases.release(work.lease, [row.row])
                queue.leased -= 1
            state.advance(queue, [row], lambda work: TaskWork(work.attempt + 1))
        queue.refresh(group)
    partition.resets += event.rows


def _peeked(state: QueueState, event: ev.Peeked) -> None:
    state.partition(event.partition).peeked += event.rows


def _skipped(state: QueueState, event: ev.Skipped) -> None:
    partition = state.partition(event.partition)
    for serial in event.serials:
        partition.used.add(serial, serial + 1)
        partition.skipped.add(serial, serial + 1)


def _restore_head(state: QueueState, head: ev.SnapshotHead) -> None:
    state.epoch, state.leaving = head.epoch, set(head.leaving)
    state.units = {unit.unit: unit for unit in head.units}
    for lease in head.completed:
        state.leases.remember(lease)


def _restore_partition(state: QueueState, record: ev.SnapshotPartition) -> None:
    if record.name in state.partitions:
        raise ValueError(f"the partition {record.name} exists already")
    partition = state.partition(record.name)
    partition.purpose, partition.schema = record.purpose, dict(record.schema)
    partition.creator, partition.expected, partition.closed = record.creator, record.expected, record.closed
    partition.resets, partition.peeked, partition.returned = record.resets, record.peeked, Counter(record.reasons)
    if unnamed := record.returned - partition.returned.total():
        partition.returned[ev.NO_REASON] += unnamed
    partition.cleared, partition.forgotten = record.cleared, record.forgotten
    partition.attempts, partition.clients = set(record.attempts), dict(record.clients)
    partition.counts.update(dict(zip(STATES.values(), record.ended, strict=True)))
    partition.used, partition.skipped = Serials(record.used), Serials(record.skipped)


def _restore_groups(state: QueueState, record: ev.SnapshotGroups) -> None:
    partition = state.partition(record.partition)
    if partition.purpose is None:
        raise ValueError(f"the partition {record.partition} has no purpose")
    for entry in record.groups:
        serial, window = entry.serial, VersionWindow(entry.oldest, entry.newest)
        ended = partition.finished.setdefault(entry.step, {})
        if serial in partition.groups or serial in ended or bool(entry.outcome) == bool(entry.rows):
            raise ValueError(f"the group {serial} exists already, or has both or none of rows and an outcome")
        if entry.outcome:
            if not STATES.keys() >= set(entry.outcome):
                raise ValueError(f"{entry.outcome} is no outcome")
            ended[serial] = finished(window, entry.outcome)
            continue
        group = partition.groups[serial] = RowGroup(record.partition, partition.purpose, serial, entry.step, window)
        group.instead_of = entry.instead_of
        for sample, row in enumerate(entry.rows):
            row_state = RowState(row.state)
            work = {task: TaskWork(attempt, 0, done, holder) for task, attempt, done, holder in row.works}
            made = Row(group, sample, row.row, row_state, work=work, moved=row.moved, lost=row.lost)
            if row_state.final:
                partition.counts[row_state] -= 1
            state.enter(partition, made)


APPLY: Final[dict[type, Apply]] = {
    ev.ControllerStarted: _started,
    ev.Dated: lambda *_: None,
    ev.UnitJoined: _unit_joined,
    ev.UnitLost: _unit_lost,
    ev.RowsGone: lambda state, event: state.lose([state.rows[row] for row in event.rows]),
    ev.UnitLeaving: lambda state, event: state.leaving.add(event.epoch),
    ev.Moved: _moved,
    ev.Declared: _declared,
    ev.Typed: lambda state, event: state.partition(event.partition).schema.update({event.column: event.dtype}),
    ev.RowsPut: _rows_put,
    ev.Skipped: _skipped,
    ev.Leased: _leased,
    ev.Completed: _completed,
    ev.Returned: _returned,
    ev.RowsDropped: _dropped,
    ev.Cleared: _cleared,
    ev.PartitionSet: lambda state, event: setattr(state.partition(event.partition), event.field, event.value),
    ev.Opened: _opened,
    ev.Began: _began,
    ev.SlotDecided: _slotted,
    ev.Exchanged: _exchanged,
    ev.RankDone: lambda state, event: state.partition(event.partition).gang.step(event.step).ranks_done.add(event.rank),
    ev.Committed: lambda state, event: _commit(state, state.partition(event.partition), event.step),
    ev.Numbered: _numbered,
    ev.RowsCleared: _rows_cleared,
    ev.TaskReset: _reset,
    ev.Peeked: _peeked,
    ev.SnapshotHead: _restore_head,
    ev.SnapshotPartition: _restore_partition,
    ev.SnapshotGroups: _restore_groups,
}
