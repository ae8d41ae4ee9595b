"""Streams on real sockets: what strangers and broken peers do to a server, and calls from a thread that blocks."""

import asyncio
import contextlib
import gc
import itertools
import resource
import socket
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import Struct

from asyncflow.errors import DeadlineExceeded, PeerLost, ProtocolError
from asyncflow.net.arena.messages import ArenaOutbox
from asyncflow.net.hosts import host_and_port
from asyncflow.net.keys import Keys
from asyncflow.net.rpc import RpcClient, RpcServer, answering, wire
from asyncflow.net.rpc.blocking_link import BlockingLink
from asyncflow.net.rpc.staging import staging
from asyncflow.net.stream.handshake import HELLO_SIZE, PROOF_SIZE, WELCOME_SIZE, Handshake
from asyncflow.net.stream.inbox import Inbox
from asyncflow.net.stream.outbox import Outbox


class Number(Struct, frozen=True, kw_only=True):
    value: int


async def add(request: Number, frames: Sequence[memoryview]) -> tuple[Number, Sequence[memoryview]]:
    return Number(value=request.value + 1), frames


@pytest.fixture(params=[False, True], ids=["plain", "sealed"])
def keys(request: pytest.FixtureRequest, tmp_path: Path) -> Keys | None:
    return Keys.generate(tmp_path / "key") if request.param else None


async def serve(keys: Keys | None = None, **options: Any) -> RpcServer:
    server = RpcServer(name="server", keys=keys, **options)
    server.route("add", Number, add)
    await server.start()
    return server


async def serves(server: RpcServer, keys: Keys | None = None) -> bool:
    client = RpcClient(name="client", resolve=server.address, keys=keys)
    answer = await client.call("add", Number(value=1), Number, timeout=10)
    await client.close()
    return answer.value == 2


def stranger(server: RpcServer) -> socket.socket:
    made = socket.create_connection(host_and_port(server.address), timeout=10)
    made.setblocking(False)
    return made


async def welcomed(made: socket.socket) -> bytes:
    welcome = b""
    async with asyncio.timeout(10):
        while len(welcome) < WELCOME_SIZE:
            with contextlib.suppress(BlockingIOError):
                welcome += made.recv(WELCOME_SIZE - len(welcome))
            await asyncio.sleep(0.001)
    return welcome


async def greet(made: socket.socket) -> None:
    handshake = Handshake(None)
    made.send(handshake.hello())
    made.send(handshake.welcomed(await welcomed(made)))


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("way")
async def test_calls_with_keys_and_without(keys: Keys | None) -> None:
    server = await serve(keys)
    client = RpcClient(name="client", resolve=server.address, keys=keys)
    large = np.random.default_rng(0).integers(0, 255, 3_000_000, np.uint8)
    sent = [b"", b"small", large.data, np.arange(100_000, dtype=np.float64).data]
    for _ in range(3):
        _, frames = await client.call_frames("add", Number(value=1), Number, timeout=10, frames=sent)
        assert [bytes(frame) for frame in frames] == [memoryview(frame).tobytes() for frame in sent]
        assert not any(frame.readonly for frame in frames)
    await client.close()
    await server.close()


@pytest.mark.usefixtures("way")
async def test_who_has_another_key_or_none_is_told_so(tmp_path: Path) -> None:
    ours, theirs = Keys.generate(tmp_path / "ours"), Keys.generate(tmp_path / "theirs")
    server, plain = await serve(ours), await serve()
    for address, keys in ((server.address, theirs), (server.address, None), (plain.address, theirs)):
        client = RpcClient(name="client", resolve=address, keys=keys)
        with pytest.raises(DeadlineExceeded, match="do both sides hold the key"):
            await client.call("add", Number(value=1), Number, timeout=0.5)
        await client.close()
        link = BlockingLink(address, keys=keys, max_message=1 << 20)
        with pytest.raises(DeadlineExceeded, match="key"):
            await asyncio.to_thread(link.send, 1, "add", Number(value=1), [], deadline=time.monotonic() + 0.5)
        link.close()
    assert await serves(server, ours)
    assert server.counters.calls["add"] == 1
    await server.close()
    await plain.close()


async def test_garbage_half_greetings_and_thousands_of_connections(keys: Keys | None, monkeypatch: Any) -> None:
    monkeypatch.setattr(answering, "_MAX_PEERS", 300)
    server = await serve(keys)
    pieces = [b"GET / HTTP/1.1\r\n\r\n".ljust(HELLO_SIZE), b"", b"AFs3", b"AFp3" + bytes(16), b"AFs3" + bytes(64)]
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
    await until(lambda: server.counters.dropped["peer"] >= 700)
    assert await serves(server, keys)  # those who hold on to their connections have made room
    for made in strangers:
        made.close()
    await server.close()


