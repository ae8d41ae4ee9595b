"""Tests of what ``/readyz`` of each role says while a job comes up: the roles of this project, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from asyncflow.commands.preflight import runnable_job
from asyncflow.local.placement import PortReservation
from asyncflow.roles import controller, driver, rollout, storage, trainer
from asyncflow.roles.context import JobContext, RoleOptions
from asyncflow.rpc.directory import Directory
from asyncflow.rpc.server import RpcServer
from asyncflow.telemetry.metrics import StorageMetrics
from asyncflow.weights.service import CatalogueService

COUNTING = Path(__file__).parents[2] / "examples" / "counting.yaml"


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """The garbage collector is this process's: what roles have asked of it ends with the test."""
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def context(role: str, at: str, workdir: Path, *, http_port: int = 0) -> JobContext:
    options = RoleOptions(role=role, job=COUNTING, driver=at, index=0, attempt=0, workdir=workdir, http_port=http_port)
    return JobContext(options=options, job=runnable_job(COUNTING))


@contextlib.asynccontextmanager
async def serving(serve: Callable[[JobContext], Awaitable[None]], at: JobContext) -> AsyncIterator[None]:
    async def run() -> None:
        await serve(at)

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        at.draining.set()
        at.stopping.set()
        await task


async def answer(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/readyz") as said:
        return said.status, (await said.text()).strip()


async def becomes_ready(url: str) -> None:
    async with asyncio.timeout(60):
        while (await answer(url))[0] != 200:
            await asyncio.sleep(0.05)


async def test_each_role_is_ready_when_it_can_serve(tmp_path: Path) -> None:
    server, directory = RpcServer(name="driver"), Directory()
    directory.attach(server)
    CatalogueService(server, directory=directory)
    at = await server.start()

    async def url_of(role: str) -> str:
        async with asyncio.timeout(60):
            while not (members := directory.members(role)):
                await asyncio.sleep(0.05)
        return members[0].http

    async with serving(storage.serve, context("storage", at, tmp_path)):
        unit = await url_of("storage")
        assert await answer(unit) == (503, "the controller has not registered it yet")
        async with serving(controller.serve, context("controller", at, tmp_path)):
            await becomes_ready(await url_of("controller"))
            await becomes_ready(unit)
            async with serving(rollout.serve, context("rollout", at, tmp_path)):
                instance = await url_of("rollout")
                assert await answer(instance) == (503, "no weights are loaded yet")
                async with serving(trainer.serve, context("trainer", at, tmp_path)):
                    await becomes_ready(await url_of("trainer"))
                    await becomes_ready(instance)
                assert await answer(instance) == (200, "ready")
    await directory.close()
    await server.close()


async def test_nobody_is_ready_who_is_not_registered(tmp_path: Path) -> None:
    with PortReservation(2) as (nobody, port):
        here = context("storage", f"tcp://127.0.0.1:{nobody}", tmp_path, http_port=port)
        joining = asyncio.create_task(here.join(metrics=StorageMetrics()))
        async with asyncio.timeout(10):
            while True:
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    said = await answer(f"http://127.0.0.1:{port}")
                    break
                await asyncio.sleep(0.05)
        assert said == (503, "the driver has not registered it yet")
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await joining


async def test_a_driver_is_ready_before_anybody_has_joined(tmp_path: Path) -> None:
    with PortReservation(2) as (at, port):
        here = context("driver", f"tcp://127.0.0.1:{at}", tmp_path, http_port=port)
        async with serving(driver.serve, here), asyncio.timeout(60):
            while True:
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    assert await answer(f"http://127.0.0.1:{port}") == (200, "ready")
                    break
                await asyncio.sleep(0.05)
