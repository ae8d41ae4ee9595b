"""An independent check of the ledger, which does not trust the table.

The auditor shares only the record classes with the queue. It follows each row through the surviving history and then
checks: was any row put, leased, completed or trained twice? Does every serial of a training partition exist with all of
its samples, and is each sample in one final state, or unfinished in a step that may be unfinished? Is every open row
cleared, dropped or present?

If a queue has several controllers, the ledger of the first records what became of rows. Each other ledger records the
work of its controller's tasks, and copies the rest.

Invariants: reading changes nothing. Evaluations are not counted. A finding of several ledgers is reported once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from msgspec.structs import replace

from asyncflow.identity import location_at, location_of
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.ledger.log import newest, read_ledger
from asyncflow.queue.protocol.messages import FILTERED, AuditReport, Purpose

Key: TypeAlias = tuple[int, int]
"""Serial and sample."""

_WORDS = 20
_LIVE, _WANTED = 0, 2
_FINAL = {3: "trained", 4: "filtered", 5: "dropped"}


def audit_ledger(directory: Path) -> AuditReport:
    """Audit the ledger in ``directory``. Raises LedgerCorrupt, and FileNotFoundError if there is none."""
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is not a ledger")
    auditor = Auditor()
    for event in read_ledger(directory):
        auditor.see(event)
    return auditor.report()


def replica_ledger(primary: Path, index: int) -> Path:
    """Return the folder of a controller's ledger. primary: the folder of the first controller's ledger."""
    return primary / str(index) if index else primary


def ledgers_of(primary: Path) -> dict[int, Path]:
    """Return the folders of all controllers' ledgers by index; the first one contains the others."""
    found = (int(path.name) for path in primary.glob("[0-9]*") if path.is_dir() and newest(path) is not None)
    return {index: replica_ledger(primary, index) for index in (0, *sorted(found))}


def audit_ledgers(primary: Path) -> AuditReport:
    """Audit the ledgers of all controllers. Raises the errors of ``audit_ledger``."""
    reports = {index: audit_ledger(path) for index, path in ledgers_of(primary).items()}
    return merge_audits(reports.pop(0), reports)


def merge_audits(primary: AuditReport, replicas: dict[int, AuditReport]) -> AuditReport:
    """Return one report, with the rows of the first controller and the problems of all controllers."""
    all_of = (primary, *replicas.values())
    found = [
        f"controller {index}: {problem}"
        for index, report in replicas.items()
        for problem in report.problems
        if problem not in primary.problems
    ]
    return replace(
        primary,
        redeliveries=sum(report.redeliveries for report in all_of),
        reasons=dict(sum((Counter(report.reasons) for report in all_of), Counter[str]()).most_common(_WORDS)),
        resets=sum(report.resets for report in all_of),
        peeked=sum(report.peeked for report in all_of),
        problems=(primary.problems + found)[:_WORDS],
    )


class _Group(NamedTuple):
    """A group. window: oldest and newest version of its samples; outcome: letters, if it ended before a compaction."""

    size: int
    step: int
    window: tuple[int, int]
    outcome: str = ""


_group = lru_cache(maxsize=1024)(_Group)


