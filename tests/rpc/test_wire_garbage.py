"""Whatever bytes come in, the service goes on: garbage, half messages, huge declared sizes, lying headers."""

import asyncio
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Struct

from asyncflow.errors import PeerLost, ProtocolError
from asyncflow.rpc import client as calling
from asyncflow.rpc import framing
from asyncflow.rpc.addresses import address_of, host_and_port
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.server import RpcServer


class Number(Struct, frozen=True, kw_only=True):
    value: int


async def add(request: Number, frames: Sequence[memoryview]) -> Number:
    return Number(value=request.value + 1)


MSGPACK = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=10,
)
HEADERS = (
    st.binary(max_size=40)
    | MSGPACK.map(msgspec.msgpack.encode)
    | st.builds(
        lambda *fields: msgspec.msgpack.encode(["c1", *fields]),
        MSGPACK,
        st.just("add") | MSGPACK,
        st.floats() | MSGPACK,
        st.integers(-1, 3) | MSGPACK,
    )
)


@settings(max_examples=300)
@given(HEADERS)
def test_a_header_is_one_of_the_protocol_or_refused(header: bytes) -> None:
    for decode in (framing.to_server, framing.to_client):
        try:
            decoded = decode(header)
        except msgspec.MsgspecError:
            continue
        assert decoded.call >= 0
        if isinstance(decoded, framing.Call) and framing.fits(decoded, 2 + decoded.frames):
            assert 0 < decoded.timeout <= framing.MAX_TIMEOUT


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=st.lists(st.lists(HEADERS, max_size=4), min_size=1, max_size=20))
def test_a_server_answers_after_any_messages(stranger: Any, messages: list[list[bytes]]) -> None:
    async def run() -> None:
        server = RpcServer(name="server")
        server.route("add", Number, add)
        address = await server.start()
        async with stranger(server) as enemy:
            for message in messages:
                await enemy.send(message)
            client = RpcClient(name="client", resolve=address)
            assert (await client.call("add", Number(value=1), Number, timeout=10)).value == 2
            await client.close()
        await server.close()

    asyncio.run(run())


async def until_dropped(server: RpcServer, reason: str) -> None:
    async with asyncio.timeout(10):
        while not server.counters.dropped[reason]:
            await asyncio.sleep(0.01)


async def test_what_is_dropped_is_counted_by_reason(server: RpcServer, stranger: Any) -> None:
    async def park(request: Number, frames: Sequence[memoryview]) -> Number:
        await asyncio.sleep(60)
        return request

    server.route("park", Number, park)
    body = framing.encode(Number(value=1))
    good = framing.encode(framing.Call(5, "park", 60.0, 0))
    async with stranger(server) as enemy:
        for reason, message in {
            "short": [],
            "header": [b"\xc1garbage", body],
            "shape": [framing.encode(framing.Call(1, "park", 1.0, 3)), body],
            "repeated": [good, body],
        }.items():
            await enemy.send([good, body])
            await enemy.send(message)
            await until_dropped(server, reason)
        await enemy.send([framing.encode(framing.Call(1, "park", float("nan"), 0)), body])
        async with asyncio.timeout(10):
            while server.counters.dropped["shape"] < 2:
                await asyncio.sleep(0.01)
    assert server.counters.calls["park"] == 1


@pytest.mark.parametrize("hangs_up", [False, True])
async def test_a_handler_ends_with_the_connection_or_at_the_deadline_of_a_caller_that_died_without_a_word(
    server: RpcServer, stranger: Any, hangs_up: bool
) -> None:
    async def park(request: Number, frames: Sequence[memoryview]) -> Number:
        await asyncio.sleep(60)
        return request

    server.route("park", Number, park)
    async with stranger(server) as caller, asyncio.timeout(10):
        timeout_s = 60.0 if hangs_up else 0.2
        await caller.send([framing.encode(framing.Call(1, "park", timeout_s, 0)), framing.encode(Number(value=1))])
        while not server.counters.calls["park"]:
            await asyncio.sleep(0.01)
        if hangs_up:
            caller.close()
        while not server.counters.cancelled:
            await asyncio.sleep(0.01)


