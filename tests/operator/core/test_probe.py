import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from asyncflow.api.status import DriverStatus, RolloutState
from asyncflow.errors import DeadlineExceeded, Refused
from asyncflow_operator import probe
from asyncflow_operator.observed import Owner
from asyncflow_operator.probe import Drivers

OWNER = Owner(kind="RLJob", namespace="ns", name="j", uid="u")


class World:
    """A driver that answers as it is told, and whoever asks it."""

    def __init__(self) -> None:
        self.status = DriverStatus(phase="Running", step=1, steps=9)
        self.answer: Callable[[web.Request], Awaitable[web.Response]] = self.tell
        self.asked = 0
        self.running = [(OWNER, "pod-1")]
        self.news: list[Owner] = []
        self.posted: list[tuple[str, str]] = []

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/{name}/v1/status", self._get)
        app.router.add_post("/{name}/{path:.*}", self._post)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.drivers = Drivers(
            url=f"http://127.0.0.1:{self.runner.addresses[0][1]}/{{name}}",
            every_s=0.01,
            token=lambda owner: f"token of {owner.uid}",
            running=lambda: self.running,
            news=self.news.append,
        )
        self.task = asyncio.create_task(self.drivers.run())

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])
        await self.drivers.close()
        await self.runner.cleanup()

    async def tell(self, _: web.Request) -> web.Response:
        return web.json_response(text=self.status.model_dump_json(by_alias=True))

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)

    async def _get(self, request: web.Request) -> web.Response:
        self.asked += 1
        return await self.answer(request)

    async def _post(self, request: web.Request) -> web.Response:
        self.posted.append((request.match_info["path"], request.headers["Authorization"]))
        return web.Response(status=202 if "suspend" in request.match_info["path"] else 409, text="no")


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    await world.start()
    yield world
    await world.end()


async def test_a_change_of_phase_is_news_at_once_and_progress_is_not(world: World) -> None:
    await world.until(lambda: world.drivers.probe("u").status)
    assert world.news == [OWNER]
    world.status = world.status.model_copy(update={"step": 2})
    await world.until(lambda: world.drivers.probe("u").status.step == 2)
    assert world.news == [OWNER]
    world.status = world.status.model_copy(update={"phase": "Suspended"})
    await world.until(lambda: len(world.news) == 2)


async def test_progress_is_news_after_a_while_also_if_it_has_ended_since(world: World, monkeypatch: Any) -> None:
    await world.until(lambda: world.news)
    world.status = world.status.model_copy(update={"step": 2})
    await world.until(lambda: world.drivers.probe("u").status.step == 2)
    monkeypatch.setattr(probe, "MATTERS_S", 0.0)
    await world.until(lambda: len(world.news) == 2)


async def test_a_rollout_that_comes_or_changes_is_news(world: World) -> None:
    await world.until(lambda: world.news)
    world.status = world.status.model_copy(update={"rollouts": (RolloutState(id="r0"),)})
    await world.until(lambda: len(world.news) == 2)
    world.status = world.status.model_copy(update={"rollouts": (RolloutState(id="r0", state="ready"),)})
    await world.until(lambda: len(world.news) == 3)


async def test_a_driver_that_fails_keeps_its_last_answer_and_says_why_and_since_when(world: World) -> None:
    await world.until(lambda: world.drivers.probe("u").status)

    async def broken(_: web.Request) -> web.Response:
        return web.Response(status=500)

    world.answer = broken
    await world.until(lambda: world.drivers.probe("u").error)
    failed = world.drivers.probe("u")
    assert failed.status is not None
    assert "HTTP 500" in failed.error
    assert failed.failing_since is not None
    world.answer = world.tell
    await world.until(lambda: not world.drivers.probe("u").error)
    assert world.drivers.probe("u").failing_since is None


@pytest.mark.parametrize("text", ["{", '{"phase": "Dancing"}', "x" * (5 << 20)])
async def test_an_answer_that_is_none_is_an_error_and_no_crash(world: World, text: str) -> None:
    async def nonsense(_: web.Request) -> web.Response:
        return web.Response(text=text)

    world.answer = nonsense
    await world.until(lambda: world.drivers.probe("u").error)
    assert world.drivers.probe("u").status is None


async def test_a_driver_that_is_gone_is_forgotten_and_asked_no_more(world: World) -> None:
    await world.until(lambda: world.drivers.probe("u").status)
    world.running = []
    await world.until(lambda: world.drivers.probe("u").status is None)
    asked = world.asked
    await asyncio.sleep(0.05)
    assert world.asked == asked


async def test_another_pod_is_another_driver_of_which_nothing_is_known(world: World) -> None:
    await world.until(lambda: world.drivers.probe("u").status)
    assert world.drivers.probe("u").pod == "pod-1"
    world.answer = never
    world.running = [(OWNER, "pod-2")]
    await world.until(lambda: world.drivers.probe("u").pod == "pod-2")
    assert not world.drivers.probe("u").asked


async def never(_: web.Request) -> web.Response:
    await asyncio.sleep(60)
    return web.Response()


async def test_what_is_asked_of_a_driver_carries_its_token(world: World) -> None:
    await world.drivers.ask(OWNER, "/v1/suspend")
    assert world.posted == [("v1/suspend", "Bearer token of u")]
    with pytest.raises(Refused, match="HTTP 409: no"):
        await world.drivers.ask(OWNER, "/v1/rollouts/r0/drain")
    await world.runner.cleanup()
    with pytest.raises(DeadlineExceeded, match="POST http"):
        await world.drivers.ask(OWNER, "/v1/suspend")