@dataclass
class _History:
    """The rows of one partition.

    place: last id of each row by serial and sample, 0 if it is to be put again, without cleared or dropped open rows;
    keys: rows by all of their ids; groups: by serial; left: number of remaining rows by serial; held: leases of row
    ids, by task; done: completed row ids, by task.

    In a partition that is not open: ended: "filtered" or "dropped"; trained: how often a sample counts in the surviving
    weights; repeated: samples that were put or ended twice; slots: samples of each step since the trainer started last;
    opened: number and size of groups by step; skipped: skipped serials. Samples of groups with an ``outcome``, of which
    a long run has millions, are in none of these fields.
    """

    purpose: Purpose = "train"
    place: dict[Key, int] = field(default_factory=dict)
    keys: dict[int, Key] = field(default_factory=dict)
    groups: dict[int, _Group] = field(default_factory=dict)
    left: Counter[int] = field(default_factory=Counter)
    held: defaultdict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    done: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    ended: dict[Key, str] = field(default_factory=dict)
    trained: Counter[Key] = field(default_factory=Counter)
    repeated: set[Key] = field(default_factory=set)
    slots: defaultdict[int, list[Key]] = field(default_factory=lambda: defaultdict(list))
    opened: dict[int, tuple[int, int]] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    committed: int = 0
    closed: int | None = None

    def final(self, key: Key) -> bool:
        """Return whether a row of a partition that is not open is final."""
        return key in self.ended or self.trained[key] > 0

    def end(self, key: Key, outcome: str) -> None:
        """Note the outcome of a row, unless ``outcome`` is empty."""
        if outcome == "trained":
            self.trained[key] += 1
        elif outcome:
            self.ended[key] = outcome

    def unfold(self, serial: int) -> None:
        """Enter the samples of a group with an ``outcome`` one by one, since they may be put again."""
        group = self.groups[serial]
        self.groups[serial] = group._replace(outcome="")
        for sample, letter in enumerate(group.outcome):
            self.place[serial, sample] = 0
            self.end((serial, sample), ev.OUTCOMES[letter])

    def forget(self, rows: Iterable[int]) -> None:
        """Forget open rows, and each group with its last row, since its serial may be used again."""
        for row in rows:
            key = self.keys.pop(row, None)
            if key is not None and self.place.get(key) == row:
                del self.place[key]
                self.left[key[0]] -= 1
                if not self.left[key[0]]:
                    del self.left[key[0]], self.groups[key[0]]
            for held in self.held.values():
                held.pop(row, None)
            for done in self.done.values():
                done.discard(row)

    def commit(self, upto: int) -> None:
        """Count the samples of steps up to ``upto`` as trained."""
        for step in [step for step in self.slots if step <= upto]:
            self.trained.update(self.slots.pop(step))

    def uncommit(self, theta: int) -> None:
        """Forget samples that were trained after θ_theta, because those weights are lost."""
        self.slots.clear()
        for serial in [serial for serial, group in self.groups.items() if group.step > theta]:
            self.unfold(serial)
        for key in [key for key in self.trained if self.groups[key[0]].step > theta]:
            del self.trained[key]
            self.place[key] = 0


