"""Shared memory between peers of one host, on real sockets: who gets it, who does without, and hostile callers."""

import asyncio
import contextlib
import errno
import os
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import Struct

from asyncflow.errors import PeerLost
from asyncflow.local.placement import PortReservation
from asyncflow.rpc import framing, listener, shm
from asyncflow.rpc.access import Access
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.server import RpcServer
from asyncflow.rpc.shm import SHARED_MEMORY_ENV
from asyncflow.rpc.tls import Credentials

LARGE = np.random.default_rng(0).integers(0, 255, 13_000_000, np.uint8).data
OPEN = Access(table={"add": {"rollout": lambda _: ()}})
FRAMES = [b"small", LARGE, b"", LARGE[:70_000]]


class Number(Struct, frozen=True, kw_only=True):
    value: int


async def add(request: Number, frames: Sequence[memoryview]) -> tuple[Number, Sequence[memoryview]]:
    return Number(value=request.value + 1), frames


async def serve(credentials: Credentials | None = None) -> RpcServer:
    server = RpcServer(name="server", bind="tcp://127.0.0.1:*", credentials=credentials, access=OPEN)
    server.route("add", Number, add)
    await server.start()
    return server


async def moves(server: RpcServer, credentials: Credentials | None = None) -> None:
    """Move bytes to and fro."""
    client = RpcClient(name="client", resolve=server.address, credentials=credentials)
    for _ in range(2):
        _, frames = await client.call_frames("add", Number(value=1), Number, timeout=20, frames=FRAMES)
        assert [bytes(frame) for frame in frames] == [bytes(frame) for frame in FRAMES]
        assert not any(frame.readonly for frame in frames)
    await client.close()


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
    check = shm.check

    def watched(file: int) -> None:
        check(file)
        taken.append(os.fstat(file).st_size)

    monkeypatch.setattr(shm, "check", watched)
    yield taken
    assert arenas() == 0


async def test_peers_of_one_host_share_memory(made: list[int], credentials: Credentials | None, arenas: Any) -> None:
    server = await serve(credentials)
    await moves(server, credentials)
    await arenas.until_none()
    assert len(made) == 2
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


