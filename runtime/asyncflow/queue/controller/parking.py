"""Parked calls, which cannot be answered before their partition changes or their wait ends.

Invariants: nothing polls. A call is tried again only when its partition has changed. A call that is answered, timed out
or abandoned by its caller no longer waits and is granted nothing. No call is answered twice.
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
MaybeAwaitable: TypeAlias = T | Awaitable[T]
"""An answer, or an awaitable of it."""
Answers: TypeAlias = list[tuple[asyncio.Future[Any], Any]]
"""Calls, and the answer of each; an error is an answer too."""


@dataclass(slots=True, eq=False)
class _Waiter:
    """A parked call.

    attempt: returns its answer, or None if there is none yet; otherwise: its answer after a timeout; future: its
    answer; timer: ends its wait; claim: the claim, if the call is one.
    """

    partition: str
    attempt: Callable[[], Any]
    otherwise: Any
    future: asyncio.Future[Any]
    timer: asyncio.TimerHandle
    claim: ClaimRows | None


class Parking:
    """The parked calls of a controller, by partition. now: its clock; deliver: sends answers."""

    def __init__(self, table: Table, *, now: Callable[[], float], deliver: Callable[[Answers], object]) -> None:
        self.waiters: dict[str, dict[_Waiter, None]] = {}
        self._table = table
        self._now = now
        self._deliver = deliver
        self._claims: dict[ClaimRows, _Waiter] = {}

    def park(
        self,
        partition: str,
        attempt: Callable[[], T | None],
        wait_s: float,
        otherwise: T,
        claim: ClaimRows | None = None,
    ) -> asyncio.Future[T]:
        """Return a future of the result of ``attempt`` once the partition has changed; ``otherwise`` after ``wait_s``.

        claim: if it is granted, ``otherwise`` with its rows is the answer.
        """

        def on_timeout() -> None:
            self._deliver([(self._leave(waiter), otherwise)])

        if claim is not None:
            self._table.claims.park(claim)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        waiter = _Waiter(partition, attempt, otherwise, future, loop.call_at(self._now() + wait_s, on_timeout), claim)
        if claim is not None:
            self._claims[claim] = waiter
        self.waiters.setdefault(partition, {})[waiter] = None
        future.add_done_callback(lambda _: self._leave(waiter))
        return future

    def withdraw(self, worker: str, ticket: str) -> None:
        """Answer a parked claim without rows; a granted claim already has its answer."""
        for claim, waiter in self._claims.items():
            if (claim.worker, claim.ticket) == (worker, ticket):
                self._deliver([(self._leave(waiter), replace(waiter.otherwise, withdrawn=True))])
                return

    def take_found(self) -> Answers:
        """Remove and return the calls that can be answered now."""
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
        """Remove cancelled calls now, since the callbacks of their futures run only in the loop's next iteration."""
        for partition in partitions:
            for waiter in list(self.waiters[partition]):
                if waiter.future.cancelled():
                    self._leave(waiter)

    def _leave(self, waiter: _Waiter) -> asyncio.Future[Any]:
        """End the wait of a call that is answered or no longer needed; return the future of its answer."""
        waiting = self.waiters.get(waiter.partition, {})
        if waiting.pop(waiter, 0) is None:
            waiter.timer.cancel()
            if not waiting:
                del self.waiters[waiter.partition]
            if waiter.claim is not None:
                self._table.claims.withdraw(waiter.claim)
                del self._claims[waiter.claim]
        return waiter.future


def deliver(
    answers: Answers, pending: asyncio.Future[None] | None, *, broken: Callable[[OSError], AsyncFlowError]
) -> None:
    """Answer calls once ``pending`` is done. broken: makes the error of the answers if the ledger failed."""
    if pending is not None and not pending.done():
        pending.add_done_callback(lambda done: deliver(answers, done, broken=broken))
        return
    failure = pending.exception() if pending is not None else None
    for future, answer in answers:
        result = broken(failure) if isinstance(failure, OSError) else answer
        if future.done():
            continue
        if isinstance(result, AsyncFlowError):
            future.set_exception(result)
        else:
            future.set_result(result)