class Auditor:
    """Reads all events of a ledger in order, then reports."""

    def __init__(self) -> None:
        self._histories: defaultdict[str, _History] = defaultdict(_History)
        self._attempts: set[int] = set()
        self._counts = Counter(resets=0, peeked=0, put=0, cleared=0)
        self._returns: Counter[str] = Counter()
        self._problems: list[str] = []
        self._leases: dict[int, tuple[str, str]] = {}
        self._clearing: set[tuple[str, str]] = set()
        self._moved: dict[int, int] = {}
        self._lost_rows: set[int] = {0}
        self._lost_places: set[int] = set()
        self._seen: dict[type, Callable[[Any], None]] = {
            ev.RowsPut: self._put,
            ev.Numbered: lambda event: setattr(self._histories[event.partition], "purpose", "open"),
            ev.Skipped: lambda event: self._histories[event.partition].skipped.update(event.serials),
            ev.Declared: self._declared,
            ev.SnapshotPartition: self._snapshot_partition,
            ev.SnapshotGroups: self._snapshot_groups,
            ev.Leased: self._leased,
            ev.Completed: self._completed,
            ev.Returned: self._returned,
            ev.RowsDropped: self._dropped,
            ev.RowsCleared: lambda event: self._clear(self._histories[event.partition], event.rows),
            ev.RowsGone: lambda event: self._lost_rows.update(event.rows),
            ev.UnitLost: lambda event: self._lost_places.add(location_at(event.epoch, event.unit)),
            ev.Moved: lambda event: self._moved.update(dict.fromkeys(event.rows, event.location)),
            ev.Opened: lambda event: self._histories[event.partition].opened.update(
                {event.step: (event.groups, event.size)}
            ),
            ev.Began: self._began,
            ev.SlotDecided: self._slotted,
            ev.Exchanged: self._exchanged,
            ev.Committed: self._committed,
            ev.Cleared: self._cleared,
            ev.PartitionSet: self._partition_set,
            ev.TaskReset: self._reset,
            ev.Peeked: lambda event: self._counts.update(peeked=event.rows),
        }

    def see(self, event: ev.Event) -> None:
        """Process the next event."""
        if (see := self._seen.get(type(event))) is not None:
            see(event)

    def trained(self, partition: str) -> Counter[Key]:
        """Return how often each sample of ``partition`` counts in the surviving weights."""
        history = self._histories[partition]
        for serial in history.groups:
            history.unfold(serial)
        return history.trained

    def report(self) -> AuditReport:
        """Return the account of all rows."""
        histories = [history for history in self._histories.values() if history.purpose == "train"]
        findings = [_check(history) for history in histories]
        created = [(history, key) for history in histories for key in history.place]
        problems = [*(words for finding in findings for words in finding.problems), *self._problems]
        past = Counter("".join(group.outcome for history in histories for group in history.groups.values()))
        trained = past["t"] + sum(history.trained[key] > 0 for history, key in created)
        ended = Counter(history.ended.get(key) for history, key in created)
        ended.update(filtered=past["f"], dropped=past["d"])
        dispatched = len(created) + past.total()
        overdue = sum(len(finding.overdue) for finding in findings)
        remaining = [
            row for history in self._histories.values() if history.purpose == "open" for row in history.place.values()
        ]
        return AuditReport(
            dispatched=dispatched,
            trained=trained,
            filtered=ended["filtered"],
            dropped=ended["dropped"],
            unfinished=dispatched - trained - ended["filtered"] - ended["dropped"] - overdue,
            lost=overdue + sum(finding.absent for finding in findings),
            duplicated=sum(len(finding.twice) for finding in findings),
            last_committed_step=max((history.committed for history in histories), default=0),
            attempts=len(self._attempts),
            closed=bool(histories) and all(history.closed is not None for history in histories),
            problems=problems[:_WORDS],
            remaining=len(remaining),
            without_bytes=sum(map(self._is_lost, remaining)),
            skipped=sum(len(history.skipped) for history in histories),
            redeliveries=self._returns.total(),
            reasons=dict(self._returns.most_common(_WORDS)),
            **self._counts,
        )

    def _put(self, event: ev.RowsPut) -> None:
        history = self._histories[event.partition]
        history.purpose = event.purpose
        for serial, first in zip(event.serials, range(0, len(event.rows), event.size), strict=True):
            keys = [(serial, sample) for sample in range(event.size)]
            if serial in history.groups:
                history.unfold(serial)
                made = [key for key in keys if key in history.place and self._is_wanted(history, key)]
            else:
                made = keys
            if not made:
                history.repeated.update(keys)
                if event.purpose == "open":
                    self._problems.append(f"the group {serial} of {event.partition} was put twice")
            history.groups[serial] = _Group(event.size, event.step, (event.oldest, event.newest))
            for key in made:
                self._enter(event.partition, history, key, event.rows[first + key[1]])

    def _is_wanted(self, history: _History, key: Key) -> bool:
        """Return whether a row is to be put again: its bytes are lost, and it is not final."""
        return self._is_lost(history.place[key]) and not history.final(key)

    def _enter(self, partition: str, history: _History, key: Key, row: int) -> None:
        if row in history.keys:
            self._problems.append(f"row {row} of {partition} was put twice")
        if key not in history.place:
            history.left[key[0]] += 1
            self._counts["put"] += history.purpose == "open"
        history.place[key] = row
        history.keys[row] = key

    def _is_lost(self, row: int) -> bool:
        return row in self._lost_rows or self._moved.get(row, location_of(row)) in self._lost_places

    def _declared(self, event: ev.Declared) -> None:
        task = (event.spec.partition, event.spec.name)
        (self._clearing.add if event.spec.clears else self._clearing.discard)(task)

    def _snapshot_partition(self, event: ev.SnapshotPartition) -> None:
        self._counts.update(resets=event.resets, peeked=event.peeked)
        self._returns.update(event.reasons)
        if unnamed := event.returned - sum(event.reasons.values()):
            self._returns[ev.NO_REASON] += unnamed
        self._attempts.update(event.attempts)
        if event.purpose is None and event.closed is None:
            return
        history = self._histories[event.name]
        history.purpose, history.closed = event.purpose or "train", event.closed
        history.skipped.update(serial for first, end in event.skipped for serial in range(first, end))
        if event.purpose == "open":
            ended = event.cleared + sum(event.ended)
            self._counts.update(put=ended, cleared=ended)

    def _snapshot_groups(self, event: ev.SnapshotGroups) -> None:
        history = self._histories[event.partition]
        for group in event.groups:
            size, window = len(group.rows or group.outcome), (group.oldest, group.newest)
            history.groups[group.serial] = _group(size, group.step, window, group.outcome)
            for sample, row in enumerate(group.rows):
                self._snapshot_row(event.partition, history, (group.serial, sample), row)

    def _snapshot_row(self, partition: str, history: _History, key: Key, record: ev.RowRecord) -> None:
        row = record.row
        if record.moved:
            self._moved[row] = record.moved
        if record.lost or record.state == _WANTED:
            self._lost_rows.add(row)
        if history.purpose != "open" or record.state in (_LIVE, _WANTED):
            self._enter(partition, history, key, row) if row else history.place.setdefault(key, 0)
            for task in [task for task, _, done, _ in record.works if done]:
                history.done[task].add(row)
            history.end(key, _FINAL.get(record.state, ""))

    def _leased(self, event: ev.Leased) -> None:
        history = self._histories[event.partition]
        held, done = history.held[event.task], history.done[event.task]
        self._leases[event.lease] = (event.partition, event.task)
        for row in event.rows:
            key = history.keys.get(row)
            if key is None or history.final(key) or self._is_lost(row) or row in done or row in held:
                self._problems.append(f"row {row} of {event.partition} was leased to {event.task} twice, or was lost")
            held[row] = event.lease

    def _completed(self, event: ev.Completed) -> None:
        task = self._leases.get(event.lease)
        if task is None:
            return
        history = self._histories[task[0]]
        for row in event.rows:
            if history.held[task[1]].pop(row, 0) != event.lease:
                self._problems.append(f"row {row} of {task[0]} was completed by {task[1]} without its lease")
        history.done[task[1]].update(event.rows)
        if task in self._clearing and history.purpose == "open":
            self._clear(history, event.rows)

    def _returned(self, event: ev.Returned) -> None:
        known = event.reason in self._returns or len(self._returns) < ev.MOST_REASONS
        self._returns[event.reason if known else ev.OTHER_REASON] += len(event.rows)
        if (task := self._leases.get(event.lease)) is not None:
            for row in event.rows:
                self._histories[task[0]].held[task[1]].pop(row, None)

    def _clear(self, history: _History, rows: list[int]) -> None:
        history.forget(rows)
        self._counts["cleared"] += len(rows)

    def _dropped(self, event: ev.RowsDropped) -> None:
        history = self._histories[event.partition]
        if history.purpose == "open":
            self._clear(history, event.rows)
            return
        outcome = "filtered" if event.reason.startswith(FILTERED) else "dropped"
        for row in event.rows:
            key = history.keys[row]
            if history.final(key):
                history.repeated.add(key)
            history.ended[key] = outcome

    def _began(self, event: ev.Began) -> None:
        history = self._histories[event.partition]
        self._attempts.add(event.attempt)
        history.commit(event.step)
        history.uncommit(event.step)
        history.committed = event.step

    def _slotted(self, event: ev.SlotDecided) -> None:
        history = self._histories[event.partition]
        history.slots[event.step] += [history.keys[row] for rank in event.ranks for row in rank]

    def _exchanged(self, event: ev.Exchanged) -> None:
        history = self._histories[event.partition]
        pair = {serial: history.groups[serial] for serial in event.serials if serial in history.groups}
        steps, windows = {group.step for group in pair.values()}, {group.window for group in pair.values()}
        in_slots = {serial for keys in history.slots.values() for serial, _ in keys}
        final = [s for s, of in pair.items() if of.outcome or all(history.final((s, n)) for n in range(of.size))]
        if len(steps) < 2 or len(windows) > 1 or final or in_slots & pair.keys():
            why = "although they have the same step or different versions, are in a slot, final or unknown"
            self._problems.append(f"groups {event.serials} of {event.partition} exchanged their steps, {why}")
        for one, group in pair.items():
            history.groups[one] = group._replace(step=max(steps - {group.step}, default=group.step))

    def _committed(self, event: ev.Committed) -> None:
        history = self._histories[event.partition]
        history.commit(event.step)
        history.committed = max(history.committed, event.step)

    def _cleared(self, event: ev.Cleared) -> None:
        history = self._histories.pop(event.partition, None)
        if history is not None and history.purpose == "open":
            self._histories[event.partition].purpose = "open"
            self._counts["cleared"] += len(history.place)

    def _partition_set(self, event: ev.PartitionSet) -> None:
        if event.field == "closed":
            self._histories[event.partition].closed = event.value

    def _reset(self, event: ev.TaskReset) -> None:
        self._counts["resets"] += event.rows
        history = self._histories[event.partition]
        history.held.pop(event.task, None)
        history.done.pop(event.task, None)


