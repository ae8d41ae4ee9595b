"""Streams on real sockets: what strangers and broken peers do to a server, and to its callers."""

import asyncio
import contextlib
import gc
import itertools
import resource
import socket
import ssl
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from deadlines import ends_late
from msgspec import Struct

from asyncflow.errors import PeerLost
from asyncflow.rpc import framing, listener
from asyncflow.rpc import server as serving
from asyncflow.rpc.access import Access
from asyncflow.rpc.addresses import ANY_SERVER, host_and_port
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.columns import LARGE, Buffer
from asyncflow.rpc.framing import Inbox, Outbox
from asyncflow.rpc.server import RpcServer
from asyncflow.rpc.tls import Credentials

AGAIN = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
OPEN = Access(table={method: {"rollout": lambda _: ()} for method in ("add", "blob")})


class Number(Struct, frozen=True, kw_only=True):
    value: int


async def add(request: Number, frames: Sequence[memoryview]) -> tuple[Number, Sequence[memoryview]]:
    return Number(value=request.value + 1), frames


async def serve(credentials: Credentials | None = None, **options: Any) -> RpcServer:
    server = RpcServer(name="server", credentials=credentials, access=OPEN, **options)
    server.route("add", Number, add)
    await server.start()
    return server


async def serves(server: RpcServer, credentials: Credentials | None = None) -> bool:
    client = RpcClient(name="client", resolve=server.address, credentials=credentials)
    answer = await client.call("add", Number(value=1), Number, timeout=10)
    await client.close()
    return answer.value == 2


def stranger(server: RpcServer) -> socket.socket:
    made = socket.create_connection(host_and_port(server.address), timeout=10)
    made.setblocking(False)
    return made


async def welcomed(made: Any) -> None:
    room, came = bytearray(len(framing.welcome(framing.ANY_SERVER))), b""
    async with asyncio.timeout(10):
        while len(came) < len(room):
            with contextlib.suppress(*AGAIN):
                came += room[: made.recv_into(room)]
            await asyncio.sleep(0.001)
    assert came[:16] == framing.welcome(ANY_SERVER)[:16]


async def greet(made: socket.socket, credentials: Credentials | None = None) -> Any:
    """Say who calls, over TLS where there are credentials, and return the socket that is used from then on."""
    stream: Any = made
    if credentials is not None:
        stream = credentials.client().wrap_socket(made, do_handshake_on_connect=False)
        async with asyncio.timeout(10):
            while stream.version() is None:
                with contextlib.suppress(*AGAIN):
                    stream.do_handshake()
                await asyncio.sleep(0.001)
    stream.send(framing.hello(credentials.process if credentials is not None else None))
    await welcomed(stream)
    return stream


def refusals(server: RpcServer) -> int:
    return server.counters.refused.total()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("way")
async def test_calls_with_keys_and_without(credentials: Credentials | None) -> None:
    server = await serve(credentials)
    client = RpcClient(name="client", resolve=server.address, credentials=credentials)
    large = np.random.default_rng(0).integers(0, 255, 3_000_000, np.uint8)
    sent = [b"", b"small", large.data, np.arange(100_000, dtype=np.float64).data]
    for _ in range(3):
        _, frames = await client.call_frames("add", Number(value=1), Number, timeout=10, frames=sent)
        assert [bytes(frame) for frame in frames] == [memoryview(frame).tobytes() for frame in sent]
        assert not any(frame.readonly for frame in frames)
    await client.close()
    await server.close()


async def test_garbage_half_greetings_and_thousands_of_connections(
    credentials: Credentials | None, monkeypatch: Any
) -> None:
    monkeypatch.setattr(serving, "MAX_PEERS", 300)
    server = await serve(credentials)
    pieces = [b"GET / HTTP/1.1\r\n\r\n", b"", framing.hello(None)[:6], b"AFs3" + bytes(64), b"\x16\x03\x01\x02\x00\x01"]
    strangers = []
    for number in range(1000):
        try:
            made = stranger(server)
            made.send(pieces[number % len(pieces)])
            strangers.append(made)
        except OSError:
            continue
        if number % 50 == 0:
            await asyncio.sleep(0)
    await until(lambda: refusals(server) >= 700)
    assert await serves(server, credentials)  # those who hold on to their connections have made room
    for made in strangers:
        made.close()
    await server.close()


async def test_where_there_are_too_many_peers_those_that_have_finished_the_handshake_stay(monkeypatch: Any) -> None:
    monkeypatch.setattr(serving, "MAX_PEERS", 5)
    server = await serve()
    clients = [RpcClient(name="client", resolve=server.address) for _ in range(6)]
    for client in clients[:5]:
        await client.call("add", Number(value=1), Number, timeout=10)
    await ends_late(lambda timeout: clients[5].call("add", Number(value=1), Number, timeout=timeout), says="handshake")
    await clients[0].close()
    for client in clients[1:]:
        await client.call("add", Number(value=1), Number, timeout=10)
        await client.close()
    await server.close()


