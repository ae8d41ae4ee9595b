"""What a unit tells the controller in a session: which rows were lost, what shards have admitted, and puts.

Puts that come while one call is under way go together with the next.

Invariants: one call at a time; the controller hears of a put until it has decided, in the order in which they were
stored; it hears of every row that was lost until it has answered, because it takes a row for held of which a put has
told it; it hears of what shards have admitted after that was admitted, and the unit keeps no more than ``_NEWS`` of it
before it tells everything anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TypeVar

from msgspec import Struct

from asyncflow.errors import AsyncFlowError, PeerLost
from asyncflow.net.rpc import RpcClient
from asyncflow.queue.protocol.calls import Done
from asyncflow.queue.protocol.unit_calls import Admit, Admitted, LostRows, NewCells, Session
from asyncflow.queue.unit.holdings import Holdings
from asyncflow.queue.unit.pieces import Put

R = TypeVar("R", bound=Struct)

_CALL_S = 10.0
_ROWS = 2000
_PUTS = 500
_NEWS = 10_000


class Telling:
    """Tells it on, whenever there is a session."""

    def __init__(self, *, controller: RpcClient, holdings: Holdings) -> None:
        self.session: Session | None = None
        self._controller = controller
        self._holdings = holdings
        self._news: list[NewCells] = []
        self._forgot = False
        self._lost: dict[int, None] = {}
        self._broken: asyncio.Future[None] | None = None
        self._asks = False

    @property
    def has_news(self) -> bool:
        """Whether shards have admitted what the controller has not heard yet."""
        return bool(self._news)

    def forget_lost(self) -> None:
        """Tell no more of rows that were lost: the unit has others now."""
        self._lost.clear()

    async def prepare(self, session: Session) -> None:
        """Tell of what was put before the session: what it changed is part of what the unit holds."""
        self._forgot = False
        while told := self._untold(session):
            admit, puts = told
            self._decide(admit, puts, await self._controller.call("units.admit", admit, Admitted, timeout=_CALL_S))

    def begin(self, session: Session) -> asyncio.Future[None]:
        """Tell on from now; give what fails when that cannot go on. Raises PeerLost where all must be told anew."""
        if self._forgot:
            raise _too_much()
        self._broken = asyncio.get_running_loop().create_future()
        self.session, self._asks = session, False
        self.tell_on()
        return self._broken

    def end(self) -> None:
        """Tell no more until the next session begins."""
        self.session = self._broken = None

    def lose(self, rows: Iterable[int]) -> None:
        """Have the controller know that the bytes of ``rows`` are gone."""
        self._lost.update(dict.fromkeys(rows))
        self.tell_on()

    def bring(self, news: NewCells) -> None:
        """Have the controller know what a shard has admitted."""
        self._news.append(news)
        if len(self._news) > _NEWS:
            self._news.clear()
            self._forgot = True
            self._break(_too_much())
        self.tell_on()

    def tell_on(self) -> None:
        """Tell of what is not decided yet, unless the answer to an earlier call will do so."""
        session = self.session
        if session is None or self._asks:
            return
        if lost := list(islice(self._lost, _ROWS)):
            self._ask("units.lost", LostRows(session, lost), Done, lambda _: self._heard(lost))
        elif told := self._untold(session):
            admit, puts = told
            self._ask("units.admit", admit, Admitted, lambda admitted: self._decide(admit, puts, admitted))

    def _untold(self, session: Session) -> tuple[Admit, list[Put]] | None:
        """Return what is to be told next: what shards have admitted, then puts; None where there is nothing."""
        if not self._holdings.puts and not self._news:
            return None
        puts = list(islice((put for put in self._holdings.puts if not put.shard), _PUTS))
        news = self._news[:_PUTS]
        return (Admit(session, [*news, *[put.entry for put in puts]]), puts) if news or puts else None

    def _ask(self, method: str, request: Struct, reply: type[R], answered: Callable[[R], None]) -> None:
        session, self._asks = self.session, True

        def done(answer: R | AsyncFlowError) -> None:
            if self.session is not session:
                return
            self._asks = False
            if isinstance(answer, AsyncFlowError):
                self._break(answer)
                return
            answered(answer)
            self.tell_on()

        self._controller.ask(method, request, reply, timeout=_CALL_S, done=done)

    def _break(self, why: AsyncFlowError) -> None:
        if self._broken is not None and not self._broken.done():
            self._broken.set_exception(why)

    def _heard(self, lost: Iterable[int]) -> None:
        for row in lost:
            self._lost.pop(row, None)

    def _decide(self, admit: Admit, puts: Sequence[Put], admitted: Admitted) -> None:
        news = len(admit.entries) - len(puts)
        del self._news[:news]
        for put, verdict in zip(puts, admitted.verdicts[news:], strict=True):
            self._holdings.decide(put, verdict)


def _too_much() -> PeerLost:
    return PeerLost("more was admitted than could be kept", where="controller")
