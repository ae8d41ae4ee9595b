"""Processes that tests of sockets kill, and servers that end with the test."""

import asyncio
import gc
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass
from pathlib import Path

import pytest

from asyncflow.local.issuer import keep
from asyncflow.plan.certificates import Authority, period_of
from asyncflow.rpc import framing
from asyncflow.rpc.addresses import ANY_SERVER, address_of, host_and_port
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.framing import Inbox, Outbox
from asyncflow.rpc.server import RpcServer
from asyncflow.rpc.shm import SHARED_MEMORY_ENV
from asyncflow.rpc.tls import Credentials

ANY_PORT = "tcp://127.0.0.1:*"
_MEMFD = "memfd:asyncflow"


@dataclass
class Peer:
    process: subprocess.Popen[str]
    said: str

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


Spawn = Callable[..., Peer]
NoDescriptors = Callable[[], AbstractContextManager[None]]


@contextmanager
def _no_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    fillers = []
    try:
        with suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)


@pytest.fixture
def no_descriptors() -> NoDescriptors:
    """In it this process has no descriptor left."""
    return _no_descriptors


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    peers: list[Peer] = []

    def start(kind: str, argument: str = ANY_PORT) -> Peer:
        command = [sys.executable, str(Path(__file__).with_name("peer_process.py")), kind, argument]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        peers.append(Peer(process, process.stdout.readline().strip()))
        return peers[-1]

    yield start
    for peer in peers:
        peer.kill()
        assert peer.process.stdout is not None
        peer.process.stdout.close()


class Stranger:
    """Says anything to a peer, and hears what it says."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.outbox, self.inbox = Outbox(), Inbox(most=1 << 30)
        self.came: list[list[memoryview]] = []

    async def greet(self) -> None:
        self.writer.write(framing.hello(None))
        framing.check_welcome(await self.next_message(), dialled=ANY_SERVER)

    async def welcome(self) -> None:
        assert framing.caller(await self.next_message()) is None
        self.writer.write(framing.welcome(ANY_SERVER))

    async def send(self, parts: Sequence[bytes]) -> None:
        self.outbox.push("message", parts)
        while (piece := self.outbox.next()) is not None:
            self.writer.write(piece)
        await self.writer.drain()

    async def next_message(self) -> list[memoryview]:
        while not self.came:
            room = self.inbox.room()
            data = await self.reader.read(len(room))
            assert data, "the peer closed the stream"
            room[: len(data)] = data
            self.came += self.inbox.took(len(data))
        return self.came.pop(0)

    async def receive(self) -> list[bytes]:
        return [bytes(part) for part in await self.next_message()]

    def close(self) -> None:
        self.writer.close()


@pytest.fixture
def stranger() -> Callable[..., AbstractAsyncContextManager[Stranger]]:
    """Connects to a server and shakes hands with it."""

    @asynccontextmanager
    async def connect(server: RpcServer) -> AsyncIterator[Stranger]:
        made = Stranger(*await asyncio.open_connection(*host_and_port(server.address)))
        try:
            await made.greet()
            yield made
        finally:
            made.close()

    return connect


@pytest.fixture
async def impostor() -> AsyncIterator[tuple[str, asyncio.Future[Stranger]]]:
    """An address, and whoever answers there."""
    called: asyncio.Future[Stranger] = asyncio.get_running_loop().create_future()
    listening = await asyncio.start_server(lambda *ends: called.set_result(Stranger(*ends)), "127.0.0.1", 0)
    yield address_of(*listening.sockets[0].getsockname()), called
    if called.done():
        called.result().close()
    listening.close()


JOB = "job-7"
Given = Callable[..., Path]


@pytest.fixture
def given(tmp_path: Path) -> Given:
    """Write the credentials of a process and return their folder. named: the job that its certificate names."""

    def write(
        role: str = "rollout",
        index: int = 0,
        *,
        job: str = JOB,
        seed: bytes = bytes(32),
        periods: int = 0,
        named: str = "",
    ) -> Path:
        authority = Authority(seed=seed, job=job)
        authority.job = named or job
        leaf = authority.leaf(role, index, period=period_of(time.time()) + periods)
        folder = tmp_path / f"{role}-{index}"
        keep(folder, authority=authority.certificate, leaf=leaf)
        return folder

    return write


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def credentials(request: pytest.FixtureRequest, given: Given) -> Credentials | None:
    """Those of a rollout, by which both sides of a test speak TLS; or none."""
    return Credentials(given("rollout", 0)) if request.param else None


class Arenas:
    """The number of arenas that a process has open or mapped, except for those that this one had before the test."""

    def __init__(self) -> None:
        gc.collect()
        self._before = set(_arenas("self"))

    def __call__(self, process: int | str = "self") -> int:
        if self._there(process):
            gc.collect()
        return self._there(process)

    async def until_none(self, process: int | str = "self") -> None:
        async with asyncio.timeout(10):
            for _ in range(20):
                if not self._there(process):
                    return
                await asyncio.sleep(0.01)
            while self(process):
                await asyncio.sleep(0.1)

    def _there(self, process: int | str) -> int:
        return sum(inode not in self._before for inode in _arenas(process))


def _arenas(process: int | str) -> list[int]:
    """Return the inode of each mapping and descriptor of an arena."""
    folder = Path(f"/proc/{process}")
    found = [int(line.split()[4]) for line in (folder / "maps").read_text().splitlines() if _MEMFD in line]
    for file in (folder / "fd").iterdir():
        with suppress(OSError):
            if _MEMFD in str(file.readlink()):
                found.append(file.stat().st_ino)
    return found


@pytest.fixture
def arenas() -> Arenas:
    return Arenas()


@pytest.fixture
async def server() -> AsyncIterator[RpcServer]:
    made = RpcServer(name="server")
    await made.start()
    yield made
    await made.close()


@pytest.fixture
async def client(server: RpcServer) -> AsyncIterator[RpcClient]:
    made = RpcClient(name="client", resolve=server.address)
    yield made
    await made.close()


@pytest.fixture(params=["tcp", "shared memory"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The way that bytes go between processes of this host."""
    monkeypatch.setenv(SHARED_MEMORY_ENV, "off" if request.param == "tcp" else "on")
    return str(request.param)
