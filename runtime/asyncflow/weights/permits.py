"""Service of the permits of a staggered update: ``weights.permit``, which waits, and ``weights.changed``.

The rollouts of a job share its permits. The followers of one WeightSync, a *fleet*, share permits of their own.

Invariants: an instance keeps its permit until it reports that it has changed its weights, or until it leaves. Only a
member of the directory is granted one: a request that arrives after its sender has left would hold it for nobody. An
instance that repeats a request after a lost reply receives the same reply. A restarted driver knows no permits and
grants new ones. A permit whose end could not be reported delays other instances at most for the patience of
``flow.stagger``. A follower that receives no more replies, because its job has ended, still changes its weights in
its turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from asyncflow.api.names import FOLLOWER
from asyncflow.errors import AsyncFlowError, PeerLost, Refused
from asyncflow.flow.stagger import FollowerFleet, Permits, Supply
from asyncflow.identity import Version
from asyncflow.rpc.access import place_of
from asyncflow.rpc.directory import Directory
from asyncflow.rpc.membership import Membership
from asyncflow.rpc.retry import Outage, retry
from asyncflow.rpc.server import RpcServer

log = logging.getLogger(__name__)

_WAIT_S = 10.0
_CALL_S = 10.0
_NO_REPLY_S = (60.0, 300.0)
"""Range of the random number of seconds after which a follower that never gets a reply proceeds without a permit."""


class PermitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request of ``weights.permit``. version: packed, of the weights that the worker has loaded.

    For a follower, fleet: name of its WeightSync; stagger: the WeightSync's limit of simultaneous weight changes.
    """

    worker: str
    version: int
    fleet: str = ""
    stagger: int | None = None


class PermitReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to ``weights.permit``. granted: False if the worker must ask again.

    alone_s: seconds from now after which it may change weights without a permit, if it receives no more replies.
    """

    granted: bool
    alone_s: float = 0.0


class WeightsChanged(msgspec.Struct, frozen=True, kw_only=True):
    """Request of ``weights.changed``: a worker has changed its weights, or no longer wants to."""

    worker: str


class WeightsChangedReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to ``weights.changed``."""


class _Group:
    """Workers that share permits.

    supply: returns the current figures of the job, None for a fleet; members: workers that have requested a permit and
    have not left; stagger: for a fleet, limit of simultaneous weight changes.
    """

    def __init__(self, permits: Permits, *, supply: Callable[[], Supply] | None = None) -> None:
        self.permits = permits
        self.members: set[str] = set()
        self.asking: dict[str, asyncio.Future[None]] = {}
        self.stagger: int | None = None
        self._supply = supply

    def alone_s(self, worker: str) -> float:
        """Return the seconds after which a follower may proceed without a permit; 0 for a worker of the job."""
        rank = sum(other < worker for other in self.members)
        return self.permits.alone_s(rank, self._fleet) if self._supply is None else 0.0

    @property
    def _fleet(self) -> FollowerFleet:
        return FollowerFleet(size=len(self.members), stagger=self.stagger)

    def look(self, *, now: float) -> None:
        """Grant every permit that is allowed now."""
        supply = self._fleet if self._supply is None else self._supply()
        for worker in self.permits.grant(supply, now=now):
            log.debug("%s may change its weights; %d workers hold a permit", worker, len(self.permits.granted))
            if (asking := self.asking.pop(worker, None)) is not None and not asking.done():
                asking.set_result(None)

    def leave(self, worker: str, *, now: float) -> None:
        """Remove a worker."""
        self.members.discard(worker)
        self.permits.leave(worker)
        self.look(now=now)


class PermitService:
    """Grants permits to the members of ``directory`` on ``server``; must be created before the server starts.

    permits, supply: permits of the job's rollouts, and a function that returns the current figures; None if rollouts
    change weights without permits.
    """

    def __init__(
        self,
        server: RpcServer,
        *,
        directory: Directory,
        permits: Permits | None = None,
        supply: Callable[[], Supply] | None = None,
    ) -> None:
        self._directory = directory
        self._rollouts = None if permits is None else _Group(permits, supply=supply)
        self._fleets: dict[str, _Group] = {}
        self._now = asyncio.get_running_loop().time
        directory.on_leave.append(lambda member, _reason: self._leave(member.incarnation))
        server.route("weights.permit", PermitRequest, self._permit)
        server.route("weights.changed", WeightsChanged, self._changed)

    def look(self) -> None:
        """Grant every permit that is allowed now. Call it when the supply has changed."""
        if self._rollouts is not None:
            self._rollouts.look(now=self._now())

    def _leave(self, worker: str) -> None:
        for group in self._with(worker):
            group.leave(worker, now=self._now())
        self._fleets = {name: group for name, group in self._fleets.items() if group.members}

    def _with(self, worker: str) -> list[_Group]:
        groups = [*([self._rollouts] if self._rollouts is not None else []), *self._fleets.values()]
        return [group for group in groups if worker in group.members]

    def _group_of(self, request: PermitRequest) -> _Group:
        """Return the group in which a worker shares permits. Raises Refused if the worker needs no permit."""
        place = place_of(request.worker)
        if place is not None and place[0] == FOLLOWER:
            group = self._fleets.setdefault(request.fleet, _Group(Permits()))
            group.stagger = request.stagger
            return group
        if self._rollouts is None:
            raise Refused("this job's rollouts change weights without permits", where=f"permit of {request.worker}")
        return self._rollouts

    async def _permit(self, request: PermitRequest, _frames: Sequence[memoryview]) -> PermitReply:
        worker = request.worker
        if self._directory.member(worker) is None:
            hint = "It registers again automatically"
            raise PeerLost(f"{worker} is not registered", where="weight permits", hint=hint)
        group = self._group_of(request)
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
    """Client of the permit service for one worker.

    membership: provides the client to the driver or to the publisher; worker: the worker's id.
    For a follower, fleet: name of its WeightSync; stagger: the WeightSync's limit of simultaneous weight changes.
    waiting: whether the worker is waiting for a permit.
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
        """Hold a permit inside the context: ``take`` at its start, ``give_back`` at its end."""
        await self.take(version)
        yield
        await self.give_back()

    async def take(self, version: Version) -> None:
        """Wait for a permit, without a limit. version: of the loaded weights.

        A follower that receives no more replies proceeds when its turn comes, as the last reply says.
        """
        self.waiting = True
        try:
            await self._granted(version)
        finally:
            self.waiting = False

    async def give_back(self) -> None:
        """Report that the weights are changed, with retries."""
        request = WeightsChanged(worker=self._worker)

        async def report() -> None:
            await self._driver.call("weights.changed", request, WeightsChangedReply, timeout=_CALL_S)

        try:
            await retry(report, what="reporting that the weights are changed", timeout=_CALL_S)
        except AsyncFlowError as error:
            log.warning("could not report to the driver that the weights are changed: %s", error)

    async def _granted(self, version: Version) -> None:
        now = asyncio.get_running_loop().time
        replied, alone_s = now(), random.uniform(*_NO_REPLY_S)
        request = PermitRequest(worker=self._worker, version=version.packed, fleet=self._fleet, stagger=self._stagger)
        while True:
            try:
                reply = await self._driver.call("weights.permit", request, PermitReply, timeout=_WAIT_S + _CALL_S)
            except AsyncFlowError as error:
                if self._fleet and now() - replied >= alone_s:
                    log.warning("no reply to permit requests; this follower changes its weights now: %s", error)
                    return
                await self._outage.wait(error)
                continue
            self._outage.end()
            if reply.granted:
                return
            replied, alone_s = now(), reply.alone_s
