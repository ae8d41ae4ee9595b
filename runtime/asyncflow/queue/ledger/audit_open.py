"""The open partitions of a ledger, for the auditor: which rows are there, and whether a task had one of them twice.

Like the auditor it shares only the record classes with the queue, and keeps its own small account: the rows that live,
who holds each for a task, and which tasks are done with it.

Invariant: ``put == cleared + dropped + remaining`` unless ``problems`` says otherwise.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from asyncflow.queue.ledger import events as ev
from asyncflow.queue.ledger.homes import Homes

Place = tuple[str, str]
"""Partition and task."""

Key = tuple[str, int, int]
"""Partition, serial of the group, number in it."""

_LIVE, _WANTED = 0, 2


@dataclass
class OpenAudit:
    """What became of open rows.

    homes: where rows lie, which has seen an event before ``see``; names: the open partitions; rows: the living ones, by
    id; lost: those without bytes.
    """

    homes: Homes
    names: set[str] = field(default_factory=set)
    put: int = 0
    cleared: int = 0
    dropped: int = 0
    problems: list[str] = field(default_factory=list)
    rows: dict[int, Key] = field(default_factory=dict)
    lost: dict[int, Key] = field(default_factory=dict)
    groups: Counter[tuple[str, int]] = field(default_factory=Counter)
    held: defaultdict[Place, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    done: defaultdict[Place, set[int]] = field(default_factory=lambda: defaultdict(set))
    leases: dict[int, Place] = field(default_factory=dict)
    clearing: set[Place] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._seen: dict[type, Callable[[Any], None]] = {
            ev.Declared: self._declared,
            ev.Put: self._put,
            ev.SnapshotPartition: self._snapshot_partition,
            ev.SnapshotRows: self._snapshot_rows,
            ev.Numbered: lambda event: self.names.add(event.partition),
            ev.Leased: self._leased,
            ev.Completed: self._completed,
            ev.Returned: self._returned,
            ev.Dropped: self._dropped,
            ev.RowsCleared: self._rows_cleared,
            ev.RowsLost: lambda event: self._lose(event.rows),
            ev.UnitLost: lambda _: self._lose([row for row in self.rows if self.homes.lost(row)]),
            ev.Reset: self._reset,
            ev.Cleared: self._all_cleared,
        }

    @property
    def remaining(self) -> int:
        """Rows that are neither cleared nor dropped."""
        return len(self.rows) + len(self.lost)

    def see(self, event: ev.Event) -> None:
        """Take note of what happened next."""
        if (see := self._seen.get(type(event))) is not None:
            see(event)

    def _declared(self, event: ev.Declared) -> None:
        place = (event.spec.partition, event.spec.name)
        (self.clearing.add if event.spec.clears else self.clearing.discard)(place)

    def _put(self, event: ev.Put) -> None:
        self.names.add(event.partition)
        lost = {key: row for row, key in self.lost.items()}
        row = event.row
        for serial in range(event.serial, event.serial + event.groups):
            known = self.groups[event.partition, serial]
            for sample in range(event.size):
                key = (event.partition, serial, sample)
                if (before := lost.get(key)) is not None:
                    self._forget([before])
                    self.put -= 1
                if before is not None or not known:
                    self._enter(row, key)
                row += 1

    def _enter(self, row: int, key: Key) -> None:
        if row in self.rows:
            self.problems.append(f"row {row} of {key[0]} was put twice")
        self.rows[row] = key
        self.groups[key[:2]] += 1
        self.put += 1

    def _snapshot_partition(self, event: ev.SnapshotPartition) -> None:
        for task in event.tasks:
            self._declared(task)
        if event.purpose == "open":
            self.names.add(event.name)
            self.cleared += event.cleared
            self.dropped += event.filtered + event.dropped
            self.put += event.cleared + event.filtered + event.dropped

    def _snapshot_rows(self, event: ev.SnapshotRows) -> None:
        if event.partition not in self.names:
            return
        for serial, sample, row, run in rows_of(event):
            if run.state in (_LIVE, _WANTED):
                self._enter(row, (event.partition, serial, sample))
                for task in [task for task, _, done in run.works if done]:
                    self.done[event.partition, task].add(row)
            if run.state == _WANTED:
                self._lose([row])

    def _leased(self, event: ev.Leased) -> None:
        if event.partition not in self.names:
            return
        place = (event.partition, event.task)
        self.leases[event.lease] = place
        for row in event.rows:
            if row not in self.rows or row in self.done[place] or row in self.held[place]:
                self.problems.append(f"row {row} of {event.partition} went to {event.task} twice, or was gone")
            self.held[place][row] = event.lease

    def _completed(self, event: ev.Completed) -> None:
        place = self.leases.get(event.lease)
        if place is None:
            return
        for row in event.rows:
            if self.held[place].pop(row, 0) != event.lease:
                self.problems.append(f"row {row} of {place[0]} was completed by {place[1]} without its lease")
        self.done[place].update(event.rows)
        if place in self.clearing:
            self._forget(event.rows)
            self.cleared += len(event.rows)

    def _returned(self, event: ev.Returned) -> None:
        if (place := self.leases.get(event.lease)) is not None:
            for row in event.rows:
                self.held[place].pop(row, None)

    def _dropped(self, event: ev.Dropped) -> None:
        if event.partition in self.names:
            self._forget(event.rows)
            self.dropped += len(event.rows)

    def _rows_cleared(self, event: ev.RowsCleared) -> None:
        self._forget(event.rows)
        self.cleared += len(event.rows)

    def _lose(self, rows: Iterable[int]) -> None:
        """Let rows wait to be put again, under other ids but the same serials."""
        for row in rows:
            if (key := self.rows.get(row)) is not None:
                self._forget([row])
                self.lost[row] = key
                self.groups[key[:2]] += 1

    def _reset(self, event: ev.Reset) -> None:
        self.held.pop((event.partition, event.task), None)
        self.done.pop((event.partition, event.task), None)

    def _all_cleared(self, event: ev.Cleared) -> None:
        if event.partition in self.names:
            gone = [row for rows in (self.rows, self.lost) for row, key in rows.items() if key[0] == event.partition]
            self._forget(gone)
            self.cleared += len(gone)

    def _forget(self, rows: Iterable[int]) -> None:
        for row in rows:
            key = self.rows.pop(row, None) or self.lost.pop(row, None)
            if key is not None:
                self.groups[key[:2]] -= 1
                if not self.groups[key[:2]]:
                    del self.groups[key[:2]]
            for held in self.held.values():
                held.pop(row, None)
            for done in self.done.values():
                done.discard(row)


def rows_of(event: ev.SnapshotRows) -> Iterator[tuple[int, int, int, ev.RowRun]]:
    """Return the serial, sample and id of each row of unfinished groups, and the run that describes it."""
    for groups in event.groups:
        serials = range(groups.serial, groups.serial + groups.count)
        keys = [(serial, sample) for serial in serials for sample in range(groups.size)]
        rows = [(number, run) for run in groups.rows for number in range(run.row, run.row + run.count)]
        yield from ((*key, *row) for key, row in zip(keys, rows, strict=True))
