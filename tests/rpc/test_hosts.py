"""Addresses and names: looked up beside whoever waits, again and again until they are there."""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from deadlines import ends_late
from msgspec import Struct

from asyncflow.errors import DeadlineExceeded, ManifestError, Refused
from asyncflow.rpc import addresses
from asyncflow.rpc.addresses import ANY_SERVER
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.server import RpcServer

NAME = "queue.team.svc"


class Number(Struct, frozen=True, kw_only=True):
    value: int


async def add(request: Number, frames: Sequence[memoryview]) -> Number:
    return Number(value=request.value + 1)


class Names:
    """A name server. known: what it knows; asked: how often; answers: cleared, it lets everybody wait."""

    def __init__(self, real: Any) -> None:
        self.known: dict[str, str] = {}
        self.asked = 0
        self.answers = threading.Event()
        self.answers.set()
        self._real = real

    def getaddrinfo(self, host: str, port: int, *, type: int, flags: int) -> Any:  # noqa: A002
        if flags & socket.AI_NUMERICHOST or host != NAME:
            return self._real(host, port, type=type, flags=flags)
        self.asked += 1
        assert threading.current_thread().name == f"look up {NAME}"
        self.answers.wait(30)
        if host not in self.known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self._real(self.known[host], port, type=type, flags=flags)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    made = Names(socket.getaddrinfo)
    monkeypatch.setattr(socket, "getaddrinfo", made.getaddrinfo)
    return made


@pytest.fixture
async def port(server: RpcServer) -> int:
    server.route("add", Number, add)
    return addresses.host_and_port(server.address)[1]


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("tcp://10.0.0.7:5571", ("10.0.0.7", 5571)),
        ("tcp://queue.team.svc:5571", ("queue.team.svc", 5571)),
        ("tcp://[fd00::7]:5571", ("fd00::7", 5571)),
    ],
)
def test_an_address_is_read_and_written(address: str, expected: tuple[str, int]) -> None:
    assert addresses.host_and_port(address) == expected
    assert addresses.address_of(*expected) == address
    assert addresses.server_of(address) == ANY_SERVER
    named = addresses.address_of(*expected, server=b"8 bytes!")
    assert named == f"{address}/3820627974657321"
    assert addresses.host_and_port(named) == expected
    assert addresses.server_of(named) == b"8 bytes!"


def test_a_star_is_any_host_or_any_port() -> None:
    assert addresses.host_and_port("tcp://*:5571") == (addresses.EVERYWHERE, 5571)
    assert addresses.host_and_port("tcp://127.0.0.1:*") == ("127.0.0.1", 0)


NONE = ["10.0.0.7:5571", "http://a:1", "tcp://a", "tcp://a:", "tcp://:1", "tcp://a:b", "tcp://a:65536"]
NO_SERVER = [
    "tcp://a:1/",
    "tcp://a:1/12",
    "tcp://a:1/0123456789abcdeg",
    "tcp://a:1/0123456789abcdef/",
    "tcp://a:1/0000000000000000",
]


@pytest.mark.parametrize("text", NONE + NO_SERVER)
def test_what_is_no_address_is_refused_at_once(text: str) -> None:
    with pytest.raises(ManifestError, match="is not an address"):
        addresses.host_and_port(text)


async def test_a_name_that_does_not_resolve_yet_is_said_and_tried_again(names: Names, port: int) -> None:
    client = RpcClient(name="client", resolve=f"tcp://{NAME}:{port}")
    await ends_late(
        lambda timeout: client.call("add", Number(value=1), Number, timeout=timeout),
        says=f"the name '{NAME}' has no address yet",
    )
    waiting = asyncio.create_task(client.call("add", Number(value=1), Number, timeout=30))
    await asyncio.sleep(0.1)
    names.known[NAME] = "127.0.0.1"
    assert (await waiting).value == 2
    await client.close()


