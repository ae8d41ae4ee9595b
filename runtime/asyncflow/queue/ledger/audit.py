"""The ledger read by somebody who does not trust the table.

The auditor shares only the record classes with the queue. It follows each training sample through the history that
survives and then asks: does every serial exist, with all its samples? Is each in one final state, or unfinished where
it may be? Was any created or trained twice?

Invariant: reading changes nothing; partitions that are not for training are passed over.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from asyncflow.identity import SampleKey
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.ledger.audit_open import OpenAudit, rows_of
from asyncflow.queue.ledger.homes import Homes
from asyncflow.queue.ledger.records import read_ledger
from asyncflow.queue.protocol.messages import FILTERED, AuditReport

Key: TypeAlias = tuple[int, int]
_WORDS = 20
_WANTED = 2
_FINAL = {3: "trained", 4: "filtered", 5: "dropped"}


def audit_ledger(directory: Path) -> AuditReport:
    """Audit the ledger in ``directory``. Raises LedgerCorrupt, and FileNotFoundError where there is none."""
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is no ledger")
    return _read(directory).report()


def trained_samples(directory: Path, partition: str) -> Counter[SampleKey]:
    """Return how often each sample counts in the weights that survive, as the ledger in ``directory`` has it."""
    trained = _read(directory).trained(partition)
    return Counter({SampleKey(*key): times for key, times in trained.items() if times})


def _read(directory: Path) -> Auditor:
    auditor = Auditor()
    for event in read_ledger(directory):
        auditor.see(event)
    return auditor


@dataclass
class _History:
    """What is known of one training partition, by sample and serial.

    place: row id of each sample that was created; ended: "filtered" or "dropped"; trained: how often a sample counts in
    the weights that survive; slots: samples given to each step since its last beginning; opened: (groups, size).
    """

    place: dict[Key, int] = field(default_factory=dict)
    keys: dict[int, Key] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    ended: dict[Key, str] = field(default_factory=dict)
    trained: Counter[Key] = field(default_factory=Counter)
    repeated: set[Key] = field(default_factory=set)
    slots: defaultdict[int, list[Key]] = field(default_factory=lambda: defaultdict(list))
    opened: dict[int, tuple[int, int]] = field(default_factory=dict)
    committed: int = 0
    closed: int | None = None

    def commit(self, upto: int) -> None:
        """Count what the steps up to ``upto`` were given."""
        for step in [step for step in self.slots if step <= upto]:
            self.trained.update(self.slots.pop(step))

    def uncommit(self, theta: int) -> None:
        """Forget what was trained after θ_theta: those weights are gone."""
        self.slots.clear()
        for key in [key for key in self.trained if self.steps[key[0]] > theta]:
            del self.trained[key]
            self.place[key] = 0


class Auditor:
    """Sees all events of a ledger in order, then reports."""

    def __init__(self) -> None:
        self._histories: defaultdict[str, _History] = defaultdict(_History)
        self._others: set[str] = set()
        self._homes = Homes()
        self._open = OpenAudit(self._homes)
        self._gone_rows: set[int] = {0}
        self._attempts: set[int] = set()
        self._counts = Counter(redeliveries=0, resets=0, peeked=0)
        self._seen: dict[type, Callable[[Any], None]] = {
            ev.Created: self._created,
            ev.SnapshotPartition: self._snapshot_partition,
            ev.SnapshotRows: self._snapshot_rows,
            ev.Returned: self._returned,
            ev.Dropped: self._dropped,
            ev.Opened: self._opened,
            ev.Began: self._began,
            ev.Slotted: self._slotted,
            ev.Committed: self._committed,
            ev.RowsLost: self._rows_lost,
            ev.Cleared: self._cleared,
            ev.Closed: self._closed,
            ev.Reset: self._reset,
            ev.Peeked: self._looked_at,
        }

    def see(self, event: ev.Event) -> None:
        """Take note of what happened next."""
        self._homes.see(event)
        self._open.see(event)
        if (see := self._seen.get(type(event))) is not None:
            see(event)

    def trained(self, partition: str) -> Counter[Key]:
        """Return how often each sample of ``partition`` counts in the weights that survive."""
        return self._histories[partition].trained

    def report(self) -> AuditReport:
        """Say what became of every training sample."""
        histories = [history for name, history in self._histories.items() if name not in self._others]
        findings = [_judge(history) for history in histories]
        created = [(history, key) for history in histories for key in history.place]
        problems = [*(words for finding in findings for words in finding.problems), *self._open.problems]
        trained = sum(history.trained[key] > 0 for history, key in created)
        ended = Counter(history.ended.get(key) for history, key in created)
        overdue = sum(len(finding.overdue) for finding in findings)
        return AuditReport(
            dispatched=len(created),
            trained=trained,
            filtered=ended["filtered"],
            dropped=ended["dropped"],
            unfinished=len(created) - trained - ended["filtered"] - ended["dropped"] - overdue,
            lost=overdue + sum(finding.absent for finding in findings),
            duplicated=sum(len(finding.twice) for finding in findings),
            last_committed_step=max((history.committed for history in histories), default=0),
            attempts=len(self._attempts),
            closed=bool(histories) and all(history.closed is not None for history in histories),
            problems=problems[:_WORDS],
            put=self._open.put,
            cleared=self._open.cleared + self._open.dropped,
            remaining=self._open.remaining,
            without_bytes=len(self._open.lost),
            **self._counts,
        )

    def _created(self, event: ev.Created) -> None:
        if event.purpose != "train":
            self._others.add(event.partition)
        history = self._histories[event.partition]
        history.sizes[event.serial], history.steps[event.serial] = event.size, event.step
        for sample, row in event.rows:
            key = (event.serial, sample)
            before = history.place.get(key)
            if before is not None and not (
                self._gone(before) and key not in history.ended and not history.trained[key]
            ):
                history.repeated.add(key)
            history.place[key] = row
            history.keys[row] = key

    def _snapshot_partition(self, event: ev.SnapshotPartition) -> None:
        self._counts.update(resets=event.resets, peeked=event.peeked, redeliveries=event.returned)
        self._attempts.update(event.attempts)
        if event.purpose == "eval":
            self._others.add(event.name)
        if event.attempt >= 0 or event.closed is not None:
            history = self._histories[event.name]
            history.committed, history.closed = event.committed, event.closed

    def _snapshot_rows(self, event: ev.SnapshotRows) -> None:
        if event.partition in self._open.names:
            return
        history = self._histories[event.partition]
        for groups in event.groups:
            for serial in range(groups.serial, groups.serial + groups.count):
                history.sizes[serial], history.steps[serial] = groups.size, groups.step
        for serial, sample, row, run in rows_of(event):
            history.place[serial, sample] = 0 if run.lost or run.state == _WANTED else row
            history.keys[row] = (serial, sample)
            self._final(history, (serial, sample), _FINAL.get(run.state, ""))
        for first, count, step, _, _, outcome in event.finished:
            for serial in range(first, first + count):
                history.sizes[serial], history.steps[serial] = len(outcome), step
                for sample, letter in enumerate(outcome):
                    history.place[serial, sample] = 0
                    self._final(history, (serial, sample), ev.OUTCOMES[letter])

    def _final(self, history: _History, key: Key, outcome: str) -> None:
        if outcome == "trained":
            history.trained[key] += 1
        elif outcome:
            history.ended[key] = outcome

    def _reset(self, event: ev.Reset) -> None:
        self._counts["resets"] += event.rows

    def _looked_at(self, event: ev.Peeked) -> None:
        self._counts["peeked"] += event.rows

    def _returned(self, event: ev.Returned) -> None:
        self._counts["redeliveries"] += len(event.rows)

    def _dropped(self, event: ev.Dropped) -> None:
        if event.partition in self._open.names:
            return
        history = self._histories[event.partition]
        outcome = "filtered" if event.reason.startswith(FILTERED) else "dropped"
        for row in event.rows:
            key = history.keys[row]
            if key in history.ended or history.trained[key]:
                history.repeated.add(key)
            history.ended[key] = outcome

    def _opened(self, event: ev.Opened) -> None:
        self._histories[event.partition].opened[event.step] = (event.groups, event.size)

    def _began(self, event: ev.Began) -> None:
        history = self._histories[event.partition]
        self._attempts.add(event.attempt)
        history.commit(event.step)
        history.uncommit(event.step)
        history.committed = event.step

    def _slotted(self, event: ev.Slotted) -> None:
        history = self._histories[event.partition]
        history.slots[event.step] += [history.keys[row] for rank in event.ranks for row in rank]

    def _committed(self, event: ev.Committed) -> None:
        history = self._histories[event.partition]
        history.commit(event.step)
        history.committed = max(history.committed, event.step)

    def _rows_lost(self, event: ev.RowsLost) -> None:
        self._gone_rows.update(event.rows)

    def _cleared(self, event: ev.Cleared) -> None:
        self._histories.pop(event.partition, None)

    def _closed(self, event: ev.Closed) -> None:
        self._histories[event.partition].closed = event.step

    def _gone(self, row: int) -> bool:
        return row in self._gone_rows or self._homes.lost(row)


@dataclass
class _Finding:
    """overdue: created and not finished although their step is over; absent: number of samples that never existed."""

    overdue: set[Key]
    absent: int
    twice: set[Key]
    problems: list[str]


def _judge(history: _History) -> _Finding:
    """Compare what there is with what there should be."""
    over = max(history.committed, history.closed or 0)
    ended = {key for key in history.place if key in history.ended or history.trained[key]}
    overdue = {key for key in history.place if history.steps[key[0]] <= over and key not in ended}
    twice = {key for key, times in history.trained.items() if times > 1} | history.repeated
    twice |= {key for key in history.ended if history.trained[key]}
    problems = [f"sample {key} of step {history.steps[key[0]]} was never finished" for key in sorted(overdue)]
    problems += [f"sample {key} was created or counted more than once" for key in sorted(twice)]
    absent = 0
    usual = max(history.sizes.values(), default=1)
    for serial in range(max(history.sizes, default=-1) + 1):
        size = history.sizes.get(serial, usual)
        if gap := sum((serial, sample) not in history.place for sample in range(size)):
            absent += gap
            problems.append(f"prompt {serial} lacks {gap} of {size} samples")
    reached, waited = (
        Counter(history.steps[serial] for serial in {serial for serial, _ in keys})
        for keys in (+history.trained, overdue)
    )
    for step, (groups, size) in sorted(history.opened.items()):
        missing = groups - reached[step] - waited[step]
        if step <= over and missing > 0:
            absent += missing * size
            problems.append(f"step {step} was opened with {groups} groups, but {reached[step]} were trained")
    return _Finding(overdue, absent, twice, problems)
