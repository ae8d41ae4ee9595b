"""Permits of a staggered update as a service of whoever serves the catalogue: ``weights.permit``, which waits, and
``weights.changed``.

Rollouts share the permits of their job, the followers of one WeightSync, a *fleet*, those of that.

Invariants: an instance that is granted a permit has it until it says that its weights are changed, or is gone; one that
asks again after an answer was lost is told the same; a driver that was restarted knows of no permit, and grants new
ones. A permit whose end could not be reported costs nobody more than the patience of ``flow.stagger``. A follower that
gets no answer any more, because what it follows is over, changes its weights in its turn all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from asyncflow.api.names import FOLLOWER
from asyncflow.errors import AsyncFlowError, Refused
from asyncflow.flow.stagger import FollowerFleet, Permits, Supply
from asyncflow.identity import Version
from asyncflow.rpc.access import place_of
from asyncflow.rpc.membership import Membership
from asyncflow.rpc.retry import Outage, retry
from asyncflow.rpc.server import RpcServer

log = logging.getLogger(__name__)

_WAIT_S = 10.0
_CALL_S = 10.0
_UNHEARD_S = (60.0, 300.0)
"""Seconds, drawn from between these, after which a follower goes on by itself where nobody has told it its turn."""


class PermitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request of ``weights.permit``. version: packed, of the weights that the worker has loaded.

    Of a follower, fleet: name of the WeightSync that it follows by; stagger: most of these that change weights at once,
    as that says.
    """

    worker: str
    version: int
    fleet: str = ""
    stagger: int | None = None


class PermitReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to ``weights.permit``: False where the worker is to ask again.

    alone_s: seconds from now after which it may go on by itself if it gets no answer any more.
    """

    granted: bool
    alone_s: float = 0.0


class WeightsChanged(msgspec.Struct, frozen=True, kw_only=True):
    """Request of ``weights.changed``: a worker has changed its weights, or does not want to any more."""

    worker: str


class WeightsChangedReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to ``weights.changed``."""


class _Group:
    """Workers that share permits. supply: what is known now, None for a fleet; members: those that have asked and are
    there; stagger: of a fleet, most that change weights at once.
    """

    def __init__(self, permits: Permits, *, supply: Callable[[], Supply] | None = None) -> None:
        self.permits = permits
        self.members: set[str] = set()
        self.asking: dict[str, asyncio.Future[None]] = {}
        self.stagger: int | None = None
        self._supply = supply

    def alone_s(self, worker: str) -> float:
        """Return after how many seconds a worker of a fleet may go on by itself; 0 for one of the job."""
        rank = sum(other < worker for other in self.members)
        return self.permits.alone_s(rank, self._fleet) if self._supply is None else 0.0

    @property
    def _fleet(self) -> FollowerFleet:
        return FollowerFleet(size=len(self.members), stagger=self.stagger)

    def look(self, *, now: float) -> None:
        """Grant what may be granted now."""
        supply = self._fleet if self._supply is None else self._supply()
        for worker in self.permits.grant(supply, now=now):
            log.debug("%s may change its weights; %d do", worker, len(self.permits.out))
            if (asking := self.asking.pop(worker, None)) is not None and not asking.done():
                asking.set_result(None)

    def leave(self, worker: str, *, now: float) -> None:
        """Forget a worker."""
        self.members.discard(worker)
        self.permits.leave(worker)
        self.look(now=now)


