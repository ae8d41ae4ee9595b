"""Handlers that return a reply at once, or an awaitable of it."""

import asyncio
from collections.abc import Sequence

import pytest
from msgspec import Struct

from asyncflow.errors import DeadlineExceeded, Refused, RemoteError
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.server import RpcServer


class Number(Struct, frozen=True, kw_only=True):
    value: int


def add(request: Number, frames: Sequence[memoryview]) -> tuple[Number, list[bytes]]:
    return Number(value=request.value + 1), [bytes(frame) for frame in frames]


async def test_a_plain_function_answers(server: RpcServer, client: RpcClient) -> None:
    server.route("add", Number, add)
    answer, frames = await client.call_frames("add", Number(value=1), Number, timeout=10, frames=[b"x" * 100_000])
    assert (answer.value, [frame.nbytes for frame in frames]) == (2, [100_000])
    with pytest.raises(ValueError, match="two handlers"):
        server.route("add", Number, add)


async def test_errors_of_a_plain_function_and_of_its_future_are_answers(server: RpcServer, client: RpcClient) -> None:
    def fail(request: Number, frames: Sequence[memoryview]) -> Number | asyncio.Future[Number]:
        error = Refused("no") if request.value % 2 else ZeroDivisionError("oh")
        if request.value < 2:
            raise error
        future: asyncio.Future[Number] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_exception, error)
        return future

    server.route("fail", Number, fail)
    for value in (1, 3):
        with pytest.raises(Refused, match="no"):
            await client.call("fail", Number(value=value), Number, timeout=10)
    for value in (0, 2):
        with pytest.raises(RemoteError, match="ZeroDivisionError"):
            await client.call("fail", Number(value=value), Number, timeout=10)


async def test_a_future_is_awaited_and_cancelled_when_nobody_waits(server: RpcServer, client: RpcClient) -> None:
    futures: list[asyncio.Future[Number]] = []

    def park(request: Number, frames: Sequence[memoryview]) -> asyncio.Future[Number]:
        futures.append(asyncio.get_running_loop().create_future())
        return futures[-1]

    server.route("park", Number, park)
    server.route("add", Number, add)
    calls = [asyncio.create_task(client.call("park", Number(value=n), Number, timeout=60)) for n in range(3)]
    while len(futures) < 3:
        await asyncio.sleep(0.001)
    futures[1].set_result(Number(value=7))
    assert (await calls[1]).value == 7
    calls[0].cancel()
    with pytest.raises(DeadlineExceeded):
        await client.call("park", Number(value=9), Number, timeout=0.05)
    async with asyncio.timeout(10):
        while not (futures[0].cancelled() and futures[3].cancelled()):
            await asyncio.sleep(0.001)
    assert not futures[2].done()
    assert (await client.call("add", Number(value=1), Number, timeout=10)).value == 2
    futures[2].set_result(Number(value=8))
    assert (await calls[2]).value == 8
    assert server.counters.cancelled == 2


async def test_a_future_that_is_done_already_is_an_answer(server: RpcServer, client: RpcClient) -> None:
    def done(request: Number, frames: Sequence[memoryview]) -> asyncio.Future[Number]:
        future: asyncio.Future[Number] = asyncio.get_running_loop().create_future()
        future.set_result(Number(value=request.value + 1))
        return future

    server.route("done", Number, done)
    assert (await client.call("done", Number(value=1), Number, timeout=10)).value == 2
    async with asyncio.timeout(10):
        while server._running:
            await asyncio.sleep(0)


async def test_a_call_that_is_given_up_as_its_answer_is_there_ends_once(server: RpcServer, client: RpcClient) -> None:
    parked: list[asyncio.Future[Number]] = []

    def park(request: Number, frames: Sequence[memoryview]) -> asyncio.Future[Number]:
        parked.append(asyncio.get_running_loop().create_future())
        return parked[-1]

    server.route("park", Number, park)
    server.route("add", Number, add)
    call = asyncio.create_task(client.call("park", Number(value=1), Number, timeout=60))
    while not parked:
        await asyncio.sleep(0.001)
    parked[0].set_result(Number(value=2))
    (peer,) = server._peers
    peer.running[0].cancel()  # as a message that is read before the callbacks of the future run
    assert (await call).value == 2
    assert (await client.call("add", Number(value=1), Number, timeout=10)).value == 2
    assert (server.counters.cancelled, server._running, peer.running) == (0, 0, {})
