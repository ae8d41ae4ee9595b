"""Processes that tests of sockets kill, and servers that end with the test."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from asyncflow.net.rpc import RpcClient, RpcServer

ANY_PORT = "tcp://127.0.0.1:*"


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


@pytest.fixture(params=[ANY_PORT, "stream://127.0.0.1:*"], ids=["zmq", "stream"])
def bind(request: pytest.FixtureRequest) -> str:
    """Where servers listen, in each of the ways that messages travel."""
    return str(request.param)


@pytest.fixture
async def server(bind: str) -> AsyncIterator[RpcServer]:
    made = RpcServer(name="server", bind=bind)
    await made.start()
    yield made
    await made.close()


@pytest.fixture
async def client(server: RpcServer) -> AsyncIterator[RpcClient]:
    made = RpcClient(name="client", resolve=server.address)
    yield made
    await made.close()