@pytest.mark.parametrize("side", ["caller", "answerer"])
async def test_peers_that_run_as_different_users_do_without(
    made: list[int], monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    server = await serve()
    known = iter([False, True] if side == "caller" else [True, False])
    monkeypatch.setattr(shm, "is_same_user", lambda _: next(known, False))
    await moves(server)
    assert made == []
    await server.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_the_kernel_says_who_a_peer_is(made: list[int]) -> None:
    server = await serve()
    os.seteuid(1234)
    try:
        assert shm.dialled(server.address) is None
        with pytest.MonkeyPatch.context() as trusting:
            trusting.setattr(shm, "is_same_user", lambda _: True)
            stranger = shm.dialled(server.address)
    finally:
        os.seteuid(0)
    assert stranger is not None
    await until(lambda: server.counters.refused.total() == 2)
    stranger[0].close()
    stranger[1].close()
    await moves(server)
    assert len(made) == 2
    await server.close()


async def test_a_name_that_somebody_else_has_taken_costs_nothing_but_speed(
    made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with PortReservation(1) as (port,):
        address = f"tcp://127.0.0.1:{port}"
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(shm._name(address))
        squatter.listen()
        server = RpcServer(name="server", bind=address)
        server.route("add", Number, add)
        await server.start()
        monkeypatch.setattr(shm, "is_same_user", lambda _: False)
        await moves(server)
    assert made == []
    await server.close()


async def test_another_network_namespace_has_no_such_name(made: list[int]) -> None:
    server = await serve()
    program = f"from asyncflow.rpc.shm import dialled; print(dialled({server.address!r}))"
    there = [sys.executable, "-c", program]
    seen = {}
    for where, argv in (("here", there), ("elsewhere", ["unshare", "--user", "--map-root-user", "--net", *there])):
        done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, check=False, timeout=60)
        if done.returncode:
            pytest.skip(f"no network namespace: {done.stderr[-200:]}")
        seen[where] = done.stdout
    assert "Arenas" in seen["here"]
    assert seen["elsewhere"] == "None\n"
    await server.close()


async def test_an_address_too_long_for_a_name_is_served_without() -> None:
    assert shm._name(f"tcp://{'a' * 100}:5571") is None
    assert shm.listening(f"tcp://{'a' * 100}:5571") is None
    assert shm.dialled(f"tcp://{'a' * 100}:5571") is None


def knock(server: RpcServer) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.connect(shm._name(server.address))
    made.settimeout(10)
    return made


def memory(size: int) -> int:
    file = os.memfd_create("hostile", os.MFD_CLOEXEC)
    os.ftruncate(file, size)
    return file


async def test_callers_that_bring_no_arena_are_cut_off(made: list[int]) -> None:
    server = await serve()
    unsealed, ours = memory(8 << 20), shm.new_arena()
    before = len(files())
    callers = [knock(server) for _ in range(8)]
    hello = framing.hello(None)
    callers[0].send(hello)
    callers[1].send(b"AFm3")
    callers[2].send(b"A")
    socket.send_fds(callers[3], [b"AFm3" + hello], [ours, unsealed])
    socket.send_fds(callers[4], [b"AFm4"], [ours, ours])
    socket.send_fds(callers[5], [b"AFm3" + b"GET / HTTP/1.1\r\n" * 10], [unsealed, ours, unsealed])
    socket.send_fds(callers[6], [b"AFm3" + hello], [ours])
    socket.send_fds(callers[7], [b"AFm3" + b"GET / HTTP/1.1\r\n" * 10], [ours, ours, ours])
    await until(lambda: server.counters.refused.total() == 8)
    for caller in callers:
        caller.close()
    assert len(files()) == before
    await moves(server)
    os.close(unsealed)
    os.close(ours)
    await server.close()


async def test_a_caller_that_sends_no_files_is_cut_off_in_time(monkeypatch: Any, made: list[int]) -> None:
    monkeypatch.setattr(listener, "GREETING_S", 0.05)
    server = await serve()
    with knock(server) as silent:
        await until(lambda: server.counters.refused.total() == 1)
        assert silent.recv(1) == b""
    await moves(server)
    await server.close()


def lie_to(server: RpcServer, lie: bytes) -> bytes:
    """Shake hands, send ``lie``, give the answer."""
    liar = shm.dialled(server.address)
    assert liar is not None
    (liar, arenas), size = liar, len(framing.welcome(framing.ANY_SERVER))
    with liar, contextlib.closing(arenas):
        liar.settimeout(10)
        liar.send(framing.hello(None))
        assert len(liar.recv(size)) == size
        liar.send(lie)
        return liar.recv(100)


async def test_whatever_a_caller_says_after_the_handshake_ends_only_its_own_stream(made: list[int]) -> None:
    server = await serve()
    at_no_page = struct.pack("<QIQ", 12, 1, 1 << 63 | 1 << 16)
    for lie in (b"\xff" * 64, b"\x00" * 64, at_no_page, b"GET / HTTP/1.1\r\n"):
        assert await asyncio.to_thread(lie_to, server, lie) == b""
    assert server.counters.refused.total() == 4
    await moves(server)
    await server.close()


async def test_files_that_come_after_the_first_bytes_are_not_taken(made: list[int]) -> None:
    server = await serve()
    caller = shm.dialled(server.address)
    assert caller is not None
    caller, arenas = caller
    with caller, contextlib.closing(arenas):
        caller.settimeout(10)
        caller.send(framing.hello(None))
        await asyncio.to_thread(caller.recv, len(framing.welcome(framing.ANY_SERVER)))
        before = len(files())
        socket.send_fds(caller, [b"\xff" * 64], [0, 0])
        await until(lambda: server.counters.refused.total() == 1)
        assert len(files()) < before
    await server.close()


async def test_many_connections_leave_no_descriptor_no_mapping_and_no_memory(made: list[int], arenas: Any) -> None:
    server = await serve()
    seen, filled = [], shm._ALLOWANCE.taken
    for number in range(60):
        client = RpcClient(name="client", resolve=server.address)
        call = asyncio.create_task(client.call_frames("add", Number(value=1), Number, timeout=20, frames=FRAMES))
        if number % 3:
            await until(lambda number=number: server.counters.calls["add"] > number)  # type: ignore[misc]
            await client.close()
            with contextlib.suppress(PeerLost):
                await call
        else:
            await call
            await client.close()
        del client, call
        await arenas.until_none()
        seen.append((len(files()), shared_kb()))
    assert len(made) == 120
    assert max(seen[10:]) <= max(seen[:10])
    assert shm._ALLOWANCE.taken == filled
    await server.close()


def shared_kb() -> int:
    found = re.search(r"RssShmem:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


async def test_two_threads_have_memory_of_their_own(made: list[int], arenas: Any) -> None:
    server = await serve()
    got: list[list[memoryview]] = []

    async def work() -> None:
        client = RpcClient(name="client", resolve=server.address)
        for _ in range(4):
            _, frames = await client.call_frames("add", Number(value=1), Number, timeout=20, frames=FRAMES)
            assert [bytes(frame) for frame in frames] == [bytes(frame) for frame in FRAMES]
            got.append(frames)
        await client.close()

    threads = [threading.Thread(target=lambda: asyncio.run(work())) for _ in range(2)]
    for thread in threads:
        thread.start()
    await asyncio.to_thread(lambda: [thread.join(60) for thread in threads])
    assert len(got) == 8
    got[0][1][0] = 77
    assert all(bytes(frames[1][1:]) == bytes(LARGE[1:]) for frames in got)
    assert bytes(got[1][1]) == bytes(LARGE)
    got.clear()
    await arenas.until_none()
    await server.close()


async def test_calls_that_are_sent_while_answers_come_do_not_block_each_other(made: list[int], arenas: Any) -> None:
    server = await serve()
    client = RpcClient(name="client", resolve=server.address)
    calls = [client.call_frames("add", Number(value=1), Number, timeout=20, frames=FRAMES) for _ in range(6)]
    answers = [frames for _, frames in await asyncio.gather(*calls)]
    assert all([bytes(frame) for frame in frames] == [bytes(frame) for frame in FRAMES] for frames in answers)
    await client.close()
    assert arenas() > 0
    del answers
    await arenas.until_none()
    await server.close()


async def test_a_server_that_starts_after_its_client_is_reached_by_shared_memory_too(
    made: list[int], arenas: Any
) -> None:
    with PortReservation(1) as (port,):
        address = f"tcp://127.0.0.1:{port}"
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


async def test_a_caller_that_can_make_one_arena_only_does_without_and_keeps_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, arena, made = await serve(), shm.new_arena, []

    def one() -> int:
        if made:
            raise OSError(errno.EMFILE, "too many open files")
        made.append(arena())
        return made[0]

    monkeypatch.setattr(shm, "new_arena", one)
    assert shm.dialled(server.address) is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made[0])
    await server.close()
