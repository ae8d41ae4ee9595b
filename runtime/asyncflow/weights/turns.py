"""Turns of a staggered update as a service of the driver: ``weights.turn``, which waits, and ``weights.turned``.

Invariants: an instance that is told to take its turn has it until it says that it is over, or is gone; one that asks
again after an answer was lost is told the same; a driver that was restarted knows of no turn, and grants new ones. A
turn that could not be reported costs nobody more than the patience of ``flow.stagger``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from asyncflow.errors import AsyncFlowError
from asyncflow.flow.stagger import Supply, Turns
from asyncflow.identity import Version
from asyncflow.rpc.retry import Outage
from asyncflow.rpc.server import RpcServer
from asyncflow.weights.holder import Linked

log = logging.getLogger(__name__)

_WAIT_S = 10.0
_CALL_S = 10.0


class TurnRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request of ``weights.turn``. version: packed, of the weights that the worker has loaded."""

    worker: str
    version: int


class TurnReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to ``weights.turn``: False where the worker is to ask again."""

    granted: bool


class TurnEnded(msgspec.Struct, frozen=True, kw_only=True):
    """Request of ``weights.turned``: a worker has changed its weights, or does not want to any more."""

    worker: str


class TurnEndedReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to ``weights.turned``."""


class TurnService:
    """Grants turns on the driver's ``server``; must be made before the server starts. supply: what is known now."""

    def __init__(self, server: RpcServer, *, turns: Turns, supply: Callable[[], Supply]) -> None:
        self._turns = turns
        self._supply = supply
        self._asking: dict[str, asyncio.Future[None]] = {}
        self._now = asyncio.get_running_loop().time
        server.route("weights.turn", TurnRequest, self._turn)
        server.route("weights.turned", TurnEnded, self._turned)

    def look(self) -> None:
        """Grant what may be granted now; to be called when the supply has changed."""
        for worker in self._turns.grant(self._supply(), now=self._now()):
            log.info("%s may change its weights; %d do", worker, len(self._turns.out))
            if (asking := self._asking.pop(worker, None)) is not None and not asking.done():
                asking.set_result(None)

    def leave(self, worker: str) -> None:
        """Forget a worker that is gone."""
        self._turns.leave(worker)
        self.look()

    async def _turn(self, request: TurnRequest, _frames: Sequence[memoryview]) -> TurnReply:
        worker = request.worker
        asking = self._asking[worker] = asyncio.get_running_loop().create_future()
        self._turns.ask(worker, version=request.version, now=self._now())
        self.look()
        try:
            async with asyncio.timeout(_WAIT_S):
                await asking
        except TimeoutError:
            return TurnReply(granted=False)
        finally:
            if self._asking.get(worker) is asking:
                del self._asking[worker]
                self._turns.withdraw(worker)
        return TurnReply(granted=True)

    async def _turned(self, request: TurnEnded, _frames: Sequence[memoryview]) -> TurnEndedReply:
        self._turns.end(request.worker, now=self._now())
        self.look()
        return TurnEndedReply()


class SwapTurns:
    """The turns of one worker. membership: gives the client to the driver; worker: its id."""

    def __init__(self, *, membership: Linked, worker: str) -> None:
        self._driver = membership.driver
        self._worker = worker
        self._outage = Outage("asking for a turn to change weights")

    @contextlib.asynccontextmanager
    async def turn(self, version: Version) -> AsyncIterator[None]:
        """Have a turn, which is waited for, however long; version: that of the weights that are loaded."""
        while not await self._asked(version):
            pass
        yield
        try:
            await self._driver.call("weights.turned", TurnEnded(worker=self._worker), TurnEndedReply, timeout=_CALL_S)
        except AsyncFlowError as error:
            log.warning("the driver does not hear that a turn to change weights is over: %s", error)

    async def _asked(self, version: Version) -> bool:
        request = TurnRequest(worker=self._worker, version=version.packed)
        try:
            reply = await self._driver.call("weights.turn", request, TurnReply, timeout=_WAIT_S + _CALL_S)
        except AsyncFlowError as error:
            await self._outage.wait(error)
            return False
        self._outage.end()
        return reply.granted
