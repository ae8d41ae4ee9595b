"""Calls that are parked: those that cannot be answered before their partition has changed, or their time is over.

Invariants: nothing polls; a call is tried again only when its partition was touched; a call whose answer was found,
whose time is over or whose caller has gone waits no longer and is granted nothing; no call is answered twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from asyncflow.errors import AsyncFlowError
from asyncflow.queue.protocol.calls import Claimed
from asyncflow.queue.table.leases import Claim
from asyncflow.queue.table.replication import FEED
from asyncflow.queue.table.table import Table

T = TypeVar("T")
Soon: TypeAlias = T | Awaitable[T]
"""An answer, or an awaitable of it."""
Found: TypeAlias = list[tuple[asyncio.Future[Any], Any]]
"""Calls, and the answer of each; an error is an answer too."""


@dataclass(slots=True, eq=False)
class _Waiter:
    """A parked call.

    attempt: returns its answer, or None as long as there is none; future: of its answer; timer: of the end of its wait;
    claim: what it asks for, if it is a claim; late: see ``Claimed``.
    """

    partition: str
    attempt: Callable[[], Any]
    future: asyncio.Future[Any]
    timer: asyncio.TimerHandle
    claim: Claim | None = None
    late: list[str] = field(default_factory=list)


class Parking:
    """The parked calls of a controller. now: its clock; give: gives the answers of those whose time is over."""

    def __init__(self, table: Table, *, now: Callable[[], float], give: Callable[[Found], None]) -> None:
        self._table = table
        self._now = now
        self._give = give
        self._waiters: dict[str, dict[_Waiter, None]] = {}
        self._claims: dict[Claim, _Waiter] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiters.values()))

    def park(
        self, partition: str, attempt: Callable[[], T | None], wait_s: float, otherwise: Callable[[], T]
    ) -> asyncio.Future[T]:
        """Return a future of what ``attempt`` finds once the partition has changed; ``otherwise`` after ``wait_s``."""
        return self._wait(partition, attempt, wait_s, otherwise).future

    def park_claim(
        self, claim: Claim, ended: Callable[[], Claimed | None], wait_s: float, late: list[str]
    ) -> asyncio.Future[Claimed]:
        """Return a future of what ``claim`` is granted, or ``ended`` returns; of nothing after ``wait_s``."""
        self._table.claims.park(claim)
        waiter = self._wait(claim.partition, ended, wait_s, lambda: Claimed(None, False, late))
        waiter.claim, waiter.late = claim, late
        self._claims[claim] = waiter
        return waiter.future

    def withdraw(self, worker: str, ticket: str) -> None:
        """Answer a claim without rows, if it is parked."""
        for claim, waiter in self._claims.items():
            if (claim.worker, claim.ticket) == (worker, ticket):
                self._give([(self._leave(waiter), Claimed(None, False, waiter.late, withdrawn=True))])
                return

    def take_found(self) -> Found:
        """Take the calls that can be answered now."""
        state = self._table.state
        found: Found = []
        if touched := self._waiters.keys() & state.touched:
            self._leave_cancelled(touched)
            for claim, batch in self._table.claims.serve(self._now()):
                waiter = self._claims[claim]
                found.append((self._leave(waiter), Claimed(batch, False, waiter.late)))
            for partition in (*touched, FEED):
                for waiter in list(self._waiters.get(partition, ())):
                    try:
                        answer = waiter.attempt()
                    except AsyncFlowError as error:
                        answer = error
                    if answer is not None:
                        found.append((self._leave(waiter), answer))
        state.touched.clear()
        return found

    def _leave_cancelled(self, partitions: Iterable[str]) -> None:
        """Remove calls whose callers have gone: the callbacks of their futures run only in the loop's next turn."""
        for partition in partitions:
            for waiter in list(self._waiters[partition]):
                if waiter.future.cancelled():
                    self._leave(waiter)

    def _wait(self, partition: str, attempt: Callable[[], Any], wait_s: float, otherwise: Callable[[], Any]) -> _Waiter:
        def over() -> None:
            self._give([(self._leave(waiter), otherwise())])

        loop = asyncio.get_running_loop()
        waiter = _Waiter(partition, attempt, loop.create_future(), loop.call_at(self._now() + wait_s, over))
        self._waiters.setdefault(partition, {})[waiter] = None
        waiter.future.add_done_callback(lambda _: self._leave(waiter))
        return waiter

    def _leave(self, waiter: _Waiter) -> asyncio.Future[Any]:
        """Let a call wait no longer, as its answer is found or nobody wants it; return the future of its answer."""
        waiter.timer.cancel()
        waiting = self._waiters.get(waiter.partition, {})
        if waiting.pop(waiter, 0) is None and not waiting:
            del self._waiters[waiter.partition]
        if waiter.claim is not None:
            self._table.claims.withdraw(waiter.claim)
            self._claims.pop(waiter.claim, None)
        return waiter.future


def give(found: Found, pending: asyncio.Future[None] | None, *, broken: Callable[[OSError], AsyncFlowError]) -> None:
    """Answer calls once the ledger is ``pending`` no more. broken: gives what those hear whose ledger failed."""
    if pending is not None and not pending.done():
        pending.add_done_callback(lambda done: give(found, done, broken=broken))
        return
    failure = pending.exception() if pending is not None else None
    for future, answer in found:
        if not future.done():
            _tell(future, broken(failure) if isinstance(failure, OSError) else answer)


def refuse(found: Found, error: AsyncFlowError) -> None:
    """Answer calls with ``error``."""
    for future, _ in found:
        if not future.done():
            _tell(future, error)


def _tell(future: asyncio.Future[Any], answer: Any) -> None:
    if isinstance(answer, AsyncFlowError):
        future.set_exception(answer)
    else:
        future.set_result(answer)
