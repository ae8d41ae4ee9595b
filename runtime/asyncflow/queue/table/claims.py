"""Claims: parked until rows are ready, met with a lease, ended by completion, return, expiry or the holder's death.

Invariants: a claim that can be met is never left parked after ``serve``; claims whose version suits a row come before
those that would have to load another; no claim mixes rows of both kinds; only the lease in force can change a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, cast

from msgspec import Struct

from asyncflow.errors import Refused
from asyncflow.flow.schedule import Window
from asyncflow.flow.selection import Appetite
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.protocol.lot import Lot
from asyncflow.queue.table.books import Books
from asyncflow.queue.table.granted import lot_of_lease
from asyncflow.queue.table.leases import Lease, lease_id, parse_lease
from asyncflow.queue.table.readiness import TaskQueue
from asyncflow.queue.table.state import Group, Row

ANY: Final = Appetite()
"""That of a claim to which versions do not matter."""


class Claim(Struct, eq=False):
    """What a worker asks for. ticket: its own name for the claim; one that is asked again gets the same lease again.

    max_rows: most rows, but at least one whole group where the task takes groups; max_groups: most groups; min_rows:
    fewest, or nothing; max_tokens: most weight, 0 for any, but at least one row or group; until_done: the task has not
    ended for it while others hold rows, which may come back.
    """

    partition: str
    task: str
    worker: str
    ticket: str
    appetite: Appetite = ANY
    max_rows: int = 1
    max_groups: int | None = None
    min_rows: int = 1
    max_tokens: int = 0
    until_done: bool = False


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
        self._parked: dict[str, dict[str, dict[Claim, None]]] = {}
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
        """Return the number of parked claims by partition and task."""
        return {(name, task): len(claims) for name, tasks in self._parked.items() for task, claims in tasks.items()}

    def park(self, claim: Claim) -> None:
        """Let ``claim`` wait for rows; the next ``serve`` may meet it. Refused for a gang's task."""
        self._queue(claim)
        self._parked.setdefault(claim.partition, {}).setdefault(claim.task, {})[claim] = None

    def withdraw(self, claim: Claim) -> None:
        """Let ``claim`` wait no longer."""
        tasks = self._parked.get(claim.partition, {})
        claims = tasks.get(claim.task, {})
        claims.pop(claim, None)
        if not claims and tasks.pop(claim.task, None) is not None and not tasks:
            del self._parked[claim.partition]

    def serve(self, now: float) -> list[tuple[Claim, Lot]]:
        """Meet the claims that can be met in the partitions that were touched; return each with its rows."""
        grants: list[tuple[Claim, Lot]] = []
        for partition in self._parked.keys() & self._books.touched:
            for task, claims in list(self._parked[partition].items()):
                queue = self._books.partition(partition).queues.get(task)
                if queue is not None and queue.spec.kind != "gang":
                    self._serve(queue, claims, grants, now)
        return grants

    def _serve(self, queue: TaskQueue, claims: dict[Claim, None], grants: list[tuple[Claim, Lot]], now: float) -> None:
        waiting = list(claims)
        for exact in (True, False):
            for claim in waiting:
                if (lot := self._meet(queue, claim, now, exact=exact)) is not None:
                    self.withdraw(claim)
                    grants.append((claim, lot))
            waiting = [claim for claim in claims if claim.appetite.accept]

    def grant(self, claim: Claim, now: float) -> Lot | None:
        """Meet ``claim`` if that can be done now; it comes after all parked ones, which so cannot be met."""
        queue = self._queue(claim)
        if queue is None:
            return None
        lot = self._meet(queue, claim, now, exact=True)
        return lot or (self._meet(queue, claim, now, exact=False) if claim.appetite.accept else None)

    def _queue(self, claim: Claim) -> TaskQueue | None:
        queue = self._books.partition(claim.partition).task(claim.task)
        if queue is not None and queue.spec.kind == "gang":
            hint = "A trainer asks for slots"
            raise Refused(f"{claim.partition}/{claim.task} is the task of a gang", where="claim", hint=hint)
        return queue

    def _meet(self, queue: TaskQueue, claim: Claim, now: float, *, exact: bool) -> Lot | None:
        lease = self._books.leases.of_ticket(claim.worker, claim.ticket)
        if lease is not None:
            rows = list(map(self._books.rows.__getitem__, lease.rows))
            return lot_of_lease(lease, rows, now) if all(row.here for row in rows) else None
        if queue.index.weight < claim.min_rows or not (rows := self._take(queue, claim, exact=exact)):
            return None
        self._granted += 1
        number = lease_id(epoch=self._epoch, counter=self._granted, controller=self._books.index)
        numbers = [row.row for row in rows]
        self._books.record(ev.Leased(number, claim.partition, claim.task, claim.worker, claim.ticket, numbers))
        lease = self._books.leases.get(number)
        assert lease is not None
        self._books.leases.extend(lease, until=now + queue.spec.lease_s)
        lot = lot_of_lease(lease, rows, now)
        self.counters.redeliveries += len(lot.attempts) - lot.attempts.count(0)
        return lot

    def _take(self, queue: TaskQueue, claim: Claim, *, exact: bool) -> list[Row]:
        """Return the rows that the claim gets, taken out of the index."""
        fits = claim.appetite.suits if exact else claim.appetite.accepts
        if queue.by_group or claim.max_groups is not None or claim.max_tokens:
            return self._choose(queue, claim, fits)
        if claim.min_rows > 1 and queue.index.fitting(fits) < claim.min_rows:
            return []
        return cast("list[Row]", queue.index.take(fits, claim.max_rows))

    def _choose(self, queue: TaskQueue, claim: Claim, fits: Callable[[Window], bool]) -> list[Row]:
        """Return rows or groups in order, up to the first that would be too much."""
        rows: list[Row] = []
        items: list[Row | Group] = []
        groups: set[int] = set()
        most, left = claim.max_rows, claim.max_tokens or math.inf
        for item in queue.index.each(fits):
            if len(rows) >= most:
                break
            more = queue.open_rows(item) if isinstance(item, Group) else [item]
            serial = more[0].group.serial
            if claim.max_groups is not None and serial not in groups and len(groups) >= claim.max_groups:
                break
            if len(rows) + len(more) > most and (rows or not queue.by_group):
                break
            weight = sum([row.weight for row in more]) if claim.max_tokens else 0
            if rows and weight > left:
                break
            left -= weight
            groups.add(serial)
            rows += more
            items.append(item)
        if len(rows) < claim.min_rows:
            return []
        for item in items:
            queue.index.discard(item)
        return rows

    def holder(self, lease: str) -> Lease | None:
        """Return the lease of that name if it is in force."""
        return self._books.leases.get(parse_lease(lease))

    def complete(self, lease: str, rows: Sequence[int]) -> list[bool]:
        """Complete those of ``rows`` that the lease holds, or has completed already; False for the others."""
        number = parse_lease(lease)
        mine = self._held(number, rows)
        if mine:
            self._books.record(ev.Completed(number, mine))
            if len(mine) == len(rows):
                return [True] * len(mine)
        held = set(mine)
        admitted = [ok or row in held for ok, row in zip(self.completed(lease, rows), rows, strict=True)]
        self.counters.fenced += admitted.count(False)
        return admitted

    def acknowledge(self, leases: Sequence[str]) -> list[bool]:
        """Complete all rows of ``leases``; False for one that is not in force and was not completed so before."""
        held = {name: lease for name in leases if (lease := self.holder(name)) is not None}
        for name, lease in held.items():
            if writes := self._books.partition(lease.partition).queues[lease.task].spec.writes:
                hint = "Complete them with these columns"
                raise Refused(f"task {lease.task} writes {sorted(writes)}", where=f"lease {name}", hint=hint)
        for lease in held.values():
            self._books.record(ev.Completed(lease.id, list(lease.rows)))
        admitted = [self._books.leases.was_completed(parse_lease(name)) for name in leases]
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
        """Drop for ever those of ``rows`` that the lease holds; False for the others."""
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
        gone = [c for tasks in self._parked.values() for claims in tasks.values() for c in claims if c.worker == worker]
        for claim in gone:
            self.withdraw(claim)
        for lease in self._books.leases.of_worker(worker):
            self._end(lease, "worker lost")

    def ended(self, claim: Claim) -> bool:
        """Tell whether nothing will ever come for ``claim``; see ``Claim.until_done``. Raises Misdirected."""
        partition = self._books.partition(claim.partition)
        queue = partition.task(claim.task)
        if not partition.ended(claim.task):
            return False
        if not claim.until_done or queue is None:
            return True
        held = self._books.leases.of_worker(claim.worker)
        home = (claim.partition, claim.task)
        return queue.leased == sum(len(lease.rows) for lease in held if (lease.partition, lease.task) == home)

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
        """Tell which of ``rows`` the lease has completed, and the books still know."""
        number = parse_lease(lease)
        return [self._did(row, number) for row in rows]

    def _did(self, number: int, lease: int) -> bool:
        row = self._books.rows.get(number)
        return row is not None and any(work.done == lease for work in row.work.values())