async def test_where_there_are_too_many_peers_the_one_without_a_call_that_was_silent_for_longest_makes_room(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(serving, "MAX_PEERS", 3)
    monkeypatch.setattr(serving, "_IDLE_S", 0.05)
    server = RpcServer(name="server")
    server.route("add", Number, add)
    answer = asyncio.get_running_loop().create_future()
    server.route("wait", Number, lambda *_: answer)
    await server.start()
    busy, talker = (RpcClient(name=name, resolve=server.address) for name in ("busy", "talker"))
    waiting = asyncio.create_task(busy.call("wait", Number(value=1), Number, timeout=10))
    await until(lambda: server.counters.calls["wait"] == 1)
    await talker.call("add", Number(value=1), Number, timeout=10)
    silent = await greet(stranger(server))
    await talker.call("add", Number(value=1), Number, timeout=10)
    await asyncio.sleep(0.06)
    assert await serves(server)
    assert silent.recv(1) == b""
    assert server.counters.refused == {"full": 1}
    answer.set_result(Number(value=2))
    assert (await waiting).value == 2
    for client in (busy, talker):
        await client.close()
    silent.close()
    await server.close()


async def test_without_descriptors_new_peers_wait_and_are_let_in_later(no_descriptors: Any) -> None:
    server = await serve()
    waiting = socket.socket()
    with no_descriptors():
        waiting.setblocking(False)
        waiting.connect_ex(host_and_port(server.address))
        before = time.process_time()
        await asyncio.sleep(0.3)
        assert time.process_time() - before < 0.2
    waiting.send(framing.hello(None))
    await welcomed(waiting)
    waiting.close()
    assert await serves(server)
    await server.close()


async def test_a_peer_that_does_not_finish_the_handshake_is_cut_off(monkeypatch: Any) -> None:
    monkeypatch.setattr(listener, "GREETING_S", 0.05)
    server = await serve()
    with stranger(server) as silent:
        await until(lambda: refusals(server) == 1)
        assert silent.recv(1) == b""
    assert await serves(server)
    await server.close()


def half_way(server: RpcServer) -> list[weakref.ref[Any]]:
    """Return the boxes of the only peer of a server, once there is something in them."""
    for peer in server._peers:
        if peer._inbox._stream or peer._inbox._missing or not peer.idle:
            return [weakref.ref(peer._inbox), weakref.ref(peer.outbox)]
    return []


@pytest.mark.parametrize("asks", [False, True])
async def test_what_a_connection_held_goes_with_it_without_the_garbage_collector(asks: bool) -> None:
    server = await serve()
    gone = stranger(server)
    await greet(gone)
    outbox = Outbox()
    call = framing.encode(framing.Call(1, "add", 60.0, 1))
    outbox.push(1, [call, framing.encode(Number(value=1)), bytes(20_000_000)])
    data = b"".join(iter(outbox.next, None))  # type: ignore[arg-type]
    gc.disable()
    try:
        gone.setblocking(True)
        await asyncio.to_thread(gone.sendall, data if asks else data[:10_000_000])
        await until(lambda: server.counters.calls["add"] == asks)
        await until(lambda: bool(half_way(server)))
        boxes = half_way(server)
        gone.close()
        await until(lambda: not any(box() for box in boxes))
    finally:
        gc.enable()
    assert await serves(server)
    await server.close()


async def test_huge_declared_sizes_take_no_memory_and_end_the_stream() -> None:
    server = await serve(max_message=1 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    many = []
    for _ in range(50):
        made = stranger(server)
        await greet(made)
        made.send(struct.pack("<QIQ", 12, 1, (1 << 30) - 1))
        many.append(made)
    await asyncio.sleep(0.05)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000
    liar = stranger(server)
    await greet(liar)
    liar.send(struct.pack("<QIQ", 12, 1, 1 << 31))
    await until(lambda: refusals(server) == 1)
    for made in (*many, liar):
        made.close()
    assert await serves(server)
    await server.close()


async def test_who_does_not_read_what_it_asks_for_is_cut_off(monkeypatch: Any) -> None:
    monkeypatch.setattr(serving, "_MAX_UNREAD", 20)
    server = await serve()
    greedy = stranger(server)
    await greet(greedy)
    outbox = Outbox()
    frame = bytes(1 << 20)
    for call in range(60):
        outbox.push(call, [framing.encode(framing.Call(call, "add", 60.0, 1)), framing.encode(Number(value=1)), frame])
    async with asyncio.timeout(10):
        with contextlib.suppress(OSError):
            await push(greedy, outbox)
    await until(lambda: refusals(server) == 1)
    greedy.close()
    assert await serves(server)
    await server.close()


BOUND, BLOB = 2 << 20, 1 << 20


async def serve_blobs(monkeypatch: pytest.MonkeyPatch, credentials: Credentials | None = None) -> RpcServer:
    """Serve ``blob``, answered at once by so many bytes, where few bytes may lie unsent for a peer."""
    monkeypatch.setattr(serving, "_MOST_UNSENT", BOUND)
    server = RpcServer(name="server", credentials=credentials, access=OPEN)
    server.route("add", Number, add)
    server.route("blob", Number, lambda asked, _: (asked, [bytes(asked.value)]))
    await server.start()
    return server


class Asks:
    """Asks for blobs, and reads only when it is told to."""

    def __init__(self, server: RpcServer, credentials: Credentials | None = None) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self.socket.settimeout(10)
        self.socket.connect(host_and_port(server.address))
        self.socket.setblocking(False)
        self._credentials = credentials
        self._calls = itertools.count()

    async def greet(self) -> None:
        self.socket = await greet(self.socket, self._credentials)
        self._outbox, self._inbox = Outbox(), Inbox(most=1 << 30)

    def ask(self, count: int, *, size: int = BLOB) -> None:
        for call in itertools.islice(self._calls, count):
            self._outbox.push(
                call, [framing.encode(framing.Call(call, "blob", 60.0, 0)), framing.encode(Number(value=size))]
            )
        self.socket.sendall(b"".join(iter(self._outbox.next, None)))  # type: ignore[arg-type]

    async def read(self, count: int) -> list[tuple[int, int]]:
        """Return call and bytes of each of the next answers."""
        came: list[list[memoryview]] = []
        async with asyncio.timeout(30):
            while len(came) < count:
                try:
                    came += self._inbox.took(self.socket.recv_into(self._inbox.room()))
                except AGAIN:
                    await asyncio.sleep(0.001)
        return [(framing.read_answer(parts, where="test")[0], len(parts[2])) for parts in came]


def lies_unsent(server: RpcServer) -> int:
    """Return the bytes that lie for the first peer of a server."""
    return next(iter(server._peers)).outbox.unsent


async def test_who_reads_slowly_is_heard_no_more_until_it_has_read_and_then_gets_every_answer(
    credentials: Credentials | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await serve_blobs(monkeypatch, credentials)
    slow = Asks(server, credentials)
    await slow.greet()
    slow.ask(50)  # in one go: most are here, whole, when the first answers do not go
    await until(lambda: lies_unsent(server) > BOUND)
    slow.ask(50)
    await asyncio.sleep(0.1)
    assert lies_unsent(server) <= BOUND + BLOB + 1000
    begun = server.counters.calls["blob"]
    assert begun < 50
    assert await serves(server, credentials)
    for read in range(10, 110, 10):
        assert await slow.read(10) == [(call, BLOB) for call in range(read - 10, read)]
        assert lies_unsent(server) <= BOUND + BLOB + 1000
        assert read <= server.counters.calls["blob"] <= read + begun + 10
    slow.ask(1)
    assert await slow.read(1) == [(100, BLOB)]
    assert not server.counters.dropped
    slow.socket.close()
    await server.close()


async def test_one_answer_may_be_larger_than_what_may_lie_unsent(
    credentials: Credentials | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await serve_blobs(monkeypatch, credentials)
    slow = Asks(server, credentials)
    await slow.greet()
    for sizes in (20 * BOUND, 1, 20 * BOUND):
        slow.ask(1, size=sizes)
    await until(lambda: lies_unsent(server) > BOUND)
    assert server.counters.calls["blob"] == 1
    assert await slow.read(3) == [(0, 20 * BOUND), (1, 1), (2, 20 * BOUND)]
    slow.socket.close()
    await server.close()


async def test_a_peer_that_goes_away_while_it_is_not_heard_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    server = await serve_blobs(monkeypatch)
    gone = Asks(server)
    await gone.greet()
    gone.ask(50)
    await until(lambda: lies_unsent(server) > BOUND)
    (peer,) = server._peers
    kept = [weakref.ref(peer), weakref.ref(peer.outbox), weakref.ref(peer._inbox)]
    assert peer._waiting
    begun = server.counters.calls["blob"]
    gc.disable()
    try:
        del peer
        gone.socket.close()
        await until(lambda: not any(what() for what in kept))
    finally:
        gc.enable()
    assert not server._peers
    assert server.counters.calls["blob"] == begun
    assert await serves(server)
    await server.close()


@pytest.mark.usefixtures("way")
async def test_a_client_that_sends_much_before_it_reads_gets_through(
    credentials: Credentials | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await serve_blobs(monkeypatch, credentials)
    client = RpcClient(name="client", resolve=server.address, credentials=credentials)
    calls = [
        client.call_frames("add", Number(value=number), Number, timeout=20, frames=[bytes(BLOB)])
        for number in range(60)
    ]
    for number, (answer, came) in enumerate(await asyncio.gather(*calls)):
        assert (answer.value, len(came[0])) == (number + 1, BLOB)
    await client.close()
    await server.close()


async def test_a_large_part_that_comes_in_small_chunks_is_there_with_its_last_byte(
    credentials: Credentials | None,
) -> None:
    server = await serve(credentials)
    with contextlib.closing(await greet(stranger(server), credentials)) as slow:
        outbox = Outbox()
        for call, size in enumerate((1_300_000, 70_000, 3, 600_000)):
            header, body = framing.encode(framing.Call(call, "add", 60.0, 1)), framing.encode(Number(value=1))
            outbox.push(call, [header, body, bytes(size)])
            while (piece := outbox.next()) is not None:
                for begin in range(0, len(piece), 50_000):
                    await send(slow, piece[begin : begin + 50_000])
            await until(lambda call=call: server.counters.calls["add"] == call + 1)  # type: ignore[misc]
    await server.close()


def fail_at(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Leave no memory when a large part is to go for the ``at``-th time."""
    calls, cut = iter(range(1, 100)), Outbox._encode

    def failing(outbox: Outbox, parts: Sequence[Buffer]) -> Any:
        if any(memoryview(part).nbytes >= LARGE for part in parts) and next(calls) == at:
            raise MemoryError
        return cut(outbox, parts)

    monkeypatch.setattr(Outbox, "_encode", failing)


@pytest.mark.usefixtures("way")
async def test_a_stream_ends_with_an_answer_that_could_not_be_sent_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    server = await serve()
    client = RpcClient(name="client", resolve=server.address)
    frames = [np.arange(100_000).data]
    fail_at(monkeypatch, 2)
    with pytest.raises(PeerLost):
        await client.call_frames("add", Number(value=1), Number, timeout=10, frames=frames)
    _, came = await client.call_frames("add", Number(value=1), Number, timeout=10, frames=frames)
    assert came[0] == frames[0].cast("B")
    await client.close()
    await server.close()


@pytest.mark.usefixtures("way")
async def test_a_connection_ends_with_a_call_that_could_not_be_sent_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    server = await serve()
    client = RpcClient(name="client", resolve=server.address)
    frames = [np.arange(100_000).data]
    await client.call("add", Number(value=1), Number, timeout=10)
    fail_at(monkeypatch, 1)
    with pytest.raises(MemoryError):
        await client.call_frames("add", Number(value=1), Number, timeout=10, frames=frames)
    _, came = await client.call_frames("add", Number(value=1), Number, timeout=10, frames=frames)
    assert came[0] == frames[0].cast("B")
    assert server.counters.calls["add"] == 2
    await client.close()
    await server.close()


async def test_calls_of_a_peer_that_does_not_read_begin_two_at_a_time(credentials: Credentials | None) -> None:
    server, begun, answer = await serve(credentials), [0], asyncio.Event()

    async def blob(_request: Number, _frames: Sequence[memoryview]) -> tuple[Number, Sequence[memoryview]]:
        begun[0] += 1
        if begun[0] > 1:
            await answer.wait()
        return Number(value=1), [bytes(8 << 20)]

    server.route("blob", Number, blob)
    greedy = await greet(stranger(server), credentials)
    outbox = Outbox()
    outbox.push(0, [framing.encode(framing.Call(0, "blob", 60.0, 0)), framing.encode(Number(value=0))])
    await push(greedy, outbox)
    await until(lambda: begun[0] == 1)
    await asyncio.sleep(0.1)
    for number in range(1, 9):
        outbox.push(number, [framing.encode(framing.Call(number, "blob", 60.0, 0)), framing.encode(Number(value=0))])
    await push(greedy, outbox)
    await until(lambda: begun[0] == 3)
    await asyncio.sleep(0.1)
    assert begun[0] == 3
    assert await serves(server, credentials)
    answer.set()
    inbox, answered = Inbox(most=1 << 30), 0
    async with asyncio.timeout(30):
        while answered < 9:
            with contextlib.suppress(*AGAIN):
                answered += len(inbox.took(greedy.recv_into(inbox.room())))
            await asyncio.sleep(0)
    assert begun[0] == 9
    greedy.close()
    await server.close()


async def push(made: Any, outbox: Outbox) -> None:
    """Send all that lies in ``outbox``."""
    async with asyncio.timeout(10):
        while (piece := outbox.next()) is not None:
            await send(made, piece)


async def send(made: Any, chunk: bytes | bytearray | memoryview) -> None:
    while len(chunk):
        with contextlib.suppress(*AGAIN):
            chunk = chunk[made.send(chunk) :]
        await asyncio.sleep(0)