async def test_a_name_server_that_is_silent_keeps_no_loop_and_is_asked_once(names: Names, port: int) -> None:
    names.answers.clear()
    clients = [RpcClient(name="client", resolve=f"tcp://{NAME}:{port}") for _ in range(50)]
    calls = [asyncio.create_task(client.call("add", Number(value=1), Number, timeout=30)) for client in clients]
    longest, before = 0.0, time.monotonic()
    for _ in range(20):
        await asyncio.sleep(0.01)
        longest, before = max(longest, time.monotonic() - before), time.monotonic()
    assert names.asked == 1
    assert longest < 5  # that it answers nothing for 30 s is nothing to the loop
    gone = RpcClient(name="gone", resolve=f"tcp://{NAME}:{port}")
    with pytest.raises(DeadlineExceeded, match="the connection was not made"):
        await gone.call("add", Number(value=1), Number, timeout=0.2)
    await gone.close()
    names.known[NAME] = "127.0.0.1"
    names.answers.set()
    assert [answer.value for answer in await asyncio.gather(*calls)] == [2] * 50
    for client in clients:
        await client.close()


async def test_a_name_for_which_no_thread_can_be_begun_is_looked_up_later(
    names: Names, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Thread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    names.known[NAME] = "127.0.0.1"
    client = RpcClient(name="client", resolve=f"tcp://{NAME}:{port}")
    with monkeypatch.context() as full:
        full.setattr(threading, "Thread", Thread)
        await ends_late(
            lambda timeout: client.call("add", Number(value=1), Number, timeout=timeout),
            says="cannot be looked up: can't start new thread",
        )
    assert (await client.call("add", Number(value=1), Number, timeout=30)).value == 2
    await client.close()


async def test_an_address_that_is_a_number_is_listened_at_however_late_the_process_is(monkeypatch) -> None:
    monkeypatch.setattr(addresses, "_BIND_S", 0.0)  # every wait is late, as after a process that stood still
    server = RpcServer(name="server", bind="tcp://127.0.0.1:*")
    await server.start()
    await server.close()


async def test_who_listens_at_a_name_is_told_that_it_is_still_looked_up(names: Names, monkeypatch) -> None:
    monkeypatch.setattr(addresses, "_BIND_S", 0.05)
    names.answers.clear()
    with pytest.raises(Refused, match=f"the lookup of the name '{NAME}' takes longer than 0.05 s"):
        await RpcServer(name="server", bind=f"tcp://{NAME}:*").start()
    names.answers.set()


def test_a_forked_child_looks_names_up_itself(names: Names) -> None:
    names.answers.clear()
    mine = addresses.look_up(NAME, 1)
    child = os.fork()
    if not child:
        names.known[NAME] = "127.0.0.1"
        names.answers.set()
        found = addresses.look_up(NAME, 1).result(10)
        os._exit(0 if found[0][1] == ("127.0.0.1", 1) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not mine.done()
    names.answers.set()
    with pytest.raises(OSError, match="no address yet"):
        mine.result(10)


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6 loopback")
async def test_ipv6() -> None:
    server = RpcServer(name="server", bind="tcp://[::1]:*")
    server.route("add", Number, add)
    client = RpcClient(name="client", resolve=await server.start())
    assert server.address.startswith("tcp://[::1]:")
    assert (await client.call("add", Number(value=1), Number, timeout=10)).value == 2
    await client.close()
    await server.close()


async def test_of_the_places_of_a_name_the_first_that_answers_is_taken(names: Names, port: int) -> None:
    real = names._real

    def two(host: str, port: int, **options: Any) -> Any:
        return [*real("127.0.0.2", port, **options), *real("127.0.0.1", port, **options)]

    names._real, names.known[NAME] = two, "both"
    client = RpcClient(name="client", resolve=f"tcp://{NAME}:{port}")
    assert (await client.call("add", Number(value=1), Number, timeout=10)).value == 2
    await client.close()


async def test_an_address_that_names_no_place_here_is_refused() -> None:
    for bind in ("tcp://no-such-interface:1", "tcp://192.0.2.1:1"):
        with pytest.raises(Refused, match="cannot listen at"):
            await RpcServer(name="server", bind=bind).start()
