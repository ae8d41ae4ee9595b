"""Calls that are parked: those that cannot be answered before their partition has changed, or their time is over.

Invariants: nothing polls; a call is tried again only when its partition was touched; whose answer was found, or whose
time is over, waits no longer, and nobody is answered twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from asyncflow.errors import AsyncFlowError
from asyncflow.net.deadlines import Deadline, Deadlines
from asyncflow.net.later import Later
from asyncflow.queue.protocol.calls import Claimed
from asyncflow.queue.table.claims import Claim
from asyncflow.queue.table.feed import FEED
from asyncflow.queue.table.table import Table

T = TypeVar("T")
Found: TypeAlias = list[tuple[Later[Any], Any]]
"""Calls, and the answer of each; an error is an answer too."""


@dataclass(slots=True, eq=False)
class _Waiter:
    """A call. attempt: gives its answer, or None as long as there is none; deadline: of its wait."""

    partition: str
    attempt: Callable[[], Any]
    deadline: Deadline
    later: Later[Any]


class Parking:
    """The parked calls of a controller. now: its clock; give: gives the answers of those whose time is over."""

    def __init__(self, table: Table, *, now: Callable[[], float], give: Callable[[Found], None]) -> None:
        self._table = table
        self._now = now
        self._give = give
        self._waiters: dict[str, dict[_Waiter, None]] = {}
        self._claims: dict[Claim, tuple[_Waiter, list[str]]] = {}
        self._deadlines = Deadlines()

    def __len__(self) -> int:
        return sum(map(len, self._waiters.values()))

    def park(
        self, partition: str, attempt: Callable[[], T | None], wait_s: float, otherwise: Callable[[], T]
    ) -> Later[T]:
        """Have what ``attempt`` gives when the partition has changed; ``otherwise`` after ``wait_s``."""
        return self._wait(partition, attempt, wait_s, otherwise).later

    def park_claim(
        self, claim: Claim, ended: Callable[[], Claimed | None], wait_s: float, late: list[str]
    ) -> Later[Claimed]:
        """Have what ``claim`` is granted, or what ``ended`` gives; nothing after ``wait_s``. late: see ``Claimed``."""
        self._table.claims.park(claim)

        def nothing() -> Claimed:
            self._table.claims.withdraw(claim)
            return Claimed(None, False, late)

        waiter = self._wait(claim.partition, ended, wait_s, nothing)
        self._claims[claim] = (waiter, late)

        def forget(_: object) -> None:
            self._table.claims.withdraw(claim)
            del self._claims[claim]

        waiter.later.add_done_callback(forget)
        return waiter.later

    def withdraw(self, worker: str, ticket: str) -> None:
        """Answer a claim without rows, if it is parked."""
        for claim, (waiter, late) in self._claims.items():
            if (claim.worker, claim.ticket) == (worker, ticket):
                self._give([(self._leave(waiter), Claimed(None, False, late, withdrawn=True))])
                return

    def take_found(self) -> Found:
        """Take the calls that can be answered now."""
        books = self._table.books
        found: Found = []
        if not self._waiters.keys().isdisjoint(books.touched):
            for claim, lot in self._table.claims.serve(self._now()):
                waiter, late = self._claims[claim]
                found.append((self._leave(waiter), Claimed(lot.shrunk(), False, late)))
            for partition in (*(self._waiters.keys() & books.touched), FEED):
                for waiter in list(self._waiters.get(partition, ())):
                    try:
                        answer = waiter.attempt()
                    except AsyncFlowError as error:
                        answer = error
                    if answer is not None:
                        found.append((self._leave(waiter), answer))
        books.touched.clear()
        return found

    def close(self) -> None:
        """End no wait any more."""
        self._deadlines.close()

    def _wait(self, partition: str, attempt: Callable[[], Any], wait_s: float, otherwise: Callable[[], Any]) -> _Waiter:
        later: Later[Any] = Later()
        over = self._deadlines.add(self._now() + wait_s, lambda: self._give([(self._leave(waiter), otherwise())]))
        waiter = _Waiter(partition, attempt, over, later)
        self._waiters.setdefault(partition, {})[waiter] = None
        later.add_done_callback(lambda _: self._leave(waiter))
        return waiter

    def _leave(self, waiter: _Waiter) -> Later[Any]:
        """Let a call wait no longer, as its answer is found or nobody wants it; give what will have the answer."""
        self._deadlines.drop(waiter.deadline)
        waiting = self._waiters.get(waiter.partition, {})
        if waiting.pop(waiter, 0) is None and not waiting:
            del self._waiters[waiter.partition]
        return waiter.later


def give(found: Found, pending: asyncio.Future[None] | None, *, broken: Callable[[OSError], AsyncFlowError]) -> None:
    """Answer calls once the ledger is ``pending`` no more. broken: gives what those hear whose ledger failed."""
    if pending is not None and not pending.done():
        pending.add_done_callback(lambda done: give(found, done, broken=broken))
        return
    failure = pending.exception() if pending is not None else None
    for later, answer in found:
        if not later.done():
            _tell(later, broken(failure) if isinstance(failure, OSError) else answer)


def refuse(found: Found, error: AsyncFlowError) -> None:
    """Answer calls with ``error``."""
    for later, _ in found:
        if not later.done():
            _tell(later, error)


def _tell(later: Later[Any], answer: Any) -> None:
    if isinstance(answer, AsyncFlowError):
        later.set_exception(answer)
    else:
        later.set_result(answer)