class PermitService:
    """Grants permits on ``server``; must be made before the server starts.

    permits, supply: of the job's rollouts, and what is known now; None where these change weights when they can.
    """

    def __init__(
        self, server: RpcServer, *, permits: Permits | None = None, supply: Callable[[], Supply] | None = None
    ) -> None:
        self._rollouts = None if permits is None else _Group(permits, supply=supply)
        self._fleets: dict[str, _Group] = {}
        self._now = asyncio.get_running_loop().time
        server.route("weights.permit", PermitRequest, self._permit)
        server.route("weights.changed", WeightsChanged, self._changed)

    def look(self) -> None:
        """Grant what may be granted now; to be called when the supply has changed."""
        if self._rollouts is not None:
            self._rollouts.look(now=self._now())

    def leave(self, worker: str) -> None:
        """Forget a worker that is gone."""
        for group in self._with(worker):
            group.leave(worker, now=self._now())
        self._fleets = {name: group for name, group in self._fleets.items() if group.members}

    def _with(self, worker: str) -> list[_Group]:
        groups = [*([self._rollouts] if self._rollouts is not None else []), *self._fleets.values()]
        return [group for group in groups if worker in group.members]

    def _group_of(self, request: PermitRequest) -> _Group:
        """Return those with whom a worker shares permits. Raises Refused where it needs none."""
        place = place_of(request.worker)
        if place is not None and place[0] == FOLLOWER:
            group = self._fleets.setdefault(request.fleet, _Group(Permits()))
            group.stagger = request.stagger
            return group
        if self._rollouts is None:
            raise Refused("this job's rollouts change weights when they can", where=f"permit of {request.worker}")
        return self._rollouts

    async def _permit(self, request: PermitRequest, _frames: Sequence[memoryview]) -> PermitReply:
        worker, group = request.worker, self._group_of(request)
        asking = group.asking[worker] = asyncio.get_running_loop().create_future()
        group.members.add(worker)
        group.permits.ask(worker, version=request.version, now=self._now())
        group.look(now=self._now())
        try:
            async with asyncio.timeout(_WAIT_S):
                await asking
        except TimeoutError:
            return PermitReply(granted=False, alone_s=group.alone_s(worker))
        finally:
            if group.asking.get(worker) is asking:
                del group.asking[worker]
                group.permits.withdraw(worker)
        return PermitReply(granted=True)

    async def _changed(self, request: WeightsChanged, _frames: Sequence[memoryview]) -> WeightsChangedReply:
        for group in self._with(request.worker):
            group.permits.end(request.worker, now=self._now())
            group.look(now=self._now())
        return WeightsChangedReply()


class SwapPermits:
    """The permits of one worker. membership: gives the client to the driver, or to the publisher; worker: its id.

    Of a follower, fleet: name of its WeightSync; stagger: most that change weights at once, as that says. waiting:
    whether a permit is waited for.
    """

    def __init__(self, *, membership: Membership, worker: str, fleet: str = "", stagger: int | None = None) -> None:
        self.waiting = False
        self._driver = membership.driver
        self._worker = worker
        self._fleet = fleet
        self._stagger = stagger
        self._outage = Outage("asking for a permit to change weights")

    @contextlib.asynccontextmanager
    async def permit(self, version: Version) -> AsyncIterator[None]:
        """Hold a permit, from ``take`` to ``give_back``."""
        await self.take(version)
        yield
        await self.give_back()

    async def take(self, version: Version) -> None:
        """Wait for a permit, however long; version: that of the weights that are loaded.

        A follower that gets no answer any more goes on by itself in its turn, as it was told last.
        """
        self.waiting = True
        try:
            await self._granted(version)
        finally:
            self.waiting = False

    async def give_back(self) -> None:
        """Say that the weights are changed, again where no answer comes."""
        said = WeightsChanged(worker=self._worker)

        async def say() -> None:
            await self._driver.call("weights.changed", said, WeightsChangedReply, timeout=_CALL_S)

        try:
            await retry(say, what="saying that the weights are changed", timeout=_CALL_S)
        except AsyncFlowError as error:
            log.warning("the driver does not hear that the weights are changed: %s", error)

    async def _granted(self, version: Version) -> None:
        now = asyncio.get_running_loop().time
        heard, alone_s = now(), random.uniform(*_UNHEARD_S)
        request = PermitRequest(worker=self._worker, version=version.packed, fleet=self._fleet, stagger=self._stagger)
        while True:
            try:
                reply = await self._driver.call("weights.permit", request, PermitReply, timeout=_WAIT_S + _CALL_S)
            except AsyncFlowError as error:
                if self._fleet and now() - heard >= alone_s:
                    log.warning("nobody answers who may change weights; it is this one's turn: %s", error)
                    return
                await self._outage.wait(error)
                continue
            self._outage.end()
            if reply.granted:
                return
            heard, alone_s = now(), reply.alone_s