@dataclass
class _Finding:
    """The findings. overdue: unfinished samples of past steps; absent: number of samples that never existed."""

    overdue: set[Key]
    absent: int
    twice: set[Key]
    problems: list[str]


def _check(history: _History) -> _Finding:
    """Compare the rows of a training partition with the rows that it should have."""
    over = max(history.committed, history.closed or 0)
    steps = {serial: group.step for serial, group in history.groups.items()}
    overdue = {key for key in history.place if steps[key[0]] <= over and not history.final(key)}
    twice = {key for key, times in history.trained.items() if times > 1} | history.repeated
    twice |= {key for key in history.ended if history.trained[key]}
    problems = [f"sample {key} of step {steps[key[0]]} was never finished" for key in sorted(overdue)]
    problems += [f"sample {key} was created or counted more than once" for key in sorted(twice)]
    problems += [f"prompt {serial} was skipped, and has samples" for serial in sorted(history.skipped & steps.keys())]
    absent = 0
    usual = max((group.size for group in history.groups.values()), default=1)
    for serial in range(max(history.groups, default=-1) + 1):
        size, step, _, ended = history.groups.get(serial, _Group(usual, 0, (0, 0)))
        size = max(size, history.opened.get(step, (0, 0))[1])
        if serial in history.skipped:
            continue
        if gap := sum((serial, sample) not in history.place for sample in range(len(ended), size)):
            absent += gap
            problems.append(f"prompt {serial} lacks {gap} of {size} samples")
    reached, waiting = (
        Counter(steps[serial] for serial in {serial for serial, _ in keys}) for keys in (+history.trained, overdue)
    )
    reached.update(group.step for group in history.groups.values() if "t" in group.outcome)
    for step, (groups, size) in sorted(history.opened.items()):
        missing = groups - reached[step] - waiting[step]
        if step <= over and missing > 0:
            absent += missing * size
            problems.append(f"step {step} was opened with {groups} groups, but {reached[step]} were trained")
    return _Finding(overdue, absent, twice, problems)