async def test_what_is_nested_too_deep_is_no_request(server: RpcServer, stranger: Any) -> None:
    server.route("add", Number, add)
    deep = b"\x91" * 100_000 + b"\xc0"
    async with stranger(server) as enemy, asyncio.timeout(10):
        await enemy.send([b"\x96\xa2c1\x01\xa3add\x01\x00" + deep, b"\x80"])
        await until_dropped(server, "header")
        await enemy.send([framing.encode(framing.Call(1, "add", 60.0, 0)), b"\x81\xa1z" + deep])
        header, said = await enemy.receive()
        assert isinstance(framing.to_client(header), framing.Failure)
        assert framing.error_body(said)["code"] == "protocol"


async def test_raw_tcp_garbage_half_messages_and_huge_sizes_harm_nobody(server: RpcServer, client: RpcClient) -> None:
    server.route("add", Number, add)
    greeted = framing.hello(None)
    for attack in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 4096,
        greeted[:3],
        greeted[:4] + b"\x10" + b"\x01" * 16,
        greeted + struct.pack("<QIQ", 12 + 5, 1, 5) + b"hel",  # 5 bytes are declared, 3 come
        greeted + struct.pack("<QI", 1 << 20, 1000),
        greeted + struct.pack("<Q", 1 << 62) + b"x",
        greeted + struct.pack("<Q", (1 << 64) - 1) + b"x",
    ):
        _, writer = await asyncio.open_connection(*host_and_port(server.address))
        writer.write(attack)
        await writer.drain()
        assert (await client.call("add", Number(value=1), Number, timeout=10)).value == 2
        writer.close()
    assert (await client.call("add", Number(value=1), Number, timeout=10)).value == 2
    assert server.counters.calls["add"] == 9


async def test_a_client_survives_any_answer(impostor: Any) -> None:
    address, called = impostor
    client = RpcClient(name="client", resolve=address)
    call = asyncio.create_task(client.call("add", Number(value=1), Number, timeout=10))
    peer = await called
    await peer.welcome()
    header, _ = await peer.receive()
    number = framing.to_server(header).call
    fine = framing.encode(Number(value=2))
    await peer.send([b"garbage"])
    await peer.send([])
    await peer.send([framing.encode(framing.Answer(number + 1, 0)), fine])
    await peer.send([framing.encode(framing.Answer(number, 0)), fine])
    assert (await call).value == 2
    for bad in (
        [framing.encode(framing.Answer(number + 1, 2)), fine],
        [framing.encode(framing.Failure(number + 2)), b"\xc1"],
    ):
        call = asyncio.create_task(client.call("add", Number(value=1), Number, timeout=10))
        await peer.receive()
        await peer.send(bad)
        assert isinstance((await asyncio.gather(call, return_exceptions=True))[0], ProtocolError)
    await client.close()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_peer_that_hangs_up_before_it_greets_is_dialled_again(
    new_loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a forwarded port does, or a server with too many connections; in uvloop that is noticed first."""
    with socket.create_server(("127.0.0.1", 0)) as listening, asyncio.Runner(loop_factory=new_loop) as runner:
        listening.settimeout(10)
        twice = asyncio.Semaphore(0)

        def hang_up(_: socket.socket) -> None:
            listening.accept()[0].close()
            twice.release()

        async def run() -> None:
            client = RpcClient(name="client", resolve=address_of(*listening.getsockname()))
            call = asyncio.create_task(client.call("add", Number(value=1), Number, timeout=60))
            async with asyncio.timeout(10):
                await twice.acquire()
                await twice.acquire()
            await client.close()
            with pytest.raises(PeerLost, match="closed"):
                await call

        monkeypatch.setattr(calling, "tune", hang_up)
        runner.run(run())
