"""Engines, and loops of users, that follow over real sockets: how many of a fleet change weights at once."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from asyncflow.api.load import to_yaml
from asyncflow.api.weights import WeightSync
from asyncflow.errors import ManifestError
from asyncflow.identity import Version
from asyncflow.local.issuer import Issuer
from asyncflow.rollout.following import FollowingEngine
from asyncflow.rollout.loading import EXACT, WeightLoader
from asyncflow.rpc import tls
from asyncflow.rpc.directory import Directory
from asyncflow.rpc.membership import Member, Membership
from asyncflow.rpc.server import RpcServer
from asyncflow.telemetry.metrics import FollowerMetrics
from asyncflow.telemetry.spans import NO_SPANS
from asyncflow.weights.follower import Follower, follow
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
        self.may_stage = asyncio.Event()
        self.may_stage.set()
        self.staged: list[Version] = []

    async def ended(self) -> None:
        await asyncio.Event().wait()

    async def stage(self, version: Version, weights: object) -> None:
        del weights
        self.staged.append(version)
        await self.may_stage.wait()

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

    def __init__(self, sender: WeightSender, directory: Directory, address: str) -> None:
        self.address = address
        self.directory = directory
        self._sender = sender
        self._step = -1

    async def newer(self) -> Version:
        self._step += 1
        await self._sender.publish(Version(0, self._step), {"w": np.full(64, self._step, np.float32)}, timeout=SOON)
        return Version(0, self._step)


@contextlib.asynccontextmanager
async def publishing(issuer: Issuer | None = None, *, bind: str = "tcp://127.0.0.1:*") -> AsyncIterator[Publisher]:
    credentials = None if issuer is None else issuer.credentials("publisher")
    async with contextlib.AsyncExitStack() as stack:
        server, directory = RpcServer(name="driver", bind=bind, credentials=credentials), Directory()
        directory.attach(server)
        catalogue = CatalogueService(server, directory=directory)
        PermitService(server, directory=directory)
        catalogue.require(())
        address = await server.start()
        stack.push_async_callback(server.close)
        stack.push_async_callback(directory.close)
        member = Member(role="publisher", index=0, incarnation="publisher-0-a")
        membership = Membership(driver=address, member=member, credentials=credentials)
        await membership.join(SOON)
        stack.push_async_callback(membership.close)
        transport = HostTransport(name="publisher", credentials=credentials)
        sender = WeightSender(membership=membership, worker="publisher-0-a", transport=transport)
        await sender.start()
        stack.push_async_callback(sender.close)
        yield Publisher(sender, directory, address)


@pytest.fixture
async def publisher() -> AsyncIterator[Publisher]:
    Engine.out, Engine.most, Engine.together = set(), 0, 1
    async with publishing() as publisher:
        yield publisher


Run = Callable[[Engine, str, WeightSync, Path], Awaitable[None]]


async def an_engine(engine: Engine, address: str, sync: WeightSync, folder: Path) -> None:
    del folder

    def join(status):
        follower = Follower(driver=address, transport=HostTransport(name="f"), status=status, sync=sync)
        loader = WeightLoader(follower.receiver, engine, metrics=FollowerMetrics(), probe_gap=EXACT)
        return follower, loader

    await FollowingEngine(engine, join=join, join_s=SOON).run()


async def a_loop(engine: Engine, address: str, sync: WeightSync, folder: Path) -> None:
    """The code that a user writes whose own engine follows."""
    file = folder / "fleet.yaml"
    file.write_text(to_yaml(sync))
    async with follow(address, sync=file) as versions:
        async for version, tensors in versions:
            assert (tensors["w"] == version.step).all()
            await engine.load(version, tensors)


def sync_of(**spec: object) -> WeightSync:
    return WeightSync.model_validate({"metadata": {"name": "fleet"}, "spec": {"source": {"job": "math"}, **spec}})


@contextlib.asynccontextmanager
async def fleet(publisher: Publisher, run: Run, folder: Path, **spec: object) -> AsyncIterator[list[Engine]]:
    sync = sync_of(**spec)
    engines = [Engine() for _ in range(SIZE)]
    tasks = [asyncio.create_task(run(engine, publisher.address, sync, folder)) for engine in engines]
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


BOTH = pytest.mark.parametrize("run", [an_engine, a_loop])


@BOTH
@pytest.mark.parametrize(
    ("spec", "most"),
    [
        ({"update": "staggered"}, 1),
        ({"update": "staggered", "stagger": 2}, 2),
        ({"update": "staggered", "stagger": SIZE}, SIZE - 1),
    ],
)
async def test_of_a_staggered_fleet_one_goes_on_serving_whatever_the_stagger(publisher, run, tmp_path, spec, most):
    async with fleet(publisher, run, tmp_path, **spec) as engines:
        await until_served(engines, await publisher.newer())
        for _ in range(2):
            await until_served(engines, await publisher.newer())
    assert 1 <= Engine.most <= most


@BOTH
async def test_a_fleet_that_is_not_staggered_changes_weights_when_it_can(publisher, run, tmp_path):
    async with fleet(publisher, run, tmp_path, update="delayed") as engines:
        await until_served(engines, await publisher.newer())
        assert [member.info["fleet"] for member in publisher.directory.members("follower")] == ["fleet"] * SIZE
        Engine.together = SIZE
        await until_served(engines, await publisher.newer())


@BOTH
async def test_one_that_waits_loads_what_is_newest_when_its_turn_comes(publisher, run, tmp_path):
    async with fleet(publisher, run, tmp_path, update="staggered") as engines:
        await until_served(engines, await publisher.newer())
        versions = [await publisher.newer() for _ in range(3)]
        await until_served(engines, versions[-1])


@BOTH
async def test_those_that_wait_for_a_permit_say_so(publisher, run, tmp_path):
    async with fleet(publisher, run, tmp_path, update="staggered") as engines:
        await until_served(engines, await publisher.newer())
        Engine.together = 2
        await publisher.newer()
        async with asyncio.timeout(SOON):
            while sum(waits(publisher.directory)) < SIZE - 1:
                await asyncio.sleep(0.01)
        Engine.together = 1


@pytest.mark.parametrize("update", ["delayed", "staggered"])
async def test_a_version_is_loaded_also_when_newer_ones_come_while_it_is_staged(publisher, tmp_path, update):
    async with fleet(publisher, an_engine, tmp_path, update=update) as engines:
        await until_served(engines, await publisher.newer())
        slow = engines[0]
        slow.may_stage.clear()
        await publisher.newer()
        async with asyncio.timeout(SOON):
            while not slow.staged:
                await asyncio.sleep(0.01)
        for _ in range(3):
            newest = await publisher.newer()
            await until_served(engines[1:], newest)
        slow.may_stage.set()
        await until_served(engines, newest)


def waits(directory: Directory) -> list[bool]:
    return [directory.status(member.incarnation).get("waits_permit", False) for member in directory.members()]


async def test_the_turn_of_a_loop_that_is_left_is_over(publisher, tmp_path):
    file = tmp_path / "fleet.yaml"
    file.write_text(to_yaml(sync_of(update="staggered")))
    async with follow(publisher.address, sync=file) as stays:
        async with follow(publisher.address, sync=file) as left:
            await publisher.newer()
            await asyncio.gather(anext(left), anext(stays))
            newest = await publisher.newer()
            assert (await anext(left))[0] == newest
            waiting = asyncio.create_task(anext(stays))
            async with asyncio.timeout(SOON):
                while sum(waits(publisher.directory)) < 1:
                    await asyncio.sleep(0.01)
            assert not waiting.done()
        assert (await waiting)[0] == newest


async def test_a_loop_follows_by_a_weight_sync_for_followers(publisher, tmp_path):
    (tmp_path / "shared.yaml").write_text(to_yaml(WeightSync.model_validate({"metadata": {"name": "shared"}})))
    with pytest.raises(ManifestError, match=r"no WeightSync for followers.*Pass a WeightSync with a source"):
        async with follow(publisher.address, sync=tmp_path / "shared.yaml"):
            pass


async def test_a_loop_ends_when_another_job_is_where_that_which_it_follows_was(tmp_path, monkeypatch):
    monkeypatch.setattr(tls, "_CHECK_INTERVAL_S", 0.0)
    folder, first, second = tmp_path / "tls", Issuer(tmp_path / "first"), Issuer(tmp_path / "second")
    shutil.copytree(first.issue("follower"), folder)
    async with contextlib.AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(publishing(first))
        async with follow(publisher.address, tls=folder) as versions:
            await publisher.newer()
            assert (await anext(versions))[0] == Version(0, 0)
            await stack.aclose()
            shutil.copytree(second.issue("follower"), folder, dirs_exist_ok=True)
            async with publishing(second, bind=publisher.address) as successor:
                await successor.newer()
                await successor.newer()
                with pytest.raises(StopAsyncIteration):
                    await asyncio.wait_for(anext(versions), SOON)
