import asyncio
import logging
import socket
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from deadlines import ends_late
from msgspec import Struct

from asyncflow.api.names import INSECURE_ENV
from asyncflow.errors import DeadlineExceeded, Fenced, PeerLost, ProtocolError, Refused, RemoteError
from asyncflow.rpc import addresses
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.columns import Jagged, encode_batch
from asyncflow.rpc.server import RpcServer

pytestmark = pytest.mark.usefixtures("way")
HAS_IPV6 = socket.has_dualstack_ipv6() and bool(Path("/proc/net/if_inet6").read_text())


class Number(Struct, frozen=True, kw_only=True):
    value: int


class Text(Struct, frozen=True, kw_only=True):
    text: str


async def add(request: Number, frames: Sequence[memoryview]) -> tuple[Number, Sequence[memoryview]]:
    return Number(value=request.value + 1), frames


async def test_many_calls_at_once_each_get_their_own_answer(server: RpcServer, client: RpcClient) -> None:
    server.route("add", Number, add)
    answers = await asyncio.gather(*(client.call("add", Number(value=i), Number, timeout=10) for i in range(500)))
    assert [answer.value for answer in answers] == list(range(1, 501))


async def test_frames_small_and_large_come_back_bit_for_bit(server: RpcServer, client: RpcClient) -> None:
    server.route("add", Number, add)
    large = np.random.default_rng(0).integers(0, 255, 3_000_000, np.uint8)
    _, batch = encode_batch({"a": Jagged.from_rows([[1, 2], [3]], "int64")})
    sent = [b"", b"small", large.data, np.arange(100_000, dtype=np.float64).data, *batch]
    _, frames = await client.call_frames("add", Number(value=1), Number, timeout=10, frames=sent)
    assert [bytes(frame) for frame in frames] == [memoryview(frame).tobytes() for frame in sent]
    assert all(not frame.readonly and frame.format == "B" for frame in frames)


async def test_a_parked_handler_delays_nobody_and_ends_when_nobody_waits(server: RpcServer, client: RpcClient) -> None:
    ended = asyncio.Event()

    async def park(request: Number, frames: Sequence[memoryview]) -> Number:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return request

    server.route("park", Number, park)
    server.route("add", Number, add)
    parked = asyncio.create_task(client.call("park", Number(value=1), Number, timeout=60))
    await client.call("add", Number(value=1), Number, timeout=10)
    assert not parked.done()
    with pytest.raises(DeadlineExceeded, match=r"park was not answered by \w+://.* within 0.3 s: it is connected"):
        await client.call("park", Number(value=2), Number, timeout=0.3)
    async with asyncio.timeout(10):
        await ended.wait()
    await client.call("add", Number(value=1), Number, timeout=10)
    assert server.counters.cancelled == 1
    parked.cancel()


async def test_a_caller_that_is_cancelled_cancels_the_handler(server: RpcServer, client: RpcClient) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def park(request: Number, frames: Sequence[memoryview]) -> Number:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return request

    server.route("park", Number, park)
    parked = asyncio.create_task(client.call("park", Number(value=1), Number, timeout=60))
    await began.wait()
    parked.cancel()
    async with asyncio.timeout(10):
        await ended.wait()
    assert parked.cancelled()


async def test_errors_travel_as_themselves(
    server: RpcServer, client: RpcClient, caplog: pytest.LogCaptureFixture
) -> None:
    async def fence(request: Number, frames: Sequence[memoryview]) -> Number:
        raise Fenced("too old", where="row 3", hint="stop")

    async def fail(request: Number, frames: Sequence[memoryview]) -> Number:
        raise KeyError("inside")

    server.route("fence", Number, fence)
    server.route("fail", Number, fail)
    with pytest.raises(Fenced) as fenced:
        await client.call("fence", Number(value=1), Number, timeout=10)
    assert (fenced.value.what, fenced.value.where, fenced.value.hint) == ("too old", "row 3", "stop")
    with caplog.at_level(logging.ERROR), pytest.raises(RemoteError, match="KeyError"):
        await client.call("fail", Number(value=1), Number, timeout=10)
    assert "Traceback" in caplog.text


async def test_calls_that_do_not_fit_the_contract_are_protocol_errors(server: RpcServer, client: RpcClient) -> None:
    server.route("add", Number, add)
    with pytest.raises(ProtocolError, match="no method 'sub'"):
        await client.call("sub", Number(value=1), Number, timeout=10)
    with pytest.raises(ProtocolError, match="add: Object missing"):
        await client.call("add", Text(text="x"), Number, timeout=10)
    with pytest.raises(ProtocolError, match="the answer is no Text"):
        await client.call("add", Number(value=1), Text, timeout=10)
    assert (await client.call("add", Number(value=1), Number, timeout=10)).value == 2
    with pytest.raises(ValueError, match="two handlers"):
        server.route("add", Number, add)


