"""Shared memory between peers of one host, on real sockets: who gets it, who does without, and hostile callers."""

import asyncio
import contextlib
import os
import re
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import Struct

from asyncflow.errors import AsyncFlowError
from asyncflow.net.arena import memfd, unix
from asyncflow.net.arena.unix import SHARED_MEMORY_ENV
from asyncflow.net.hosts import host_and_port
from asyncflow.net.keys import Keys
from asyncflow.net.rpc import RpcClient, RpcServer, answering
from asyncflow.net.rpc.blocking_link import BlockingLink
from asyncflow.net.rpc.wire import read_answer
from asyncflow.net.stream.handshake import HELLO_SIZE, WELCOME_SIZE, Handshake

LARGE = np.random.default_rng(0).integers(0, 255, 13_000_000, np.uint8).data
FRAMES = [b"small", LARGE, b"", LARGE[:70_000]]


class Number(Struct, frozen=True, kw_only=True):
    value: int


async def add(request: Number, frames: Sequence[memoryview]) -> tuple[Number, Sequence[memoryview]]:
    return Number(value=request.value + 1), frames


async def serve(keys: Keys | None = None) -> RpcServer:
    server = RpcServer(name="server", bind="tcp://127.0.0.1:*", keys=keys)
    server.route("add", Number, add)
    await server.start()
    return server


async def moves(server: RpcServer, keys: Keys | None = None) -> None:
    """Move bytes to and fro by both clients."""
    client = RpcClient(name="client", resolve=server.address, keys=keys)
    for _ in range(2):
        _, frames = await client.call_frames("add", Number(value=1), Number, timeout=20, frames=FRAMES)
        assert [bytes(frame) for frame in frames] == [bytes(frame) for frame in FRAMES]
        assert not any(frame.readonly for frame in frames)
    await client.close()
    link = BlockingLink(server.address, keys=keys, max_message=1 << 30)
    for call in range(2):
        parts = await asyncio.to_thread(ask, link, call)
        assert [bytes(part) for part in parts[2:]] == [bytes(frame) for frame in FRAMES]
    link.close()


def ask(link: Any, call: int) -> list[memoryview]:
    link.send(call, "add", Number(value=1), FRAMES, deadline=time.monotonic() + 20)
    while not (parts := link.receive(20)):
        pass
    assert read_answer(parts, where="test") == (call, None)
    return list(parts)


def files() -> list[str]:
    names = []
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            names.append(str(file.readlink()))
    return names


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.01)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, arenas: Any) -> Iterator[list[int]]:
    """The sizes of all arenas that this process takes from callers, as a server, while the test runs."""
    taken: list[int] = []
    check = memfd.check

    def watched(file: int) -> None:
        check(file)
        taken.append(os.fstat(file).st_size)

    monkeypatch.setattr(memfd, "check", watched)
    yield taken
    assert arenas() == 0


@pytest.mark.parametrize("keyed", [False, True])
async def test_peers_of_one_host_share_memory(made: list[int], keyed: bool, tmp_path: Path, arenas: Any) -> None:
    keys = Keys.generate(tmp_path / "key") if keyed else None
    server = await serve(keys)
    await moves(server, keys)
    await arenas.until_none()
    assert len(made) == 4
    await server.close()


