"""The calls that every controller answers for its own tasks; ``Primary`` and ``Replica`` add what they alone do.

Invariants: a handler that waits has settled what it changed before, and what it returns is sent once the ledger has
everything behind it; what is not in ``routes`` is refused by the server as a method that is not there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import Struct
from msgspec.structs import astuple

from asyncflow.queue.controller.parking import Soon
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
"""Returns the address of the controller with this number, None while it has none."""
Route: TypeAlias = tuple[type[Struct], Callable[[Any], Any]]
"""The request of a method, and the function of it that returns the reply, None for ``Done``, or an awaitable of it."""


class Handlers:
    """The part of a controller in its queue."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.table = controller.table
        self.state = controller.table.state

    def ready(self) -> tuple[bool, str]:
        """Return whether leases can be granted, and what is waited for."""
        return True, "ready"

    def silences(self) -> dict[int, float]:
        """Return the seconds for which each controller that follows this one has not asked what happened."""
        return {}

    def expire(self, worker: str) -> None:
        """End all leases and claims of a worker that is known to be dead."""
        self.table.claims.expire_worker(worker)
        self.controller.settle()

    def routes(self) -> dict[str, Route]:
        """Return how each method is answered."""
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
        """Complete rows under a lease of this controller, or keep what there is of them and perhaps give them back."""
        if entry.outcome == "complete":
            return self.table.complete(entry.lease, entry.rows, entry.cells, entry.tags)
        reason = entry.reason if entry.outcome == "return" else None
        return self.table.give_back(entry.lease, entry.rows, reason, entry.cells)

    def asked(self, name: str) -> PartitionState:
        """Return the partition for a question: one that nobody made stays unmade."""
        return self.state.partitions.get(name) or PartitionState(name)

    def _abandon(self, worker: str, ticket: str) -> None:
        self.controller.parking.withdraw(worker, ticket)  # it may wait yet, if it came by a connection that broke
        self.table.claims.abandon(worker, ticket)

    def _end(self, call: calls.EndRows) -> Soon[list[bool]]:
        end = self.table.claims.drop if call.drop else self.table.give_back
        return end(call.lease, call.rows, call.reason)

    def snapshot(self, call: calls.AskSnapshot) -> PartitionSnapshot:
        """Return how far a partition has come, as far as is known here."""
        return snapshot(self.asked(call.partition), step=call.step)

    def show(self, call: calls.InPartition) -> PartitionView:
        """Describe a partition with the tasks of this controller."""
        return view(self.table, call.partition, self.controller.now())

    async def audit(self, _call: calls.Nothing) -> AuditReport:
        """Audit the ledger of this controller."""
        await self.controller.written()
        return await asyncio.to_thread(audit_ledger, self.controller.ledger.directory)

    def peek(self, call: calls.Peek) -> PeekedRows:
        """Return rows as a task of this controller sees them."""
        partition = self.asked(call.partition)
        if call.rows:
            rows = live_rows(self.state, call.rows, of=call.partition)
        else:
            rows = list(islice(list_rows(partition), call.most))
        return peek(self.state, partition, call.task, rows)

    def reset(self, call: calls.Reset) -> int:
        """Make every row ready again for a task of this controller, or all of them; return how many it had."""
        return reset(self.state, self.state.partition(call.partition), call.task)

    def progress(self, call: calls.AskProgress) -> Progress:
        """Return how many rows have some columns, or how many a task of this controller has completed."""
        return progress(self.asked(call.partition), columns=call.columns, task=call.task)


def spread(command: Callable[..., Any]) -> Callable[[Struct], Any]:
    """Return ``command`` as a function of a request whose fields are its parameters, in order."""
    return lambda call: command(*astuple(call))