async def test_a_message_that_is_too_large_is_refused_on_both_sides() -> None:
    server = RpcServer(name="server", max_message=100_000)
    server.route("add", Number, add)
    address = await server.start()
    careful = RpcClient(name="careful", resolve=address, max_message=100_000)
    careless = RpcClient(name="careless", resolve=address)
    half = bytes(60_000)
    with pytest.raises(ProtocolError, match="Split it"):
        await careful.call("add", Number(value=1), Number, timeout=10, frames=[half, half])
    for frames in ([half, half], [bytes(200_000)]):
        with pytest.raises(PeerLost):
            await careless.call("add", Number(value=1), Number, timeout=10, frames=frames)
    assert (await careless.call("add", Number(value=1), Number, timeout=10)).value == 2
    for end in (careful, careless, server):
        await end.close()


async def test_close_ends_handlers_and_calls(server: RpcServer, client: RpcClient) -> None:
    began = asyncio.Event()

    async def park(request: Number, frames: Sequence[memoryview]) -> Number:
        began.set()
        await asyncio.Event().wait()
        return request

    server.route("park", Number, park)
    parked = asyncio.create_task(client.call("park", Number(value=1), Number, timeout=60))
    await began.wait()
    async with asyncio.timeout(10):
        await server.close()
        with pytest.raises(PeerLost, match="broke"):
            await parked
    assert {task.get_name() for task in asyncio.all_tasks()} == {asyncio.current_task().get_name()}  # type: ignore[union-attr]


async def test_closing_a_client_ends_its_calls(server: RpcServer) -> None:
    client = RpcClient(name="client", resolve=server.address)
    nowhere = RpcClient(name="nowhere", resolve=lambda: None)

    async def park(request: Number, frames: Sequence[memoryview]) -> Number:
        await asyncio.sleep(60)
        return request

    server.route("park", Number, park)
    calls = [asyncio.create_task(c.call("park", Number(value=1), Number, timeout=60)) for c in (client, nowhere)]
    await asyncio.sleep(0.1)
    await client.close()
    await nowhere.close()
    for call in calls:
        with pytest.raises(PeerLost, match="client was closed"):
            await call
    with pytest.raises(PeerLost, match="client was closed"):
        await client.call("park", Number(value=1), Number, timeout=1)


async def test_a_call_waits_for_an_address_and_follows_it(server: RpcServer) -> None:
    addresses: list[str | None] = [None]
    other = RpcServer(name="other")
    began = asyncio.Event()

    async def park(request: Number, frames: Sequence[memoryview]) -> Number:
        began.set()
        await asyncio.sleep(60)
        return request

    async def answer(request: Number, frames: Sequence[memoryview]) -> Text:
        return Text(text="other")

    server.route("who", Number, park)
    other.route("who", Number, answer)
    client = RpcClient(name="client", resolve=lambda: addresses[-1])
    with pytest.raises(DeadlineExceeded, match="no address yet"):
        await client.call("who", Number(value=1), Text, timeout=0.05)
    waiting = asyncio.create_task(client.call("who", Number(value=1), Text, timeout=60))
    await asyncio.sleep(0.05)
    addresses.append(server.address)
    await began.wait()
    addresses.append(await other.start())
    with pytest.raises(PeerLost, match="the peer moved"):
        await waiting
    assert (await client.call("who", Number(value=1), Text, timeout=10)).text == "other"
    addresses.append(None)
    with pytest.raises(DeadlineExceeded):
        await client.call("who", Number(value=1), Text, timeout=0.05)
    await client.close()
    await other.close()


async def test_nobody_listening_is_said() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        client = RpcClient(name="client", resolve=f"tcp://127.0.0.1:{bound.getsockname()[1]}")
        await ends_late(
            lambda timeout: client.call("add", Number(value=1), Number, timeout=timeout),
            says="no process listens there",
        )
        await client.close()


async def test_an_address_in_use_is_refused_and_a_freed_one_is_waited_for(server: RpcServer) -> None:
    second = RpcServer(name="second", bind=server.address)
    starting = asyncio.create_task(second.start())
    await asyncio.sleep(0.2)
    assert not starting.done()
    await server.close()
    assert await starting == server.address
    third = RpcServer(name="third", bind="tcp://no-such-interface:1")
    with pytest.raises(Refused, match="cannot listen at"):
        await third.start()
    await second.close()


async def test_an_unbound_host_is_advertised_and_reached_by_ipv4_and_by_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INSECURE_ENV, "1")
    server = RpcServer(name="server", bind="tcp://*:*", advertise="pod-3.job")
    host, port = addresses.host_and_port(await server.start())
    assert host == "pod-3.job"
    for loopback in ("127.0.0.1", "::1") if HAS_IPV6 else ("127.0.0.1",):
        socket.create_connection((loopback, port), timeout=5).close()
    await server.close()
