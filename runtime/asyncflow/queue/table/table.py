"""The queue as a pure state machine: the commands on units and tasks; the modules next to this one hold the rest.

It has no clock and no socket. A command checks, then ``record``s events in the ``QueueState``, which collects events to
write, rows to free and changed partitions. The controller takes them after each command.

Invariants: once a newer attempt of a creator has taken over, no put of an older one is accepted, however late it comes;
so what the newer attempt has read stays true until it puts. A cell counts as present only after it was admitted here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from asyncflow.errors import Refused
from asyncflow.flow.selection import selection_of
from asyncflow.identity import epoch_of
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.protocol.messages import KEY_TAG, Tag, TaskSpec, Wanted, check_task
from asyncflow.queue.protocol.unit_calls import Cells, Held, MovedRows
from asyncflow.queue.table.apply import QueueState
from asyncflow.queue.table.leases import Claims
from asyncflow.queue.table.moves import RowMoves, ends_rows, place
from asyncflow.queue.table.partition import PartitionState
from asyncflow.queue.table.rows import Change, add_cells
from asyncflow.queue.table.state import Row, by_row
from asyncflow.queue.table.training import Training


class Table:
    """All commands of the queue. Callers pass ``now``, in seconds on any steady clock.

    index: the index of this controller among all ``controllers``; controller: its epoch.
    """

    def __init__(self, *, index: int = 0, controllers: int = 1) -> None:
        self.state = QueueState(index)
        self.controllers = controllers
        self.claims = Claims(self.state)
        self.training = Training(self.state)
        self.moves = RowMoves(self.state)
        self.controller = 0

    def start(self, now: float) -> None:
        """Start to serve after ``state`` was read from the ledger: with a new epoch, and full time for every lease.

        The restart therefore never shortens a lease that was in force when the controller stopped.
        """
        self.state.to_free.clear()
        self.state.silent = {unit.epoch for unit in self.state.units.values()}
        self.state.record(ev.ControllerStarted(self.state.epoch + 1))
        self.controller = self.state.epoch
        self.claims.start(now)
        self.moves.start()

    def declare(self, specs: Sequence[TaskSpec]) -> None:
        """Add or change tasks, each of which stays at one controller forever; repeating a declaration has no effect."""
        for spec in specs:
            check_task(spec)
            selection_of(spec.order, where=f"task {spec.partition}/{spec.name}")
            partition = self.state.partition(spec.partition)
            gang = partition.gang_queue
            if spec.kind == "gang" and gang is not None and gang.spec.name != spec.name:
                hint = "A partition has one training transaction, so only one gang"
                raise Refused(f"{spec.partition} has the gang {gang.spec.name} already", where=spec.name, hint=hint)
            known = partition.queues.get(spec.name)
            remote = partition.elsewhere.get(spec.name)
            if remote is not None and ends_rows(spec):
                hint = "Declare it under another name"
                what = f"controller {remote.controller} has the task, and only the primary ends rows"
                raise Refused(what, where=spec.name, hint=hint)
            before = remote.spec if remote is not None else known.spec if known is not None else None
            if before is None:
                self.state.record(ev.Declared(spec, place(self.state, spec, self.controllers)))
            elif before != spec:
                self.state.record(ev.Declared(spec, remote.controller if remote is not None else 0))

    def join_unit(self, unit: int, incarnation: str) -> int:
        """Return the epoch of a unit's rows. A new incarnation gets a new one, and the old one's rows are lost."""
        known = self.state.units.get(unit)
        if known is not None and known.incarnation == incarnation:
            return known.epoch
        self.lose_unit(unit)
        self.state.record(ev.UnitJoined(self.state.epoch + 1, unit, incarnation))
        return self.state.epoch

    def lose_unit(self, unit: int) -> None:
        """Record the loss of a unit: its rows become wanted, except for committed ones."""
        if (known := self.state.units.get(unit)) is not None:
            self.state.record(ev.UnitLost(known.epoch, unit))
            self.state.silent.discard(known.epoch)

    def hold(self, location: int, held: Iterable[Held]) -> list[int]:
        """Note the rows that the unit at ``location`` reports to hold; return those that it must free.

        These are rows that are no longer needed, or have moved to another unit.
        """
        unknown: list[int] = []
        known: dict[str, list[Row]] = {}
        new: set[str] = set()
        for report in held:
            row = self.state.rows.get(report.row)
            if row is None or row.location != location:
                unknown.append(report.row)
                continue
            new |= report.columns.keys() - row.columns.keys()
            row.columns, row.partial, row.reported = report.columns, report.partial, True
            row.tokens, row.tags = report.tokens, report.tags
            known.setdefault(row.group.partition, []).append(row)
        for name, rows in known.items():
            partition = self.state.partition(name)
            partition.add_keys(rows)
            partition.changed(rows, new)
        return unknown

    def move_in(self, location: int, entry: MovedRows) -> list[bool]:
        """Move rows to ``location``, whose unit has taken them over; return which of them are now there.

        If no unit has reported a row since the controller restarted, the values from this unit are accepted.
        """
        moved = self.moves.take(location, entry)
        columns = by_row(entry.cells, len(entry.rows))
        for index, number in enumerate(entry.rows):
            if moved[index] and not self.state.rows[number].reported:
                cells = columns[index]
                partial = {name: cells.pop(name) for name in entry.partial}
                tokens, tags = entry.tokens[index], entry.tags[index]
                self.hold(location, [Held(row=number, columns=cells, partial=partial, tokens=tokens, tags=tags)])
        return moved

    def miss(self, location: int) -> int:
        """Record the loss of rows that their unit did not name in its complete report; return their number."""
        unnamed = [number for number, row in self.state.rows.items() if not row.reported and row.location == location]
        self.state.silent.discard(epoch_of(location))
        return self.lose_rows(unnamed)

    def lose_rows(self, numbers: Iterable[int]) -> int:
        """Record the loss of rows whose bytes are lost; return their number. Rows that are not needed are ignored.

        A row of a step is lost with its whole group, because a group is scored, and created again, as one.
        """
        missing: dict[str, dict[int, Row]] = {}
        numbered = dict.fromkeys(numbers)
        for number in numbered:
            if (row := self.state.rows.get(number)) is not None:
                group = row.group
                whole = [row] if group.purpose == "open" else group.rows
                here = {each.row: each for each in whole if each.row in self.state.rows}
                missing.setdefault(group.partition, {}).update(here)
        for partition, rows in missing.items():
            self.state.record(ev.RowsGone(partition, list(rows)))
            self.state.to_free += [row for number, row in rows.items() if number not in numbered]
        return sum(map(len, missing.values()))

    def take_over(self, partition: str, attempt: int) -> None:
        """Start an attempt of the partition's creator, which fences older ones. Raises Fenced for an older attempt."""
        held = self.state.partition(partition)
        held.check_creator(attempt)
        if attempt > held.creator:
            self.state.record(ev.PartitionSet(partition, "creator", attempt))

    def clear_rows(self, partition: str, rows: Sequence[int]) -> list[bool]:
        """Forget rows of an open partition, including wanted ones, and free their bytes; False for unknown rows."""
        held = self.state.partition(partition)
        held.check_purpose("open")
        lost = {row.row for row in held.wanted}
        known = [
            number in lost or ((row := self.state.rows.get(number)) is not None and row.group.partition == partition)
            for number in rows
        ]
        if found := list(dict.fromkeys(number for number, ok in zip(rows, known, strict=True) if ok)):
            self.state.record(ev.RowsCleared(partition, found))
        return known

    def complete(
        self, lease: str, rows: Sequence[int], cells: Cells, tags: Sequence[dict[str, Tag]] | None
    ) -> list[bool]:
        """Admit the outputs of rows whose lease is in force, which completes them; return False for other rows.

        A completion that is repeated because its reply was lost is admitted again.
        """
        held = self.claims.holder(lease)
        if held is not None:
            partition = self.state.partitions[held.partition]
            queue = partition.queues[held.task]
            if missing := set(queue.spec.writes) - cells.dtypes.keys():
                raise Refused(f"task {held.task} writes {sorted(missing)} too", where=f"lease {lease}")
            _check_writers(partition, queue.spec, cells)
            self.state.check_schema(partition, cells.dtypes)
            if queue.spec.clears and cells.sizes:
                raise Refused("the task clears what it completes, so it writes nothing", where=f"lease {lease}")
            if tags and any(KEY_TAG in of for of in tags) and partition.purpose == "open":
                hint = "Put the row under the other key, and clear this one"
                raise Refused(f"the tag {KEY_TAG!r} is the row's fixed key", where=f"lease {lease}", hint=hint)
        columns = by_row(cells, len(rows))
        repeated = set() if held is not None and held.rows.keys() >= set(rows) else self.claims.completed(lease, rows)
        admitted = self.claims.complete(lease, rows)
        changes = []
        for number, ok, fresh, added in zip(rows, admitted, columns, tags or [{}] * len(rows), strict=True):
            row = self.state.rows.get(number) if ok else None
            if row is not None and not (number in repeated and row.columns.keys() >= fresh.keys()):
                changes.append((row, fresh, added))
        add_cells(self.state, changes)
        return admitted

    def give_back(self, lease: str, rows: Sequence[int], reason: str | None, cells: Cells | None = None) -> list[bool]:
        """Make rows ready again with attempt + 1, and keep the columns written so far for the next holder.

        reason: None if the lease continues, and only the written columns are kept.
        """
        if cells is not None and (held := self.claims.holder(lease)) is not None:
            partition = self.state.partitions[held.partition]
            _check_writers(partition, partition.queues[held.task].spec, cells)
        columns = by_row(cells, len(rows)) if cells is not None else [{} for _ in rows]
        returned = self.claims.give_back(lease, rows, reason)
        outcomes = zip(rows, columns, returned, strict=True)
        kept: list[Change] = [(self.state.rows[row], written, {}) for row, written, ok in outcomes if ok]
        add_cells(self.state, kept, partial=True)
        return returned

    def wanted(self, partition: str) -> Wanted:
        """Return the samples to create again. The revision changes with them and with each start of the controller.

        Tags and tokens are included only in an open partition; a job's creator has its own.
        """
        held = self.state.partition(partition)
        metas = [row.meta for row in sorted(held.wanted, key=lambda row: row.key)]
        if held.purpose != "open":
            metas = [msgspec.structs.replace(meta, tokens=0, tags={}) for meta in metas]
        return Wanted(revision=self.state.epoch << 32 | held.revision, keys=metas)

    def clear(self, partition: str, attempt: int = 0) -> None:
        """Forget all rows of a partition; its tasks stay declared. attempt: the attempt of its creator."""
        held = self.state.partition(partition)
        held.check_creator(attempt)
        announced = held.expected is not None or held.closed is not None
        if announced or held.counts.total() or held.cleared > held.forgotten:
            self.state.record(ev.Cleared(partition))

    def close(self, partition: str, step: int) -> None:
        """Mark a run as complete up to ``step``, or an open partition as one that accepts no more rows."""
        if self.state.partition(partition).closed != step:
            self.state.record(ev.PartitionSet(partition, "closed", step))

    def expect(self, partition: str, total: int) -> None:
        """Set the total number of rows that the partition will have; it may be changed."""
        if self.state.partition(partition).expected != total:
            self.state.record(ev.PartitionSet(partition, "expected", total))


def _check_writers(partition: PartitionState, task: TaskSpec, cells: Cells) -> None:
    """Refuse columns of a job's rows that another task writes."""
    if partition.purpose == "open" or cells.dtypes.keys() <= set(task.writes):
        return
    for other in [each.spec for each in partition.queues.values()] + [of.spec for of in partition.elsewhere.values()]:
        if other.name != task.name and (taken := cells.dtypes.keys() & set(other.writes)):
            raise Refused(f"task {task.name} may not write {sorted(taken)}: {other.name} does", where=partition.name)
