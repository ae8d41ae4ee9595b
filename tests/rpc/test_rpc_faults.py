"""Calls to a process that is killed, stopped and started again, by real signals."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from msgspec import Struct

from asyncflow.errors import DeadlineExceeded, PeerLost
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.retry import retry

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("way")]


class Number(Struct, frozen=True, kw_only=True):
    value: float


def add(client: RpcClient, timeout: float = 2.0) -> Callable[[], Awaitable[Number]]:
    return lambda: client.call("add", Number(value=1), Number, timeout=timeout)


async def test_calls_in_flight_learn_at_once_that_the_server_was_killed(spawn: Any) -> None:
    peer = spawn("echo")
    client = RpcClient(name="client", resolve=peer.said)
    await add(client)()
    parked = [asyncio.create_task(client.call("park", Number(value=60), Number, timeout=60)) for _ in range(3)]
    await asyncio.sleep(0.1)
    peer.kill()
    async with asyncio.timeout(10):
        for call in parked:
            with pytest.raises(PeerLost, match="broke"):
                await call
    await client.close()


async def test_a_server_that_comes_back_at_the_same_address_is_found(spawn: Any) -> None:
    peer = spawn("echo")
    client = RpcClient(name="client", resolve=peer.said)
    await add(client)()
    for _ in range(2):
        peer.kill()
        waiting = asyncio.create_task(retry(add(client), what="adding", timeout=30))
        await asyncio.sleep(0.3)
        peer = await asyncio.to_thread(spawn, "echo", peer.said)
        assert (await waiting).value == 2
    await client.close()


async def test_a_server_that_comes_back_elsewhere_is_found(spawn: Any) -> None:
    peer = spawn("echo")
    client = RpcClient(name="client", resolve=lambda: peer.said)
    await add(client)()
    peer.kill()
    peer = await asyncio.to_thread(spawn, "echo")
    assert (await retry(add(client), what="adding", timeout=30)).value == 2
    await client.close()


async def test_a_stopped_server_is_only_late(spawn: Any) -> None:
    peer = spawn("echo")
    client = RpcClient(name="client", resolve=peer.said)
    await add(client)()
    parked = asyncio.create_task(client.call("park", Number(value=0.1), Number, timeout=60))
    peer.signal(signal.SIGSTOP)
    with pytest.raises(DeadlineExceeded, match="add was not answered"):
        await add(client, timeout=0.3)()
    assert not parked.done()
    peer.signal(signal.SIGCONT)
    async with asyncio.timeout(30):
        assert (await parked).value == 0.1
        assert (await add(client)()).value == 2
    await client.close()


async def test_a_stopped_server_does_not_make_its_callers_memory_grow(spawn: Any) -> None:
    peer = spawn("echo")
    client = RpcClient(name="client", resolve=peer.said)
    await add(client)()
    parked = asyncio.create_task(client.call("park", Number(value=60), Number, timeout=60))
    peer.signal(signal.SIGSTOP)
    frames = [bytes(1 << 20)] * 16
    for _ in range(5):
        with pytest.raises((DeadlineExceeded, PeerLost)):
            await client.call("add", Number(value=1), Number, timeout=0.05, frames=frames)
    assert not parked.done()
    outbox = client._link._connection.outbox  # type: ignore[union-attr]
    assert sum(size for _, size in outbox._messages.values()) < 1 << 20
    parked.cancel()
    peer.signal(signal.SIGCONT)
    assert (await retry(add(client), what="adding", timeout=30)).value == 2
    await client.close()
