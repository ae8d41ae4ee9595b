"""The calls that every controller answers for its own tasks; ``Primary`` and ``Replica`` add their own.

Invariants: a handler that waits has settled its earlier changes, and its result is sent once the ledger contains
everything behind it. The server refuses methods that are not in ``routes`` as unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import Struct
from msgspec.structs import astuple

from asyncflow.queue.controller.parking import MaybeAwaitable
from asyncflow.queue.ledger.audit import audit_ledger
from asyncflow.queue.protocol import calls
from asyncflow.queue.protocol.messages import AuditReport, PartitionSnapshot, PartitionView, PeekedRows, Progress
from asyncflow.queue.protocol.unit_calls import NewCells
from asyncflow.queue.table.partition import PartitionState
from asyncflow.queue.table.report import peek, progress, snapshot, view
from asyncflow.queue.table.rows import list_rows, live_rows, reset

if TYPE_CHECKING:
    from asyncflow.queue.controller.controller import Controller

Address: TypeAlias = Callable[[int], str | None]
"""Returns the address of the controller with this number, None if it has none yet."""
Route: TypeAlias = tuple[type[Struct], Callable[[Any], Any]]
"""The request type of a method, and its function, which returns the reply, None for ``Done``, or an awaitable."""


class Handlers:
    """The request handlers of a controller."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.table = controller.table
        self.state = controller.table.state

    def ready(self) -> tuple[bool, str]:
        """Return whether leases can be granted, and the reason if not."""
        return True, "ready"

    def silences(self) -> dict[int, float]:
        """Return the seconds since each replica of this controller last requested changes."""
        return {}

    def expire(self, worker: str) -> None:
        """End all leases and claims of a worker that is known to be dead."""
        self.table.claims.expire_worker(worker)
        self.controller.settle()

    def routes(self) -> dict[str, Route]:
        """Return the request type and the function of each method."""
        claims = self.table.claims
        return {
            "queue.claim": (calls.ClaimRows, self.controller.claim),
            "queue.renew": (calls.Leases, lambda c: claims.renew(c.leases, self.controller.now())),
            "queue.end": (calls.EndRows, self._end),
            "queue.abandon": (calls.ClaimTicket, spread(self._abandon)),
            "queue.withdraw": (calls.ClaimTicket, spread(self.controller.parking.withdraw)),
            "queue.expire": (calls.Expire, spread(self.expire)),
            "queue.stats": (calls.Nothing, lambda _: self.controller.stats()),
            "queue.snapshot": (calls.AskSnapshot, self.snapshot),
            "queue.show": (calls.InPartition, self.show),
            "queue.audit": (calls.Nothing, self.audit),
            "open.peek": (calls.Peek, self.peek),
            "open.reset": (calls.Reset, self.reset),
            "open.progress": (calls.AskProgress, self.progress),
        }

    def admit_cells(self, entry: NewCells) -> list[bool]:
        """Complete rows under a lease of this controller, or keep their unfinished columns and perhaps return them."""
        if entry.outcome == "complete":
            return self.table.complete(entry.lease, entry.rows, entry.cells, entry.tags)
        reason = entry.reason if entry.outcome == "return" else None
        return self.table.give_back(entry.lease, entry.rows, reason, entry.cells)

    def read_partition(self, name: str) -> PartitionState:
        """Return a partition for reading: an empty one, which is not added, if it does not exist."""
        return self.state.partitions.get(name) or PartitionState(name)

    def _abandon(self, worker: str, ticket: str) -> None:
        self.controller.parking.withdraw(worker, ticket)  # the claim may still be parked if its connection broke
        self.table.claims.abandon(worker, ticket)

    def _end(self, call: calls.EndRows) -> MaybeAwaitable[list[bool]]:
        end = self.table.claims.drop if call.drop else self.table.give_back
        return end(call.lease, call.rows, call.reason)

    def snapshot(self, call: calls.AskSnapshot) -> PartitionSnapshot:
        """Return the progress of a partition, as far as this controller knows it."""
        return snapshot(self.read_partition(call.partition), step=call.step)

    def show(self, call: calls.InPartition) -> PartitionView:
        """Describe a partition with the tasks of this controller."""
        return view(self.table, call.partition, self.controller.now())

    async def audit(self, _call: calls.Nothing) -> AuditReport:
        """Audit the ledger of this controller."""
        await self.controller.written()
        return await asyncio.to_thread(audit_ledger, self.controller.ledger.directory)

    def peek(self, call: calls.Peek) -> PeekedRows:
        """Return rows as a task of this controller sees them."""
        partition = self.read_partition(call.partition)
        if call.rows:
            rows = live_rows(self.state, call.rows, of=call.partition)
        else:
            rows = list(islice(list_rows(partition), call.most))
        return peek(self.state, partition, call.task, rows)

    def reset(self, call: calls.Reset) -> int:
        """Make every row ready again for one task of this controller, or for all; return the number of rows changed."""
        return reset(self.state, self.state.partition(call.partition), call.task)

    def progress(self, call: calls.AskProgress) -> Progress:
        """Return how many rows have some columns, or how many a task of this controller has completed."""
        return progress(self.read_partition(call.partition), columns=call.columns, task=call.task)


def spread(command: Callable[..., Any]) -> Callable[[Struct], Any]:
    """Return ``command`` as a function of a request whose fields are its parameters, in order."""
    return lambda call: command(*astuple(call))
