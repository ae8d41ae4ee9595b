"""The relay of a follower between a caller and the engine's HTTP server, all three over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from asyncflow.errors import PeerLost
from asyncflow.roles.follower import serve_routes
from asyncflow.rollout.engines.vllm.server import VllmServer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Upstream:
    """The server behind the relay, and which of its requests was cancelled."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def echo(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"got": await request.text()}, status=201)

    async def silent(self, _: web.Request) -> web.StreamResponse:
        return await self._for_ever()

    async def endless(self, request: web.Request) -> web.StreamResponse:
        await self._begun(request)
        return await self._for_ever()

    async def broken(self, request: web.Request) -> web.StreamResponse:
        response = await self._begun(request)
        assert request.transport is not None
        request.transport.abort()
        return response

    async def dead(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def _begun(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        return response

    async def _for_ever(self) -> web.StreamResponse:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        raise AssertionError


@asynccontextmanager
async def relayed(folder: Path, handler: Handler) -> AsyncIterator[tuple[str, VllmServer]]:
    """Yield the URL at which ``handler``, at a Unix socket, is asked by way of the relay."""
    async with AsyncExitStack() as stack:
        app = web.Application()
        app.add_routes([web.post("/v1/completions", handler)])
        behind = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await behind.setup()
        stack.push_async_callback(behind.cleanup)
        await web.UnixSite(behind, str(folder / "s")).start()
        server = VllmServer(env={}, start_s=1)
        server._session = aiohttp.ClientSession("http://vllm", connector=aiohttp.UnixConnector(path=str(folder / "s")))
        stack.push_async_callback(server.close, why="the test is over")
        runner = await serve_routes([web.post("/v1/completions", server.relay)], host="127.0.0.1", port=0)
        stack.push_async_callback(runner.cleanup)
        host, port, *_ = runner.addresses[0]
        yield f"http://{host}:{port}/v1/completions", server


@pytest.fixture
async def caller() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def test_an_answer_is_passed_on_as_it_is(tmp_path: Path, caller: aiohttp.ClientSession) -> None:
    async with relayed(tmp_path, Upstream().echo) as (url, _), caller.post(url, data="a prompt") as answer:
        assert (answer.status, await answer.json()) == (201, {"got": "a prompt"})


async def test_when_the_caller_goes_its_request_is_cancelled_before_the_answer_begins_and_after(
    tmp_path: Path, caller: aiohttp.ClientSession
) -> None:
    for number, kind in enumerate(("silent", "endless")):
        upstream = Upstream()
        folder = tmp_path / str(number)
        folder.mkdir()
        async with relayed(folder, getattr(upstream, kind)) as (url, _):
            asking = asyncio.create_task(caller.post(url))
            async with asyncio.timeout(20):
                await upstream.asked.wait()
                if kind == "endless":
                    (await asking).close()
                asking.cancel()
                await upstream.cancelled.wait()


async def test_an_engine_that_gives_no_answer_is_a_bad_gateway(tmp_path: Path, caller: aiohttp.ClientSession) -> None:
    async with relayed(tmp_path, Upstream().dead) as (url, server):
        async with caller.post(url) as answer:
            assert answer.status == 502
            assert (await answer.text()).startswith("vLLM gives no answer: ")

        def ended() -> None:
            raise PeerLost("the vLLM server ended with status 1", where="rollout.engine")

        server.check = ended  # type: ignore[method-assign]
        async with caller.post(url) as answer:
            assert answer.status == 502
            assert "ended with status 1" in await answer.text()


async def test_an_answer_that_breaks_off_does_not_look_whole(tmp_path: Path, caller: aiohttp.ClientSession) -> None:
    async with relayed(tmp_path, Upstream().broken) as (url, _), caller.post(url) as answer:
        assert answer.status == 200
        with pytest.raises(aiohttp.ClientError):
            await answer.read()
