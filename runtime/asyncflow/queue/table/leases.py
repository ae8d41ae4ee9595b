"""Claims, which wait for rows, and leases, which end by completion, return, expiry or the death of their holder.

Invariants: ``serve`` leaves no claim parked that it can grant. Claims whose version suits a row come before claims
that would have to load another version. No claim mixes rows of both kinds. Only the lease in force can change a row. A
claim or slot describes its rows as they are now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, cast

from asyncflow.errors import Refused
from asyncflow.flow.claims import whole_groups
from asyncflow.flow.ready import VersionFilter
from asyncflow.flow.schedule import VersionWindow
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.protocol.calls import ClaimRows, parse_lease
from asyncflow.queue.protocol.messages import LeasedRow
from asyncflow.queue.table.apply import QueueState
from asyncflow.queue.table.ready import TaskQueue
from asyncflow.queue.table.state import Lease, Row, RowGroup, lease_id

_REASON: Final = 200
"""Characters that are kept of the reason for returning rows."""


class Claims:
    """The claims and leases of all tasks.

    Counts since the controller started: expiries: leases ended by a timeout or the death of their holder; timeouts:
    by a timeout alone; redeliveries: rows leased again; fenced: writes refused because their lease had ended.
    """

    def __init__(self, state: QueueState) -> None:
        self.expiries = self.timeouts = self.redeliveries = self.fenced = 0
        self._state = state
        self._parked: dict[tuple[str, str], dict[ClaimRows, None]] = {}
        self._granted = 0
        self._epoch = 0

    def start(self, now: float) -> None:
        """Start to grant leases in the current epoch, which no other controller has."""
        self._epoch = self._state.epoch
        self.extend_all(now)

    def extend_all(self, now: float) -> None:
        """Restart the full time of every lease in force."""
        for lease in self._state.leases:
            self._extend(lease, now)

    def parked(self) -> dict[tuple[str, str], int]:
        """Return the number of parked claims by partition and task."""
        return {task: len(claims) for task, claims in self._parked.items()}

    def park(self, claim: ClaimRows) -> None:
        """Park ``claim`` until there are rows; the next ``serve`` may grant it. Refused for the task of a gang."""
        self._queue(claim)
        self._parked.setdefault((claim.partition, claim.task), {})[claim] = None

    def withdraw(self, claim: ClaimRows) -> None:
        """Remove ``claim`` from the parked claims."""
        claims = self._parked.get((claim.partition, claim.task), {})
        claims.pop(claim, None)
        if not claims:
            self._parked.pop((claim.partition, claim.task), None)

    def serve(self, now: float) -> list[tuple[ClaimRows, list[LeasedRow]]]:
        """Grant the claims that can be granted in the changed partitions; return each with its rows."""
        grants: list[tuple[ClaimRows, list[LeasedRow]]] = []
        for (partition, task), claims in list(self._parked.items()):
            queue = self._state.partition(partition).queues.get(task) if partition in self._state.changed else None
            if queue is None or queue.spec.kind == "gang":
                continue
            for exact in (True, False):
                for claim in [claim for claim in claims if exact or claim.accept]:
                    if rows := self._meet(queue, claim, now, exact=exact):
                        self.withdraw(claim)
                        grants.append((claim, rows))
        return grants

    def grant(self, claim: ClaimRows, now: float) -> list[LeasedRow]:
        """Grant ``claim`` if that is possible now. It comes after parked claims, which ``serve`` could not grant."""
        if (queue := self._queue(claim)) is None:
            return []
        rows = self._meet(queue, claim, now, exact=True)
        return rows or (self._meet(queue, claim, now, exact=False) if claim.accept else [])

    def _queue(self, claim: ClaimRows) -> TaskQueue | None:
        partition = self._state.partitions.get(claim.partition)
        queue = partition.task(claim.task) if partition is not None else None
        if queue is not None and queue.spec.kind == "gang":
            hint = "A trainer requests slots"
            raise Refused(f"{claim.partition}/{claim.task} is the task of a gang", where="claim", hint=hint)
        return queue

    def _meet(self, queue: TaskQueue, claim: ClaimRows, now: float, *, exact: bool) -> list[LeasedRow]:
        lease = self._state.leases.of_ticket(claim.worker, claim.ticket)
        if lease is not None:
            rows = list(map(self._state.rows.__getitem__, lease.rows))
            return leased_rows(rows, lease, now=now) if all(row.reported for row in rows) else []
        if queue.index.weight < claim.min_rows or not (rows := self._take(queue, claim, exact=exact)):
            return []
        self._granted += 1
        number = lease_id(epoch=self._epoch, counter=self._granted, controller=self._state.index)
        numbers = [row.row for row in rows]
        self._state.record(ev.Leased(number, claim.partition, claim.task, claim.worker, claim.ticket, numbers))
        lease = self._state.leases.get(number)
        assert lease is not None
        self._state.leases.extend(lease, until=now + queue.spec.lease_s)
        leased = leased_rows(rows, lease, now=now)
        self.redeliveries += sum([row.attempt > 0 for row in leased])
        return leased

    def _take(self, queue: TaskQueue, claim: ClaimRows, *, exact: bool) -> list[Row]:
        """Return the rows for the claim, and remove them from the index."""
        versions = VersionFilter(claim.version, tuple(claim.accept))
        fits = versions.suits if exact else versions.accepts
        if queue.by_group or claim.max_groups is not None:
            return self._choose(queue, claim, fits)
        if claim.min_rows > 1 and queue.index.fitting(fits) < claim.min_rows:
            return []
        return cast("list[Row]", queue.index.take(fits, claim.max_rows))

    def _choose(self, queue: TaskQueue, claim: ClaimRows, fits: Callable[[VersionWindow], bool]) -> list[Row]:
        """Return rows, or the rows of whole groups, in order, and stop before the limits of the claim are exceeded."""
        each = queue.index.each(fits)
        if queue.by_group:
            ready = (queue.open_rows(cast("RowGroup", group)) for group in islice(each, claim.max_groups))
            groups = whole_groups(ready, most=claim.max_rows)
            rows = [row for group in groups for row in group]
            items: list[Row | RowGroup] = [group[0].group for group in groups]
        else:
            rows = _of_groups(cast("Iterator[Row]", each), most=claim.max_rows, groups=claim.max_groups)
            items = [*rows]
        if len(rows) < claim.min_rows:
            return []
        for item in items:
            queue.index.discard(item)
        return rows

    def holder(self, lease: str) -> Lease | None:
        """Return the lease of that name if it is in force."""
        number, holder = parse_lease(lease)
        found = self._state.leases.get(number)
        return found if found is not None and found.holder == holder else None

    def complete(self, lease: str, rows: Sequence[int]) -> list[bool]:
        """Complete the rows that the lease holds; return True for them and those it has completed, False for others."""
        if held := self.held(lease, rows):
            self._state.record(ev.Completed(parse_lease(lease)[0], held))
        done = {*held, *self.completed(lease, rows)} if len(held) < len(rows) else set(held)
        admitted = [row in done for row in rows]
        self.fenced += admitted.count(False)
        return admitted

    def give_back(self, lease: str, rows: Sequence[int], reason: str | None) -> list[bool]:
        """Return the rows that the lease holds to the queue, unless ``reason`` is None; return False for other rows."""
        held = self.held(lease, rows)
        if held and reason is not None:
            self._state.record(ev.Returned(parse_lease(lease)[0], held, reason[:_REASON]))
        return [row in set(held) for row in rows]

    def drop(self, lease: str, rows: Sequence[int], reason: str) -> list[bool]:
        """Permanently drop the rows that the lease holds; return False for other rows."""
        if held := self.held(lease, rows):
            self._state.record(ev.RowsDropped(self._state.rows[held[0]].group.partition, held, reason))
        return [row in set(held) for row in rows]

    def renew(self, leases: Sequence[str], now: float) -> list[str]:
        """Restart the time of ``leases``; return those that are in force."""
        known = [(name, lease) for name in leases if (lease := self.holder(name)) is not None]
        for _, lease in known:
            self._extend(lease, now)
        return [name for name, _ in known]

    def expire(self, now: float) -> int:
        """End the leases whose time is over; return the number of rows that became ready again."""
        return sum(self._end(lease, "expired") for lease in self._state.leases.due(now))

    def abandon(self, worker: str, ticket: str) -> None:
        """End the lease, if any, of a claim whose caller no longer waits."""
        if (lease := self._state.leases.of_ticket(worker, ticket)) is not None:
            self._state.record(ev.Returned(lease.id, list(lease.rows), "abandoned"))

    def expire_worker(self, worker: str) -> None:
        """End all leases and claims of a worker that is known to be dead."""
        for claim in [claim for claims in self._parked.values() for claim in claims if claim.worker == worker]:
            self.withdraw(claim)
        for lease in self._state.leases.of_worker(worker):
            self._end(lease, "worker lost")

    def ended(self, claim: ClaimRows) -> bool:
        """Return whether no row will ever come for ``claim``; see ``ClaimRows.until_done``. Raises Misdirected."""
        if (partition := self._state.partitions.get(claim.partition)) is None:
            return False
        queue = partition.task(claim.task)
        if not partition.ended(claim.task):
            return False
        if not claim.until_done or queue is None:
            return True
        held = self._state.leases.of_worker(claim.worker)
        task = (claim.partition, claim.task)
        return queue.leased == sum(len(lease.rows) for lease in held if (lease.partition, lease.task) == task)

    def _end(self, lease: Lease, reason: str) -> int:
        rows = list(lease.rows)
        self._state.record(ev.Returned(lease.id, rows, reason))
        self.expiries += 1
        self.timeouts += reason == "expired"
        return len(rows)

    def _extend(self, lease: Lease, now: float) -> None:
        queue = self._state.partitions[lease.partition].queues[lease.task]
        self._state.leases.extend(lease, until=now + queue.spec.lease_s)

    def held(self, name: str, rows: Sequence[int]) -> list[int]:
        """Return those of ``rows`` that the lease holds, without duplicates."""
        lease = self.holder(name)
        return [row for row in dict.fromkeys(rows) if row in lease.rows] if lease is not None else []

    def completed(self, lease: str, rows: Sequence[int]) -> set[int]:
        """Return those of ``rows`` that the lease has completed, including rows that this cleared."""
        done, known = parse_lease(lease), self._state.rows
        known_rows = [row for number in rows if (row := known.get(number)) is not None]
        found = {row.row for row in known_rows if any((work.done, work.holder) == done for work in row.work.values())}
        return found | set(rows) - known.keys() if done[0] in self._state.leases.completed else found


def leased_rows(rows: Sequence[Row], lease: Lease | None = None, *, now: float = 0.0) -> list[LeasedRow]:
    """Describe ``rows`` that ``lease`` holds or, without a lease, that a rank trains in a slot."""
    name, until = (lease.name, lease.until - now) if lease is not None else ("", 0.0)
    return [
        LeasedRow(
            row=row.row,
            meta=row.meta,
            attempt=row.work[lease.task].attempt if lease is not None else 0,
            lease=name,
            until=until,
            unit=row.unit,
            bytes=dict(row.sizes),
        )
        for row in rows
    ]


def _of_groups(rows: Iterable[Row], *, most: int, groups: int | None) -> list[Row]:
    """Return the first rows, at most ``most`` and of at most ``groups`` groups."""
    taken: list[Row] = []
    serials: set[int] = set()
    for row in islice(rows, most):
        serials.add(row.group.serial)
        if groups is not None and len(serials) > groups:
            break
        taken.append(row)
    return taken
