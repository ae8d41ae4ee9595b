"""Claims: parked until rows are ready, met with a lease, ended by completion, return, expiry or the holder's death.

Invariants: a claim that can be met is never left parked after ``serve``; claims whose version suits a row come before
those that would have to load another; no claim mixes rows of both kinds; only the lease in force can change a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncflow.errors import Refused
from asyncflow.flow.selection import Appetite
from asyncflow.queue import events as ev
from asyncflow.queue.books import Books
from asyncflow.queue.leases import Lease, lease_id, parse_lease
from asyncflow.queue.messages import LeasedRow
from asyncflow.queue.readiness import TaskQueue
from asyncflow.queue.state import Group, Row


@dataclass(slots=True, eq=False)
class Claim:
    """What a worker asks for. ticket: its own name for the claim; one that is asked again gets the same lease again.

    max_rows: most rows, but at least one whole group where the task takes groups; max_groups: most groups.
    """

    partition: str
    task: str
    worker: str
    ticket: str
    appetite: Appetite = field(default_factory=Appetite)
    max_rows: int = 1
    max_groups: int | None = None


@dataclass(slots=True)
class Grant:
    """A claim that was met."""

    claim: Claim
    rows: list[LeasedRow]


@dataclass(slots=True)
class Counters:
    """Since the controller started. fenced: writes refused because their lease had ended."""

    expiries: int = 0
    redeliveries: int = 0
    fenced: int = 0


class Claims:
    """The claims and leases of all tasks."""

    def __init__(self, books: Books) -> None:
        self.counters = Counters()
        self._books = books
        self._parked: dict[tuple[str, str], dict[Claim, None]] = {}
        self._granted = 0
        self._epoch = 0

    def start(self, now: float) -> None:
        """Begin to grant leases, in the present epoch, which no other controller has."""
        self._epoch = self._books.epoch
        self.extend_all(now)

    def extend_all(self, now: float) -> None:
        """Let every lease in force be so for its full time from now on."""
        for lease in self._books.leases:
            self._extend(lease, now)

    def parked(self) -> dict[tuple[str, str], int]:
        """Give the number of parked claims by partition and task."""
        return {key: len(claims) for key, claims in self._parked.items()}

    def park(self, claim: Claim) -> None:
        """Let ``claim`` wait for rows; the next ``serve`` may meet it. Refused for a gang's task."""
        queue = self._books.partition(claim.partition).queues.get(claim.task)
        if queue is not None and queue.spec.kind == "gang":
            hint = "A trainer asks for slots"
            raise Refused(f"{claim.partition}/{claim.task} is the task of a gang", where="claim", hint=hint)
        self._parked.setdefault((claim.partition, claim.task), {})[claim] = None

    def withdraw(self, claim: Claim) -> None:
        """Let ``claim`` wait no longer."""
        key = (claim.partition, claim.task)
        if (claims := self._parked.get(key)) is not None:
            claims.pop(claim, None)
            if not claims:
                del self._parked[key]

    def serve(self, now: float) -> list[Grant]:
        """Meet the claims that can be met in the partitions that were touched."""
        grants: list[Grant] = []
        for partition, task in [key for key in self._parked if key[0] in self._books.touched]:
            queue = self._books.partition(partition).queues.get(task)
            if queue is None or queue.spec.kind == "gang":
                continue
            for exact in (True, False):
                for claim in list(self._parked.get((partition, task), ())):
                    if (lease := self._meet(queue, claim, now, exact=exact)) is not None:
                        self.withdraw(claim)
                        grants.append(Grant(claim, self._leased_rows(lease, queue, now)))
        return grants

    def _meet(self, queue: TaskQueue, claim: Claim, now: float, *, exact: bool) -> Lease | None:
        known = self._books.leases.of_ticket(claim.worker, claim.ticket)
        if known is not None:
            return known if all(self._books.rows[row].here for row in known.rows) else None
        rows = self._take(queue, claim, exact=exact)
        if not rows:
            return None
        self._granted += 1
        number = lease_id(epoch=self._epoch, counter=self._granted)
        self.counters.redeliveries += sum(1 for row in rows if (w := row.work.get(claim.task)) and w.attempt)
        numbers = [row.row for row in rows]
        self._books.record(ev.Leased(number, claim.partition, claim.task, claim.worker, claim.ticket, numbers))
        lease = self._books.leases.get(number)
        assert lease is not None
        self._extend(lease, now)
        return lease

    def _take(self, queue: TaskQueue, claim: Claim, *, exact: bool) -> list[Row]:
        fits = claim.appetite.suits if exact else claim.appetite.accepts
        rows: list[Row] = []
        groups: set[int] = set()
        while (item := queue.index.head(fits)) is not None:
            more = queue.open_rows(item) if isinstance(item, Group) else [item]
            serial = more[0].group.serial
            too_many = len(rows) + len(more) > max(1, claim.max_rows)
            if claim.max_groups is not None and serial not in groups and len(groups) >= claim.max_groups:
                break
            if too_many and (rows or not queue.by_group):
                break
            groups.add(serial)
            rows += more
            queue.index.discard(item)
        return rows

    def _leased_rows(self, lease: Lease, queue: TaskQueue, now: float) -> list[LeasedRow]:
        left = lease.until - now
        return [
            LeasedRow(
                row=number,
                meta=row.meta,
                attempt=row.work[queue.spec.name].attempt,
                lease=lease.name,
                until=left,
                unit=row.unit,
                bytes=row.sizes,
            )
            for number in lease.rows
            if (row := self._books.rows[number])
        ]

    def holder(self, lease: str) -> Lease | None:
        """Give the lease of that name if it is in force."""
        return self._books.leases.get(parse_lease(lease))

    def complete(self, lease: str, rows: Sequence[int]) -> list[bool]:
        """Complete those of ``rows`` that the lease holds, or has completed already; False for the others."""
        number = parse_lease(lease)
        if mine := self._held(number, rows):
            self._books.record(ev.Completed(number, mine))
        admitted = self.completed(lease, rows)
        self.counters.fenced += admitted.count(False)
        return admitted

    def give_back(self, lease: str, rows: Sequence[int], reason: str) -> list[bool]:
        """Let those of ``rows`` that the lease holds be ready again; False for the others."""
        number = parse_lease(lease)
        if mine := self._held(number, rows):
            self._books.record(ev.Returned(number, mine, reason))
        held = set(mine)
        return [row in held for row in rows]

    def drop(self, lease: str, rows: Sequence[int], reason: str) -> list[bool]:
        """Give up for ever those of ``rows`` that the lease holds; False for the others."""
        number = parse_lease(lease)
        mine = self._held(number, rows)
        if mine:
            self._books.record(ev.Dropped(self._books.rows[mine[0]].group.partition, mine, reason))
        held = set(mine)
        return [row in held for row in rows]

    def renew(self, leases: Sequence[str], now: float) -> list[str]:
        """Begin the time of ``leases`` anew; give those that are in force."""
        known = [(name, lease) for name in leases if (lease := self.holder(name)) is not None]
        for _, lease in known:
            self._extend(lease, now)
        return [name for name, _ in known]

    def expire(self, now: float) -> int:
        """End the leases whose time is over; give the number of rows that became ready again."""
        return sum(self._end(lease, "expired") for lease in self._books.leases.due(now))

    def abandon(self, worker: str, ticket: str) -> None:
        """End the lease, if any, of a claim for which nobody waits any more."""
        if (lease := self._books.leases.of_ticket(worker, ticket)) is not None:
            self._books.record(ev.Returned(lease.id, list(lease.rows), "abandoned"))

    def expire_worker(self, worker: str) -> None:
        """End all leases and claims of a worker that is known to be dead."""
        for claims in list(self._parked.values()):
            for claim in [claim for claim in claims if claim.worker == worker]:
                self.withdraw(claim)
        for lease in self._books.leases.of_worker(worker):
            self._end(lease, "worker lost")

    @property
    def next_deadline(self) -> float | None:
        """When ``expire`` is to be called next."""
        return self._books.leases.next_deadline

    def _end(self, lease: Lease, reason: str) -> int:
        rows = list(lease.rows)
        self._books.record(ev.Returned(lease.id, rows, reason))
        self.counters.expiries += 1
        return len(rows)

    def _extend(self, lease: Lease, now: float) -> None:
        queue = self._books.partitions[lease.partition].queues[lease.task]
        self._books.leases.extend(lease, until=now + queue.spec.lease_s)

    def _held(self, number: int, rows: Sequence[int]) -> list[int]:
        lease = self._books.leases.get(number)
        return [row for row in dict.fromkeys(rows) if row in lease.rows] if lease is not None else []

    def completed(self, lease: str, rows: Sequence[int]) -> list[bool]:
        """Tell which of ``rows`` the lease has completed."""
        number = parse_lease(lease)
        known = [self._books.rows.get(row) for row in rows]
        return [row is not None and any(work.done == number for work in row.work.values()) for row in known]
