"""Calls that are parked: those that cannot be answered before their partition has changed, or their time is over.

Invariants: nothing polls; a call is tried again only when its partition has changed; a call whose answer was found,
whose time is over or whose caller has gone waits no longer and is granted nothing; no call is answered twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from msgspec.structs import replace

from asyncflow.errors import AsyncFlowError
from asyncflow.queue.protocol.calls import ClaimRows
from asyncflow.queue.table.replication import FEED
from asyncflow.queue.table.table import Table

T = TypeVar("T")
Soon: TypeAlias = T | Awaitable[T]
"""An answer, or an awaitable of it."""
Answers: TypeAlias = list[tuple[asyncio.Future[Any], Any]]
"""Calls, and the answer of each; an error is an answer too."""


@dataclass(slots=True, eq=False)
class _Waiter:
    """A parked call.

    attempt: returns its answer, or None as long as there is none; otherwise: its answer when its time is over; future:
    of its answer; timer: of the end of its wait; claim: what it asks for, if it is a claim.
    """

    partition: str
    attempt: Callable[[], Any]
    otherwise: Any
    future: asyncio.Future[Any]
    timer: asyncio.TimerHandle
    claim: ClaimRows | None


class Parking:
    """The parked calls of a controller, by partition. now: its clock; give: sends answers."""

    def __init__(self, table: Table, *, now: Callable[[], float], give: Callable[[Answers], object]) -> None:
        self.waiters: dict[str, dict[_Waiter, None]] = {}
        self._table = table
        self._now = now
        self._give = give
        self._claims: dict[ClaimRows, _Waiter] = {}

    def park(
        self,
        partition: str,
        attempt: Callable[[], T | None],
        wait_s: float,
        otherwise: T,
        claim: ClaimRows | None = None,
    ) -> asyncio.Future[T]:
        """Return a future of what ``attempt`` returns once the partition has changed; ``otherwise`` after ``wait_s``.

        claim: met with rows, which take the place of those in ``otherwise``.
        """

        def over() -> None:
            self._give([(self._leave(waiter), otherwise)])

        if claim is not None:
            self._table.claims.park(claim)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        timer = loop.call_at(self._now() + wait_s, over)
        waiter = _Waiter(partition, attempt, otherwise, future, timer, claim)
        if claim is not None:
            self._claims[claim] = waiter
        self.waiters.setdefault(partition, {})[waiter] = None
        future.add_done_callback(lambda _: self._leave(waiter))
        return future

    def withdraw(self, worker: str, ticket: str) -> None:
        """Answer a parked claim without rows; one that was met has its answer."""
        for claim, waiter in self._claims.items():
            if (claim.worker, claim.ticket) == (worker, ticket):
                self._give([(self._leave(waiter), replace(waiter.otherwise, withdrawn=True))])
                return

    def take_found(self) -> Answers:
        """Take the calls that can be answered now."""
        found: Answers = []
        if changed := self.waiters.keys() & self._table.state.changed:
            self._leave_cancelled(changed)
            for claim, rows in self._table.claims.serve(self._now()):
                waiter = self._claims[claim]
                found.append((self._leave(waiter), replace(waiter.otherwise, rows=rows)))
            for partition in (*changed, FEED):
                for waiter in list(self.waiters.get(partition, ())):
                    try:
                        answer = waiter.attempt()
                    except AsyncFlowError as error:
                        answer = error
                    if answer is not None:
                        found.append((self._leave(waiter), answer))
        return found

    def _leave_cancelled(self, partitions: Iterable[str]) -> None:
        """Remove calls whose callers have gone: the callbacks of their futures run only in the loop's next turn."""
        for partition in partitions:
            for waiter in list(self.waiters[partition]):
                if waiter.future.cancelled():
                    self._leave(waiter)

    def _leave(self, waiter: _Waiter) -> asyncio.Future[Any]:
        """End the waiting of a call, as its answer is found or nobody wants it; return the future of its answer."""
        waiter.timer.cancel()
        waiting = self.waiters.get(waiter.partition, {})
        if waiting.pop(waiter, 0) is None and not waiting:
            del self.waiters[waiter.partition]
        if waiter.claim is not None:
            self._table.claims.withdraw(waiter.claim)
            self._claims.pop(waiter.claim, None)
        return waiter.future


def give(
    answers: Answers, pending: asyncio.Future[None] | None, *, broken: Callable[[OSError], AsyncFlowError]
) -> None:
    """Answer calls once the ledger is ``pending`` no more. broken: makes the error of those whose ledger failed."""
    if pending is not None and not pending.done():
        pending.add_done_callback(lambda done: give(answers, done, broken=broken))
        return
    failure = pending.exception() if pending is not None else None
    for future, answer in answers:
        said = broken(failure) if isinstance(failure, OSError) else answer
        if future.done():
            continue
        if isinstance(said, AsyncFlowError):
            future.set_exception(said)
        else:
            future.set_result(said)
