"""The life of one sample, as the ledger tells it: put, leased, made, decided about, trained, committed.

Invariants: nothing here reads a file; what one ledger does not say (a compaction leaves the outcome of what is over,
and no more) is not guessed. A lease and its end are one entry of the life, told where the lease began.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from asyncflow.identity import NEWEST, SampleKey, location_at, location_of
from asyncflow.queue.ledger import events as ev


@dataclass
class HistoryEntry:
    """Something that happened. at: unix seconds, None where the ledger does not say; task, until: of a lease.

    open: whether the lease has not ended.
    """

    at: float | None
    what: str
    task: str = ""
    until: float | None = None
    open: bool = False


@dataclass
class SampleHistory:
    """Events of sample ``key`` of ``partition``. step: to which it belongs; outcome: "" while it has none."""

    partition: str
    key: SampleKey
    entries: list[HistoryEntry] = field(default_factory=list)
    step: int | None = None
    outcome: str = ""
    _now: float | None = None
    _rows: set[int] = field(default_factory=set)
    _place: int = 0
    _leases: dict[int, HistoryEntry] = field(default_factory=dict)
    _times: Counter[str] = field(default_factory=Counter)
    _staged: int | None = None

    def see(self, event: ev.Event) -> None:
        """Take in what happened next."""
        if getattr(event, "partition", self.partition) != self.partition:
            return
        match event:
            case ev.Dated():
                self._now = event.at
            case ev.RowsPut():
                self._put(event)
            case ev.SnapshotGroups():
                self._restored(event)
            case ev.Leased():
                self._leased(event)
            case ev.Completed():
                self._ended(event, ", done")
            case ev.Returned():
                self._ended(event, f", given back: {event.reason}")
            case ev.SlotDecided():
                self._slotted(event)
            case ev.Began():
                self._began(event)
            case ev.Committed():
                self._committed(event)
            case _:
                self._changed(event)

    def _changed(self, event: ev.Event) -> None:
        """Take in what happens to few samples."""
        match event:
            case ev.RowsDropped():
                self._dropped(event)
            case ev.Exchanged():
                self._exchanged(event)
            case ev.UnitLost():
                self._lost(event)
            case ev.RowsGone():
                self._gone(event)
            case ev.Moved():
                self._moved(event)

    def _tell(self, what: str, *, task: str = "") -> HistoryEntry:
        self.entries.append(entry := HistoryEntry(self._now, what, task))
        return entry

    def _put(self, event: ev.RowsPut) -> None:
        if self.key.serial not in event.serials or self.key.sample >= event.size:
            return
        row = event.rows[event.serials.index(self.key.serial) * event.size + self.key.sample]
        again = " again, because its bytes were lost," if self._rows else ""
        self._rows.add(row)
        self._place, self.step = location_of(row), event.step
        self._tell(f"put{again} for step {event.step}, to be made by {_window(event.oldest, event.newest)}")

    def _restored(self, event: ev.SnapshotGroups) -> None:
        for group in event.groups:
            if group.serial != self.key.serial:
                continue
            self.step = group.step
            if group.outcome:
                self.outcome = ev.OUTCOMES[group.outcome[self.key.sample]]
                self._tell(f"{self.outcome}; how that came about was left out when the ledger was compacted")
            elif self.key.sample < len(group.rows):
                row = group.rows[self.key.sample]
                self._rows.add(row.row)
                done = ", ".join(f"{task} by {worker}" for task, _, lease, worker in row.works if lease)
                self._tell(f"there for step {group.step} when the ledger was compacted; done: {done or 'nothing'}")

    def _leased(self, event: ev.Leased) -> None:
        if self._rows.isdisjoint(event.rows):
            return
        self._times[event.task] += 1
        time = f" for the {_ordinal(self._times[event.task])} time" if self._times[event.task] > 1 else ""
        entry = self._tell(f"task {event.task}: leased{time} by {event.worker}", task=event.task)
        entry.open, self._leases[event.lease] = True, entry

    def _ended(self, event: ev.Completed | ev.Returned, how: str) -> None:
        lease = self._leases.get(event.lease)
        if lease is not None and not self._rows.isdisjoint(event.rows):
            lease.what += how
            lease.until, lease.open = self._now, False

    def _dropped(self, event: ev.RowsDropped) -> None:
        if not self._rows.isdisjoint(event.rows):
            self.outcome = "filtered" if event.reason.startswith("filtered:") else "dropped"
            self._tell(f"{self.outcome}: {event.reason.removeprefix('filtered:').strip()}")

    def _exchanged(self, event: ev.Exchanged) -> None:
        if self.key.serial in event.serials:
            other = next(serial for serial in event.serials if serial != self.key.serial)
            place = "took the place of" if event.serials[0] == self.key.serial else "was late, and gave its place to"
            self._tell(f"{place} prompt {other} in another step")

    def _slotted(self, event: ev.SlotDecided) -> None:
        for rank, rows in enumerate(event.ranks):
            if not self._rows.isdisjoint(rows):
                self._staged = self.step = event.step
                self._tell(f"taken into slot {event.slot} of step {event.step}, by rank {rank}")

    def _began(self, event: ev.Began) -> None:
        if self._staged is not None and self._staged > event.step and self.outcome != "dropped":
            self._tell(
                f"step {self._staged} is undone: attempt {event.attempt} of the trainer began with θ{event.step}"
            )
            self._staged, self.outcome = None, ""
        elif self._staged is not None and not self.outcome:
            self._commit(event.step)

    def _committed(self, event: ev.Committed) -> None:
        if self._staged is not None and self._staged <= event.step and not self.outcome:
            self._commit(event.step)

    def _commit(self, step: int) -> None:
        self.outcome = "trained"
        self._tell(f"trained for ever: the checkpoint of step {step} holds step {self._staged}")

    def _lost(self, event: ev.UnitLost) -> None:
        if self._rows and not self.outcome and self._place == location_at(event.epoch, event.unit):
            self._tell(f"storage unit {event.unit} was lost, and its bytes with it")

    def _gone(self, event: ev.RowsGone) -> None:
        if not self._rows.isdisjoint(event.rows):
            self._tell("its storage unit does not have its bytes any more")

    def _moved(self, event: ev.Moved) -> None:
        if not self._rows.isdisjoint(event.rows):
            self._place = event.location
            self._tell("moved to another storage unit, because its own left")


def life_of(ledgers: Iterable[Iterable[ev.Event]], key: SampleKey, *, partition: str) -> SampleHistory:
    """Return the life of a sample, out of all events of each controller's ledger, that of the primary first.

    Of the others only what their own tasks did is taken.
    """
    lives = [_told(events, SampleHistory(partition, key)) for events in ledgers]
    for other in lives[1:]:
        lives[0].entries += [entry for entry in other.entries if entry.task]
    if len(lives) > 1:
        lives[0].entries.sort(key=lambda entry: entry.at or 0.0)
    return lives[0]


def _told(events: Iterable[ev.Event], life: SampleHistory) -> SampleHistory:
    for event in events:
        life.see(event)
    return life


def _window(oldest: int, newest: int) -> str:
    if oldest == newest:
        return f"θ{oldest}"
    return f"θ{oldest} or newer" if newest == NEWEST else f"θ{oldest} to θ{newest}"


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