async def test_it_can_be_switched_off(made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    server = await serve()
    monkeypatch.setenv(SHARED_MEMORY_ENV, "off")
    await moves(server)
    await server.close()
    server = await serve()
    monkeypatch.delenv(SHARED_MEMORY_ENV)
    await moves(server)
    await server.close()
    assert made == []


async def test_who_holds_another_key_is_refused_here_too(made: list[int], tmp_path: Path, arenas: Any) -> None:
    server = await serve(Keys.generate(tmp_path / "ours"))
    for keys in (Keys.generate(tmp_path / "theirs"), None):
        link = BlockingLink(server.address, keys=keys, max_message=1 << 20)
        with pytest.raises(Exception, match="key"):
            await asyncio.to_thread(link.send, 1, "add", Number(value=1), [], deadline=time.monotonic() + 0.3)
        link.close()
    assert server.counters.calls["add"] == 0
    assert len(made) >= 4
    await arenas.until_none()
    await server.close()


@pytest.mark.parametrize("side", ["caller", "answerer"])
async def test_peers_that_run_as_different_users_do_without(
    made: list[int], monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    server = await serve()
    known = iter([False, True] if side == "caller" else [True, False])
    monkeypatch.setattr(unix, "_is_ours", lambda _: next(known, False))
    await moves(server)
    assert made == []
    await server.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_the_kernel_says_who_a_peer_is(made: list[int]) -> None:
    server = await serve()
    os.seteuid(1234)
    try:
        assert unix.dialled(server.address) is None
        with pytest.MonkeyPatch.context() as trusting:
            trusting.setattr(unix, "_is_ours", lambda _: True)
            stranger = unix.dialled(server.address)
    finally:
        os.seteuid(0)
    assert stranger is not None
    await until(lambda: server.counters.dropped["peer"] == 2)
    stranger.close()
    await moves(server)
    assert len(made) == 4
    await server.close()


async def test_a_name_that_somebody_else_has_taken_costs_nothing_but_speed(
    made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(unix._name(address))
        squatter.listen()
        server = RpcServer(name="server", bind=address)
        server.route("add", Number, add)
        await server.start()
        monkeypatch.setattr(unix, "_is_ours", lambda _: False)
        await moves(server)
    assert made == []
    await server.close()


class Relay(threading.Thread):
    """Has taken the name of a server, and passes all that callers say on to that server. heard: what they said."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.heard = bytearray()
        self._to = host_and_port(address)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(unix._name(address))
        self._socket.listen()

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._pass_on(self._socket.accept()[0])

    def _pass_on(self, caller: socket.socket) -> None:
        assert socket.recv_fds(caller, 4, 0)[0] == b"AFm3"
        with caller, socket.create_connection(self._to) as server:
            while True:
                for one in select.select([caller, server], [], [], 10)[0]:
                    said = one.recv(1 << 16)
                    if not said:
                        return
                    if one is caller:
                        self.heard += said
                    (server if one is caller else caller).sendall(said)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.mark.parametrize("keyed", [False, True])
async def test_who_has_taken_a_name_learns_nothing_by_passing_on_what_it_hears(keyed: bool, tmp_path: Path) -> None:
    keys = Keys.generate(tmp_path / "key") if keyed else None
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    relay = Relay(address)
    server = RpcServer(name="server", bind=address, keys=keys)
    server.route("add", Number, add)
    await server.start()
    relay.start()
    client = RpcClient(name="client", resolve=address, keys=keys)
    with contextlib.suppress(AsyncFlowError):
        await client.call_frames("add", Number(value=1), Number, timeout=2, frames=[b"unmistakable"])
    assert (b"unmistakable" in relay.heard) is not keyed
    assert len(relay.heard) >= HELLO_SIZE
    assert server.counters.calls["add"] == 1
    await client.close()
    relay.close()
    await server.close()


async def test_another_network_namespace_has_no_such_name(made: list[int]) -> None:
    server = await serve()
    program = f"from asyncflow.net.arena.unix import dialled; print(dialled({server.address!r}))"
    there = [sys.executable, "-c", program]
    seen = {}
    for where, argv in (("here", there), ("elsewhere", ["unshare", "--user", "--map-root-user", "--net", *there])):
        done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, check=False, timeout=60)
        if done.returncode:
            pytest.skip(f"no network namespace: {done.stderr[-200:]}")
        seen[where] = done.stdout
    assert "ArenaSocket" in seen["here"]
    assert seen["elsewhere"] == "None\n"
    await server.close()


async def test_an_address_too_long_for_a_name_is_served_without() -> None:
    assert unix._name(f"tcp://{'a' * 100}:5571") is None
    assert unix.listening(f"tcp://{'a' * 100}:5571") is None
    assert unix.dialled(f"tcp://{'a' * 100}:5571") is None


def knock(server: RpcServer) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.connect(unix._name(server.address))
    made.settimeout(10)
    return made


def memory(size: int) -> int:
    file = os.memfd_create("hostile", os.MFD_CLOEXEC)
    os.ftruncate(file, size)
    return file


async def test_callers_that_bring_no_arena_are_cut_off(made: list[int]) -> None:
    server = await serve()
    unsealed, ours = memory(8 << 20), memfd.made()
    before = len(files())
    callers = [knock(server) for _ in range(8)]
    hello = Handshake(None).hello()
    callers[0].send(hello)
    callers[1].send(b"AFm3")
    callers[2].send(b"A")
    socket.send_fds(callers[3], [b"AFm3" + hello], [ours, unsealed])
    socket.send_fds(callers[4], [b"AFm4"], [ours, ours])
    socket.send_fds(callers[5], [b"AFm3" + b"GET / HTTP/1.1\r\n" * 10], [unsealed, ours, unsealed])
    socket.send_fds(callers[6], [b"AFm3" + hello], [ours])
    socket.send_fds(callers[7], [b"AFm3" + b"GET / HTTP/1.1\r\n" * 10], [ours, ours, ours])
    await until(lambda: server.counters.dropped["peer"] == 8)
    for caller in callers:
        caller.close()
    assert len(files()) == before
    await moves(server)
    os.close(unsealed)
    os.close(ours)
    await server.close()


async def test_a_caller_that_hands_over_nothing_is_cut_off_in_time(monkeypatch: Any, made: list[int]) -> None:
    monkeypatch.setattr(answering, "_SHAKE_S", 0.05)
    server = await serve()
    with knock(server) as silent:
        await until(lambda: server.counters.dropped["peer"] == 1)
        assert silent.recv(1) == b""
    await moves(server)
    await server.close()


def lie_to(server: RpcServer, lie: bytes) -> bytes:
    """Shake hands, send ``lie``, give the answer."""
    liar = unix.dialled(server.address)
    assert liar is not None
    with liar:
        liar.settimeout(10)
        handshake = Handshake(None)
        liar.send(handshake.hello())
        liar.send(handshake.welcomed(liar.recv(WELCOME_SIZE)) + lie)
        return liar.recv(100)


async def test_whatever_a_caller_says_after_the_handshake_ends_only_its_own_stream(made: list[int]) -> None:
    server = await serve()
    at_no_page = struct.pack("<QIQ", 12, 1, 1 << 63 | 1 << 16)
    for lie in (b"\xff" * 64, b"\x00" * 64, at_no_page, b"GET / HTTP/1.1\r\n"):
        assert await asyncio.to_thread(lie_to, server, lie) == b""
    assert server.counters.dropped["peer"] == 4
    await moves(server)
    await server.close()


async def test_files_that_come_with_later_bytes_are_not_taken(made: list[int]) -> None:
    server = await serve()
    caller, handshake = unix.dialled(server.address), Handshake(None)
    assert caller is not None
    with caller:
        caller.settimeout(10)
        caller.send(handshake.hello())
        welcome = await asyncio.to_thread(caller.recv, WELCOME_SIZE)
        before = len(files())
        socket.send_fds(caller, [handshake.welcomed(welcome) + b"\xff" * 64], [0, 0])
        await until(lambda: server.counters.dropped["peer"] == 1)
        assert len(files()) < before
    await server.close()


async def test_many_connections_leave_no_descriptor_no_mapping_and_no_memory(made: list[int], arenas: Any) -> None:
    server = await serve()
    seen, filled = [], memfd._ALLOWANCE._taken
    for number in range(60):
        link = BlockingLink(server.address, keys=None, max_message=1 << 30)
        until_s = time.monotonic() + 20
        await asyncio.to_thread(link.send, 1, "add", Number(value=1), FRAMES, deadline=until_s)
        if number % 3:
            link.close()
        else:
            await asyncio.to_thread(receive, link)
        del link
        await arenas.until_none()
        seen.append((len(files()), shared_kb()))
    assert len(made) == 120
    assert max(seen[10:]) <= max(seen[:10])
    assert memfd._ALLOWANCE._taken == filled
    await server.close()


def receive(link: Any) -> list[memoryview]:
    while not (parts := link.receive(20)):
        pass
    return list(parts)


def shared_kb() -> int:
    found = re.search(r"RssShmem:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


async def test_two_threads_have_memory_of_their_own(made: list[int], arenas: Any) -> None:
    server = await serve()
    links = [BlockingLink(server.address, keys=None, max_message=1 << 30) for _ in range(2)]
    got: list[list[memoryview]] = []

    def work(link: Any) -> None:
        for call in range(4):
            parts = ask(link, call)
            assert [bytes(part) for part in parts[2:]] == [bytes(frame) for frame in FRAMES]
            got.append(parts)

    threads = [threading.Thread(target=work, args=(link,)) for link in links]
    for thread in threads:
        thread.start()
    await asyncio.to_thread(lambda: [thread.join(60) for thread in threads])
    assert len(got) == 8
    got[0][3][0] = 77
    assert all(bytes(parts[3][1:]) == bytes(LARGE[1:]) for parts in got)
    assert bytes(got[1][3]) == bytes(LARGE)
    for link in links:
        link.close()
    assert all(bytes(parts[3][1:]) == bytes(LARGE[1:]) for parts in got)
    got.clear()
    await arenas.until_none()
    await server.close()


async def test_calls_that_are_sent_while_answers_come_do_not_block_each_other(made: list[int], arenas: Any) -> None:
    server = await serve()
    link = BlockingLink(server.address, keys=None, max_message=1 << 30)

    def work() -> list[list[memoryview]]:
        for call in range(6):
            link.send(call, "add", Number(value=1), FRAMES, deadline=time.monotonic() + 20)
        return [receive(link) for _ in range(6)]

    answers = await asyncio.to_thread(work)
    assert all([bytes(part) for part in parts[2:]] == [bytes(frame) for frame in FRAMES] for parts in answers)
    link.close()
    assert arenas() > 0
    del answers
    await arenas.until_none()
    await server.close()


async def test_a_server_that_comes_later_is_reached_by_shared_memory_too(made: list[int], arenas: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    client = RpcClient(name="client", resolve=address)
    early = asyncio.create_task(client.call("add", Number(value=1), Number, timeout=20))
    await asyncio.sleep(0.3)
    server = RpcServer(name="server", bind=address)
    server.route("add", Number, add)
    await server.start()
    assert (await early).value == 2
    assert len(made) == 2
    await client.close()
    await arenas.until_none()
    await server.close()
