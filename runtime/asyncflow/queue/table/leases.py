"""Leases in force: who holds which rows of a task, and until when.

Invariants: a row is in at most one lease of a task; a lease without rows does not exist; deadlines lie in a heap, where
a renewal costs nothing and an entry that turned out too early is put back when it comes up.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator

from msgspec import Struct

from asyncflow.queue.protocol.shard_calls import LEASE_BITS

_COUNTER_BITS = 40
_REMEMBERED = 4096


class Lease(Struct, eq=False):
    """One claim that was met. rows: ids of those still open, as they were given; until: on the caller's clock.

    whole: no row of it was given back or dropped.
    """

    id: int
    partition: str
    task: str
    worker: str
    ticket: str
    rows: dict[int, None]
    until: float = math.inf
    whole: bool = True

    @property
    def name(self) -> str:
        """The id as it goes to clients."""
        return f"{self.id:x}"


def lease_id(*, epoch: int, counter: int, controller: int = 0) -> int:
    """Return the id of the ``counter``-th lease of the controller with this epoch: never used again."""
    return controller << LEASE_BITS | epoch << _COUNTER_BITS | counter


def parse_lease(name: str) -> int:
    """Return the id that ``Lease.name`` wrote; 0, which no lease has, for anything else."""
    try:
        return int(name, 16)
    except ValueError:
        return 0


class Leases:
    """The book of leases in force, and of the last ones whose rows were all completed."""

    def __init__(self) -> None:
        self._completed: dict[int, None] = {}
        self._open: dict[int, Lease] = {}
        self._tickets: dict[tuple[str, str], Lease] = {}
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._open.values())

    def get(self, lease: int) -> Lease | None:
        """Return the lease if it is in force."""
        return self._open.get(lease)

    def of_ticket(self, worker: str, ticket: str) -> Lease | None:
        """Return the lease that the claim ``ticket`` of ``worker`` was given, if it is in force."""
        return self._tickets.get((worker, ticket))

    def of_worker(self, worker: str) -> list[Lease]:
        """Return the leases that ``worker`` holds."""
        return [lease for lease in self._open.values() if lease.worker == worker]

    def add(self, lease: Lease) -> None:
        """Enter a lease; it has no deadline before ``extend``."""
        self._open[lease.id] = lease
        self._tickets[lease.worker, lease.ticket] = lease

    def extend(self, lease: Lease, *, until: float) -> None:
        """Let ``lease`` be in force until then."""
        if lease.until == math.inf:
            heapq.heappush(self._heap, (until, lease.id))
        lease.until = until

    def release(self, lease_id: int, rows: Iterable[int], *, done: bool = False) -> None:
        """Take ``rows``, ``done`` or not, out of their lease; the lease ends with its last row."""
        lease = self._open.get(lease_id)
        if lease is None:
            return
        lease.whole &= done
        for row in rows:
            lease.rows.pop(row, None)
        if not lease.rows:
            self._end(lease)

    def cancel(self, lease_id: int) -> None:
        """End a lease, if it is in force: none of its rows was completed."""
        if (lease := self._open.get(lease_id)) is not None:
            lease.whole = False
            self._end(lease)

    def _end(self, lease: Lease) -> None:
        del self._open[lease.id]
        if self._tickets.get((lease.worker, lease.ticket)) is lease:
            del self._tickets[lease.worker, lease.ticket]
        if lease.whole:
            self.remember(lease.id)

    def remember(self, lease_id: int) -> None:
        """Note that a lease has ended because all its rows were completed."""
        self._completed[lease_id] = None
        if len(self._completed) > _REMEMBERED:
            del self._completed[next(iter(self._completed))]

    def completed(self) -> list[int]:
        """Return the leases that ended so last."""
        return list(self._completed)

    def was_completed(self, lease_id: int) -> bool:
        """Tell whether a lease is one of them."""
        return lease_id in self._completed

    def due(self, now: float) -> list[Lease]:
        """Return the leases whose deadline has passed. They stay in force until their rows are released."""
        ended: list[Lease] = []
        while self._heap and self._heap[0][0] <= now:
            _, number = heapq.heappop(self._heap)
            lease = self._open.get(number)
            if lease is None:
                continue
            if lease.until <= now:
                ended.append(lease)
            else:
                heapq.heappush(self._heap, (lease.until, number))
        while self._heap and self._heap[0][1] not in self._open:
            heapq.heappop(self._heap)
        return ended

    @property
    def next_deadline(self) -> float:
        """A time before which no lease ends, perhaps long before; infinite without leases since ``due``."""
        return self._heap[0][0] if self._heap else math.inf
