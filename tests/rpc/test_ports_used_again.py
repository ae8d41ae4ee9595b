"""The kernel gives a port again when its server has ended: callers of the one are never answered by the other."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from deadlines import ends_late
from msgspec import Struct

from asyncflow.errors import DeadlineExceeded
from asyncflow.rpc.access import Access
from asyncflow.rpc.addresses import ANY_SERVER, address_of, host_and_port, new_server
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.retry import retry
from asyncflow.rpc.server import RpcServer
from asyncflow.rpc.shm import SHARED_MEMORY_ENV
from asyncflow.rpc.tls import Credentials

OPEN = Access(table={"who": {"rollout": lambda _: ()}})


class Question(Struct, frozen=True):
    pass


class Answer(Struct, frozen=True):
    server: str


async def serve(name: str, bind: str, credentials: Credentials | None = None) -> RpcServer:
    async def answer(_: Question, __: Sequence[memoryview]) -> Answer:
        return Answer(name)

    server = RpcServer(name=name, bind=bind, credentials=credentials, access=OPEN)
    server.route("who", Question, answer)
    await server.start()
    return server


@pytest.fixture(params=["on", "off"])
def shared_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(SHARED_MEMORY_ENV, request.param)
    return str(request.param)


@pytest.mark.parametrize(
    "server", [ANY_SERVER, b"a second"], ids=["at-an-address-of-its-own", "at-a-port-chosen-for-it"]
)
async def test_who_dials_a_server_that_is_gone_is_not_answered_by_the_next_one_at_its_port(
    shared_memory: str, credentials: Credentials | None, server: bytes
) -> None:
    first = await serve("first", "tcp://127.0.0.1:*", credentials)
    here = first.address
    await first.close()
    second = await serve("second", address_of(*host_and_port(here), server=server), credentials)
    caller = RpcClient(name="caller", resolve=lambda: here, credentials=credentials)
    refused = r"another server is at this address now\. The server that was dialled has ended$"
    await ends_late(lambda timeout: caller.call("who", Question(), Answer, timeout=timeout), says=refused)
    assert not second.counters.calls
    asked = asyncio.create_task(caller.call("who", Question(), Answer, timeout=10))
    here = second.address
    assert (await asked).server == "second"
    await caller.close()
    await second.close()


async def test_a_client_of_a_server_that_is_gone_greets_the_next_one_more_and_more_seldom(
    shared_memory: str, credentials: Credentials | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = await serve("second", "tcp://127.0.0.1:*", credentials)
    let_in, handshakes = RpcServer.let_in, Counter[str]()

    def counted(server: RpcServer, *said: Any) -> bytes:
        handshakes[server.name] += 1
        return let_in(server, *said)

    monkeypatch.setattr(RpcServer, "let_in", counted)
    here = address_of(*host_and_port(second.address), server=new_server())
    caller = RpcClient(name="caller", resolve=here, credentials=credentials)
    with pytest.raises(DeadlineExceeded):
        await caller.call("who", Question(), Answer, timeout=1.2)
    assert 1 < handshakes["second"] <= 6  # with pauses that do not grow, more than fifteen
    await caller.close()
    await second.close()


async def test_who_dials_a_port_without_saying_whose_is_answered_by_whoever_is_there() -> None:
    server = await serve("here", "tcp://127.0.0.1:*")
    caller = RpcClient(name="caller", resolve=address_of(*host_and_port(server.address)))
    assert (await caller.call("who", Question(), Answer, timeout=10)).server == "here"
    await caller.close()
    await server.close()


async def test_a_server_keeps_what_it_was_called_at_a_port_that_is_chosen_for_it() -> None:
    called = new_server()
    server = await serve("called", f"tcp://127.0.0.1:*/{called.hex()}")
    assert server.address == address_of(*host_and_port(server.address), server=called)
    caller = RpcClient(name="caller", resolve=server.address)
    assert (await caller.call("who", Question(), Answer, timeout=10)).server == "called"
    await caller.close()
    await server.close()


async def test_a_server_in_the_place_of_another_is_found_by_its_callers() -> None:
    first = await serve("first", "tcp://127.0.0.1:*")
    caller = RpcClient(name="caller", resolve=first.address)
    assert (await caller.call("who", Question(), Answer, timeout=10)).server == "first"
    await first.close()
    second = await serve("second", first.address)

    async def asked() -> Answer:
        """Lost where the call was on the connection that has just ended."""
        return await caller.call("who", Question(), Answer, timeout=10)

    assert (await retry(asked, what="asking who is there", timeout=10)).server == "second"
    await caller.close()
    await second.close()
