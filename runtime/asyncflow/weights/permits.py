"""Permits of a staggered update as a service of the driver: ``weights.permit``, which waits, and ``weights.changed``.

Invariants: an instance that is granted a permit has it until it says that its weights are changed, or is gone; one that
asks again after an answer was lost is told the same; a driver that was restarted knows of no permit, and grants new
ones. A permit whose end could not be reported costs nobody more than the patience of ``flow.stagger``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from asyncflow.errors import AsyncFlowError
from asyncflow.flow.stagger import Permits, Supply
from asyncflow.identity import Version
from asyncflow.rpc.retry import Outage
from asyncflow.rpc.server import RpcServer
from asyncflow.weights.holder import Linked

log = logging.getLogger(__name__)

_WAIT_S = 10.0
_CALL_S = 10.0


class PermitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request of ``weights.permit``. version: packed, of the weights that the worker has loaded."""

    worker: str
    version: int


class PermitReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to ``weights.permit``: False where the worker is to ask again."""

    granted: bool


class WeightsChanged(msgspec.Struct, frozen=True, kw_only=True):
    """Request of ``weights.changed``: a worker has changed its weights, or does not want to any more."""

    worker: str


class WeightsChangedReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to ``weights.changed``."""


class PermitService:
    """Grants permits on the driver's ``server``; must be made before the server starts. supply: what is known now."""

    def __init__(self, server: RpcServer, *, permits: Permits, supply: Callable[[], Supply]) -> None:
        self._permits = permits
        self._supply = supply
        self._asking: dict[str, asyncio.Future[None]] = {}
        self._now = asyncio.get_running_loop().time
        server.route("weights.permit", PermitRequest, self._permit)
        server.route("weights.changed", WeightsChanged, self._changed)

    def look(self) -> None:
        """Grant what may be granted now; to be called when the supply has changed."""
        for worker in self._permits.grant(self._supply(), now=self._now()):
            log.info("%s may change its weights; %d do", worker, len(self._permits.out))
            if (asking := self._asking.pop(worker, None)) is not None and not asking.done():
                asking.set_result(None)

    def leave(self, worker: str) -> None:
        """Forget a worker that is gone."""
        self._permits.leave(worker)
        self.look()

    async def _permit(self, request: PermitRequest, _frames: Sequence[memoryview]) -> PermitReply:
        worker = request.worker
        asking = self._asking[worker] = asyncio.get_running_loop().create_future()
        self._permits.ask(worker, version=request.version, now=self._now())
        self.look()
        try:
            async with asyncio.timeout(_WAIT_S):
                await asking
        except TimeoutError:
            return PermitReply(granted=False)
        finally:
            if self._asking.get(worker) is asking:
                del self._asking[worker]
                self._permits.withdraw(worker)
        return PermitReply(granted=True)

    async def _changed(self, request: WeightsChanged, _frames: Sequence[memoryview]) -> WeightsChangedReply:
        self._permits.end(request.worker, now=self._now())
        self.look()
        return WeightsChangedReply()


class SwapPermits:
    """The permits of one worker. membership: gives the client to the driver; worker: its id."""

    def __init__(self, *, membership: Linked, worker: str) -> None:
        self._driver = membership.driver
        self._worker = worker
        self._outage = Outage("asking for a permit to change weights")

    @contextlib.asynccontextmanager
    async def permit(self, version: Version) -> AsyncIterator[None]:
        """Hold a permit, which is waited for, however long; version: that of the weights that are loaded."""
        while not await self._asked(version):
            pass
        yield
        try:
            await self._driver.call(
                "weights.changed", WeightsChanged(worker=self._worker), WeightsChangedReply, timeout=_CALL_S
            )
        except AsyncFlowError as error:
            log.warning("the driver does not hear that the weights are changed: %s", error)

    async def _asked(self, version: Version) -> bool:
        request = PermitRequest(worker=self._worker, version=version.packed)
        try:
            reply = await self._driver.call("weights.permit", request, PermitReply, timeout=_WAIT_S + _CALL_S)
        except AsyncFlowError as error:
            await self._outage.wait(error)
            return False
        self._outage.end()
        return reply.granted
