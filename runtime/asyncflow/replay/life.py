"""The life of one sample, as the ledger tells it: put, leased, made, decided about, trained, committed.

Invariants: nothing here reads a file; what one ledger does not say (a compaction leaves the outcome of what is over,
and no more) is not guessed. A lease and its end are one moment of the life, told where the lease began.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from asyncflow.identity import NEWEST, SampleKey, location_at, location_of
from asyncflow.queue.ledger import events as ev


@dataclass
class Moment:
    """Something that happened. at: unix seconds, None where the ledger does not say; of a lease also task, and until."""

    at: float | None
    what: str
    task: str = ""
    until: float | None = None


@dataclass
class Life:
    """What is told of sample ``key`` of ``partition``. step: to which it belongs; outcome: "" while it has none."""

    partition: str
    key: SampleKey
    moments: list[Moment] = field(default_factory=list)
    step: int | None = None
    outcome: str = ""
    _now: float | None = None
    _rows: set[int] = field(default_factory=set)
    _place: int = 0
    _leases: dict[int, Moment] = field(default_factory=dict)
    _times: Counter[str] = field(default_factory=Counter)
    _staged: int | None = None

    def see(self, event: ev.Event) -> None:
        """Take in what happened next."""
        if isinstance(event, ev.Dated):
            self._now = event.at
        elif getattr(event, "partition", self.partition) == self.partition and (see := _SEEN.get(type(event))):
            see(self, event)

    def _tell(self, what: str, *, task: str = "") -> Moment:
        self.moments.append(moment := Moment(self._now, what, task))
        return moment

    def _put(self, event: ev.RowsPut) -> None:
        if self.key.serial not in event.serials or self.key.sample >= event.size:
            return
        row = event.rows[event.serials.index(self.key.serial) * event.size + self.key.sample]
        again = " again, because its bytes were lost," if self._rows else ""
        self._rows.add(row)
        self._place, self.step = location_of(row), event.step
        oldest, newest = event.oldest, event.newest
        who = f"θ{oldest}" if oldest == newest else f"θ{oldest} or newer" if newest == NEWEST else f"θ{oldest} to θ{newest}"
        self._tell(f"put{again} for step {event.step}, to be made by {who}")

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
        self._leases[event.lease] = self._tell(f"task {event.task}: leased{time} by {event.worker}", task=event.task)

    def _ended(self, event: ev.Completed | ev.Returned, how: str) -> None:
        lease = self._leases.get(event.lease)
        if lease is not None and not self._rows.isdisjoint(event.rows):
            lease.what += how
            lease.until = self._now

    def _dropped(self, event: ev.RowsDropped) -> None:
        if not self._rows.isdisjoint(event.rows):
            kind, _, why = event.reason.partition(":")
            self.outcome = "filtered" if kind == "filtered" else "dropped"
            self._tell(f"{self.outcome}: {why or event.reason}")

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


_SEEN: dict[type, Callable[[Life, Any], None]] = {
    ev.RowsPut: Life._put,
    ev.SnapshotGroups: Life._restored,
    ev.Leased: Life._leased,
    ev.Completed: lambda life, event: life._ended(event, ", done"),
    ev.Returned: lambda life, event: life._ended(event, f", given back: {event.reason}"),
    ev.RowsDropped: Life._dropped,
    ev.Exchanged: Life._exchanged,
    ev.SlotDecided: Life._slotted,
    ev.Began: Life._began,
    ev.Committed: Life._committed,
    ev.UnitLost: Life._lost,
    ev.RowsGone: Life._gone,
    ev.Moved: Life._moved,
}


def life_of(ledgers: Iterable[Iterable[ev.Event]], key: SampleKey, *, partition: str) -> Life:
    """Return the life of a sample, out of all events of each controller's ledger, that of the primary first.

    Of the others only what their own tasks did is taken.
    """
    lives = [_told(events, Life(partition, key)) for events in ledgers]
    for other in lives[1:]:
        lives[0].moments += [moment for moment in other.moments if moment.task]
    if len(lives) > 1:
        lives[0].moments.sort(key=lambda moment: moment.at or 0.0)
    return lives[0]


def _told(events: Iterable[ev.Event], life: Life) -> Life:
    for event in events:
        life.see(event)
    return life


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