async def test_where_there_are_too_many_peers_those_who_have_shaken_hands_stay(monkeypatch: Any) -> None:
    monkeypatch.setattr(answering, "_MAX_PEERS", 5)
    server = await serve()
    clients = [RpcClient(name="client", resolve=server.address) for _ in range(6)]
    for client in clients[:5]:
        await client.call("add", Number(value=1), Number, timeout=10)
    with pytest.raises(DeadlineExceeded, match="handshake"):
        await clients[5].call("add", Number(value=1), Number, timeout=0.3)
    await clients[0].close()
    for client in clients[1:]:
        await client.call("add", Number(value=1), Number, timeout=10)
        await client.close()
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
    waiting.send(Handshake(None).hello())
    await welcomed(waiting)
    waiting.close()
    assert await serves(server)
    await server.close()


async def test_a_peer_that_does_not_shake_hands_is_cut_off(monkeypatch: Any) -> None:
    monkeypatch.setattr(answering, "_SHAKE_S", 0.05)
    server = await serve()
    with stranger(server) as silent:
        await until(lambda: server.counters.dropped["peer"] == 1)
        assert silent.recv(1) == b""
    assert await serves(server)
    await server.close()


def half_way(server: RpcServer) -> list[weakref.ref[Any]]:
    """Return the boxes of the only peer of a server, once there is something in them."""
    assert server._streams is not None
    for peer in server._streams._peers.values():
        if peer._inbox is not None and peer.outbox is not None and (peer._inbox._filled or not peer.outbox.idle):
            return [weakref.ref(peer._inbox), weakref.ref(peer.outbox)]
    return []


@pytest.mark.parametrize("asks", [False, True])
async def test_what_a_connection_held_goes_with_it_without_the_garbage_collector(asks: bool) -> None:
    server = await serve()
    gone = stranger(server)
    await greet(gone)
    outbox = Outbox(seal=None)
    call = wire.encode(wire.Call(1, "add", 60.0, 1))
    outbox.push(1, [call, wire.encode(Number(value=1)), bytes(20_000_000)])
    first, frame = outbox.views()
    gc.disable()
    try:
        gone.setblocking(True)
        await asyncio.to_thread(gone.sendall, first)
        await asyncio.to_thread(gone.sendall, frame if asks else memoryview(frame)[:10_000_000])
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
    await until(lambda: server.counters.dropped["peer"] == 1)
    for made in (*many, liar):
        made.close()
    assert await serves(server)
    await server.close()


