"""Engines that follow over real sockets: how many of a fleet change weights at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import numpy as np
import pytest

from asyncflow.api.weights import WeightSync
from asyncflow.identity import Version
from asyncflow.rollout.following import FollowingEngine
from asyncflow.rollout.loading import EXACT, WeightLoader
from asyncflow.rpc.directory import Directory
from asyncflow.rpc.membership import Member, Membership
from asyncflow.rpc.server import RpcServer
from asyncflow.telemetry.metrics import FollowerMetrics
from asyncflow.telemetry.spans import NO_SPANS
from asyncflow.weights.follower import Follower
from asyncflow.weights.host_transport import HostTransport
from asyncflow.weights.permits import PermitService
from asyncflow.weights.sender import WeightSender
from asyncflow.weights.service import CatalogueService

SIZE = 4
SOON = 30.0


class Engine:
    """An engine that stands still while it changes weights, until ``together`` have done so at once.

    out: those that do so now; most: the most there were.
    """

    out: set[Engine]
    most: int = 0
    together: int = 1
    spans = NO_SPANS

    def __init__(self) -> None:
        self.version: Version | None = None

    async def ended(self) -> None:
        await asyncio.Event().wait()

    async def stage(self, version: Version, weights: object) -> None:
        del version, weights

    async def load(self, version: Version, weights: object) -> None:
        del weights
        serves = self.version is not None
        if serves:
            Engine.out.add(self)
            Engine.most = max(Engine.most, len(Engine.out))
            await asyncio.sleep(0.2)
            while Engine.most < Engine.together:
                await asyncio.sleep(0.01)
        Engine.out.discard(self)
        self.version = version


class Publisher:
    """A publisher: directory, catalogue, permits and a sender. newer(): publishes the next version."""

    def __init__(self, sender: WeightSender, address: str) -> None:
        self.address = address
        self._sender = sender
        self._step = -1

    async def newer(self) -> Version:
        self._step += 1
        await self._sender.publish(Version(0, self._step), {"w": np.full(64, self._step, np.float32)}, timeout=SOON)
        return Version(0, self._step)


@pytest.fixture
async def publisher() -> AsyncIterator[Publisher]:
    Engine.out, Engine.most, Engine.together = set(), 0, 1
    async with contextlib.AsyncExitStack() as stack:
        server, directory = RpcServer(name="driver"), Directory()
        directory.attach(server)
        catalogue, permits = CatalogueService(server, directory=directory), PermitService(server)
        catalogue.require(())
        directory.on_leave.append(lambda member, _: permits.leave(member.incarnation))
        address = await server.start()
        stack.push_async_callback(server.close)
        stack.push_async_callback(directory.close)
        member = Member(role="publisher", index=0, incarnation="trainer")
        membership = Membership(driver=address, member=member)
        await membership.join(SOON)
        stack.push_async_callback(membership.close)
        sender = WeightSender(membership=membership, worker="trainer", transport=HostTransport(name="trainer"))
        await sender.start()
        stack.push_async_callback(sender.close)
        yield Publisher(sender, address)


def following(engine: Engine, address: str, sync: WeightSync) -> FollowingEngine:
    def join(status):
        follower = Follower(driver=address, transport=HostTransport(name="f"), status=status)
        loader = WeightLoader(follower.receiver, engine, metrics=FollowerMetrics(), probe_gap=EXACT)
        return follower, loader, follower.permits(sync)

    return FollowingEngine(engine, join=join, join_s=SOON)


@contextlib.asynccontextmanager
async def fleet(publisher: Publisher, **spec: object) -> AsyncIterator[list[Engine]]:
    sync = WeightSync.model_validate({"metadata": {"name": "fleet"}, "spec": {"source": {"job": "math"}, **spec}})
    engines = [Engine() for _ in range(SIZE)]
    tasks = [asyncio.create_task(following(engine, publisher.address, sync).run()) for engine in engines]
    try:
        yield engines
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until_served(engines: list[Engine], version: Version) -> None:
    async with asyncio.timeout(SOON):
        while any(engine.version != version for engine in engines):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("spec", "most"),
    [
        ({"update": "staggered"}, 1),
        ({"update": "staggered", "stagger": 2}, 2),
        ({"update": "staggered", "stagger": SIZE}, SIZE - 1),
    ],
)
async def test_of_a_staggered_fleet_one_goes_on_serving_whatever_the_stagger(publisher, spec, most):
    async with fleet(publisher, **spec) as engines:
        await until_served(engines, await publisher.newer())
        for _ in range(2):
            await until_served(engines, await publisher.newer())
    assert 1 <= Engine.most <= most


async def test_a_fleet_that_is_not_staggered_changes_weights_when_it_can(publisher):
    async with fleet(publisher, update="delayed") as engines:
        await until_served(engines, await publisher.newer())
        Engine.together = SIZE
        await until_served(engines, await publisher.newer())


async def test_one_that_waits_loads_what_is_newest_when_its_turn_comes(publisher):
    async with fleet(publisher, update="staggered") as engines:
        await until_served(engines, await publisher.newer())
        versions = [await publisher.newer() for _ in range(3)]
        await until_served(engines, versions[-1])