async def test_who_has_not_proved_that_it_holds_the_key_is_not_listened_to(tmp_path: Path) -> None:
    keys = Keys.generate(tmp_path / "key")
    server = await serve(keys)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    recorded = Handshake(keys).hello()
    liar = stranger(server)
    liar.send(recorded)
    await welcomed(liar)
    with contextlib.suppress(OSError):
        liar.send(bytes(PROOF_SIZE) + struct.pack("<QIQ", 12, 1, (1 << 30) - 1) + bytes(1 << 20))
    await until(lambda: server.counters.dropped["peer"] == 1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10_000
    liar.close()
    assert await serves(server, keys)
    await server.close()


async def test_who_does_not_read_what_it_asks_for_is_cut_off(monkeypatch: Any) -> None:
    monkeypatch.setattr(answering, "_MAX_UNREAD", 20)
    server = await serve()
    greedy = stranger(server)
    await greet(greedy)
    outbox = Outbox(seal=None)
    frame = bytes(1 << 20)
    for call in range(60):
        outbox.push(call, [wire.encode(wire.Call(call, "add", 60.0, 1)), wire.encode(Number(value=1)), frame])
    async with asyncio.timeout(10):
        while not server.counters.dropped["peer"]:
            try:
                while views := outbox.views():
                    outbox.sent(greedy.sendmsg(views))
                break
            except BlockingIOError:
                await asyncio.sleep(0)
            except OSError:
                break
    await until(lambda: server.counters.dropped["peer"] == 1)
    greedy.close()
    assert await serves(server)
    await server.close()


BOUND, BLOB = 2 << 20, 1 << 20


async def serve_blobs(monkeypatch: pytest.MonkeyPatch, keys: Keys | None = None) -> RpcServer:
    """Serve ``blob``, answered at once by so many bytes, where few bytes may lie unsent for a peer."""
    monkeypatch.setattr(answering, "_MOST_UNSENT", BOUND)
    server = RpcServer(name="server", keys=keys)
    server.route("add", Number, add)
    server.route_now("blob", Number, lambda asked, _: (asked, [bytes(asked.value)]))
    await server.start()
    return server


class Asks:
    """Asks for blobs, and reads only when it is told to."""

    def __init__(self, server: RpcServer, keys: Keys | None = None) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self.socket.settimeout(10)
        self.socket.connect(host_and_port(server.address))
        self.socket.setblocking(False)
        self._shaking = Handshake(keys)
        self._calls = itertools.count()

    async def greet(self) -> None:
        self.socket.send(self._shaking.hello())
        self.socket.send(self._shaking.welcomed(await welcomed(self.socket)))
        self._outbox = Outbox(seal=self._shaking.outgoing)
        self._inbox = Inbox(most=1 << 30, seal=self._shaking.incoming, staging=staging())

    def ask(self, count: int, *, size: int = BLOB) -> None:
        for call in itertools.islice(self._calls, count):
            self._outbox.push(call, [wire.encode(wire.Call(call, "blob", 60.0, 0)), wire.encode(Number(value=size))])
        while views := self._outbox.views():
            self._outbox.sent(self.socket.sendmsg(views))

    async def read(self, count: int) -> list[tuple[int, int]]:
        """Return call and bytes of each of the next answers."""
        came: list[list[memoryview]] = []
        async with asyncio.timeout(30):
            while len(came) < count:
                try:
                    came += self._inbox.took(self.socket.recv_into(self._inbox.room()))
                except BlockingIOError:
                    await asyncio.sleep(0.001)
        return [(wire.read_answer(parts, where="test")[0], len(parts[2])) for parts in came]


def lies_unsent(server: RpcServer) -> int:
    """Return the bytes that lie for the first peer of a server."""
    assert server._streams is not None
    outbox = next(iter(server._streams._peers.values())).outbox
    return 0 if outbox is None else outbox.unsent


async def test_who_reads_slowly_is_heard_no_more_until_it_has_read_and_then_gets_every_answer(
    keys: Keys | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await serve_blobs(monkeypatch, keys)
    slow = Asks(server, keys)
    await slow.greet()
    slow.ask(50)  # in one go: most are here, whole, when the first answers do not go
    await until(lambda: lies_unsent(server) > BOUND)
    slow.ask(50)
    await asyncio.sleep(0.1)
    assert lies_unsent(server) <= BOUND + BLOB + 1000
    begun = server.counters.calls["blob"]
    assert begun < 50
    assert await serves(server, keys)
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
    keys: Keys | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await serve_blobs(monkeypatch, keys)
    slow = Asks(server, keys)
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
    assert server._streams is not None
    (flow,) = server._streams._peers.values()
    kept = [weakref.ref(flow), weakref.ref(flow.outbox), weakref.ref(flow._inbox)]
    assert flow._unheard
    begun = server.counters.calls["blob"]
    gc.disable()
    try:
        del flow
        gone.socket.close()
        await until(lambda: not any(what() for what in kept))
    finally:
        gc.enable()
    assert not server._streams._peers
    assert server.counters.calls["blob"] == begun
    assert await serves(server)
    await server.close()


@pytest.mark.usefixtures("way")
async def test_a_thread_that_sends_much_before_it_reads_gets_through(
    keys: Keys | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await serve_blobs(monkeypatch, keys)
    link = BlockingLink(server.address, keys=keys, max_message=1 << 30)
    frame = bytes(BLOB)

    def send_all() -> None:
        for call in range(60):
            link.send(call, "add", Number(value=call), [frame], deadline=time.monotonic() + 20)

    await asyncio.to_thread(send_all)
    for call in range(60):
        parts = await asyncio.to_thread(link.receive, 10)
        assert (wire.read_answer(parts, where="test"), len(parts[2])) == ((call, None), BLOB)
    link.close()
    await server.close()


async def test_a_large_part_that_comes_in_small_pieces_is_there_with_its_last_byte(keys: Keys | None) -> None:
    server = await serve(keys)
    handshake = Handshake(keys)
    with stranger(server) as slow:
        slow.send(handshake.hello())
        slow.send(handshake.welcomed(await welcomed(slow)))
        outbox = Outbox(seal=handshake.outgoing)
        for call, size in enumerate((1_300_000, 70_000, 3, 600_000)):
            header, body = wire.encode(wire.Call(call, "add", 60.0, 1)), wire.encode(Number(value=1))
            outbox.push(call, [header, body, bytes(size)])
            while views := outbox.views():
                outbox.sent(slow.send(views[0][:50_000]))
                await asyncio.sleep(0.001)
            await until(lambda call=call: server.counters.calls["add"] == call + 1)  # type: ignore[misc]
    await server.close()


async def test_a_recorded_connection_played_again_does_nothing(tmp_path: Path) -> None:
    keys = Keys.generate(tmp_path / "key")
    server = await serve(keys)
    handshake = Handshake(keys)
    recorded = bytearray(handshake.hello())
    with stranger(server) as first:
        first.send(recorded)
        proof = handshake.welcomed(await welcomed(first))
        first.send(proof)
        recorded += proof
        outbox = Outbox(seal=handshake.outgoing)
        outbox.push(1, [wire.encode(wire.Call(1, "add", 60.0, 0)), wire.encode(Number(value=1))])
        sealed = b"".join(outbox.views())
        recorded += sealed
        first.send(sealed)
        await until(lambda: server.counters.calls["add"] == 1)
        first.send(sealed)
        await until(lambda: server.counters.dropped["peer"] == 1)
    with stranger(server) as again:
        again.send(recorded)
        await until(lambda: server.counters.dropped["peer"] == 2)
    assert server.counters.calls["add"] == 1
    assert await serves(server, keys)
    await server.close()


def ask(link: Any, call: int, value: int, frames: Sequence[Any] = (), *, seconds: float = 10.0) -> list[memoryview]:
    link.send(call, "add", Number(value=value), frames, deadline=time.monotonic() + seconds)
    while not (parts := link.receive(seconds)):
        pass
    assert wire.read_answer(parts, where="test") == (call, None)
    return list(parts)


@pytest.mark.usefixtures("way")
async def test_a_thread_that_blocks_calls_over_a_stream(keys: Keys | None) -> None:
    server = await serve(keys)
    link = BlockingLink(server.address, keys=keys, max_message=1 << 30)
    large = np.random.default_rng(0).integers(0, 255, 3_000_000, np.uint8).data
    for call in range(5):
        parts = await asyncio.to_thread(ask, link, call, 1, [b"small", large])
        assert [bytes(part) for part in parts[2:]] == [b"small", large.tobytes()]
    link.forget(99)
    for call in (6, 7):
        link.send(call, "add", Number(value=1), [], deadline=time.monotonic() + 10)
    came = [await asyncio.to_thread(link.receive, 10) for _ in range(2)]
    assert [wire.read_answer(parts, where="test")[0] for parts in came] == [6, 7]
    assert await asyncio.to_thread(link.receive, 0.01) == []
    link.close()
    await server.close()


@pytest.mark.usefixtures("way")
async def test_answers_that_are_not_read_at_once_wait_and_come_in_order(keys: Keys | None) -> None:
    server = await serve(keys)
    link = BlockingLink(server.address, keys=keys, max_message=1 << 30)
    frame = bytes(60_000)

    def send_all() -> None:
        for call in range(400):
            link.send(call, "add", Number(value=call), [frame], deadline=time.monotonic() + 10)

    await asyncio.to_thread(send_all)
    await until(lambda: server.counters.calls["add"] == 400)
    for call in range(400):
        parts = await asyncio.to_thread(link.receive, 10)
        assert (wire.read_answer(parts, where="test"), parts[2]) == ((call, None), frame)
    link.close()
    await server.close()


def fail_at(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Let there be no memory when a large part is to go for the ``at``-th time."""
    calls = iter(range(1, 100))

    def failing(*_: object) -> None:
        if next(calls) == at:
            raise MemoryError

    monkeypatch.setattr(Outbox, "_elsewhere", failing)
    monkeypatch.setattr(ArenaOutbox, "_elsewhere", failing)


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
async def test_a_link_of_a_thread_ends_with_a_call_that_could_not_be_sent_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = await serve()
    link = BlockingLink(server.address, keys=None, max_message=1 << 30)
    frames = [np.arange(100_000).data]
    await asyncio.to_thread(ask, link, 1, 1, frames)
    fail_at(monkeypatch, 1)
    with pytest.raises(MemoryError):
        await asyncio.to_thread(ask, link, 2, 1, frames)
    with pytest.raises(PeerLost, match="MemoryError"):
        link.receive(10)
    with pytest.raises(PeerLost, match="broke"):
        await asyncio.to_thread(ask, link, 3, 1)
    await server.close()


@pytest.mark.usefixtures("way")
async def test_a_thread_that_blocks_learns_that_its_peer_is_gone() -> None:
    server = await serve()
    link = BlockingLink(server.address, keys=None, max_message=1 << 20)
    await asyncio.to_thread(ask, link, 1, 1)
    await server.close()
    with pytest.raises(PeerLost, match="broke"):
        await asyncio.to_thread(link.receive, 10)
    link.close()


def test_a_thread_that_blocks_says_that_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        link = BlockingLink(f"tcp://127.0.0.1:{taken.getsockname()[1]}", keys=None, max_message=1 << 20)
        with pytest.raises(DeadlineExceeded, match="nobody listens there"):
            link.send(1, "add", Number(value=1), [], deadline=time.monotonic() + 0.2)


def test_a_call_that_is_too_large_is_refused_before_it_is_sent() -> None:
    link = BlockingLink("tcp://127.0.0.1:1", keys=None, max_message=1 << 20)
    with pytest.raises(ProtocolError, match="Split it"):
        link.send(1, "add", Number(value=1), [bytes(1 << 20)], deadline=time.monotonic() + 1)
