"""Calls between processes with certificates: who is refused, what may be called, and strangers that hold on."""

import asyncio
import contextlib
import gc
import logging
import os
import re
import resource
import socket
import ssl
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from deadlines import ends_late
from msgspec import Struct

from asyncflow.api.names import CLIENT, INSECURE_ENV
from asyncflow.errors import PeerLost, Refused
from asyncflow.local.issuer import Issuer
from asyncflow.rpc import framing, tls
from asyncflow.rpc.access import ACCESS, Access, worker_name
from asyncflow.rpc.addresses import host_and_port
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.directory import Directory
from asyncflow.rpc.membership import HEARTBEAT, REGISTER, Heartbeat, HeartbeatReply, Member, Registered
from asyncflow.rpc.server import RpcServer
from asyncflow.rpc.shm import SHARED_MEMORY_ENV
from asyncflow.rpc.tls import Credentials
from asyncflow.weights.manifest import ManifestPart
from asyncflow.weights.messages import Published


class Number(Struct, frozen=True, kw_only=True):
    value: float


PART = ManifestPart(version=1, part=0, parts=1, worker=worker_name("rollout", 3, "a"), address="", tensors=())


async def publish(_part: ManifestPart, _frames: Sequence[memoryview]) -> Published:
    return Published(complete=True)


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    return Issuer(tmp_path / "tls")


@pytest.fixture
async def driver(issuer: Issuer) -> AsyncIterator[RpcServer]:
    server, directory = RpcServer(name="driver", credentials=issuer.credentials("driver")), Directory()
    directory.attach(server)
    server.route("weights.publish", ManifestPart, publish)
    await server.start()
    yield server
    await directory.close()
    await server.close()


@contextlib.asynccontextmanager
async def calling(
    server: RpcServer, credentials: Credentials | None, *, expects: Sequence[str] = ()
) -> AsyncIterator[RpcClient]:
    client = RpcClient(name="caller", resolve=server.address, credentials=credentials, expects=expects)
    yield client
    await client.close()


def member(role: str, index: int) -> Member:
    return Member(role=role, index=index, incarnation=worker_name(role, index, "a"), address="tcp://127.0.0.1:1")


@pytest.mark.usefixtures("way")
async def test_a_rollout_registers_as_itself_and_as_nobody_else(driver: RpcServer, issuer: Issuer) -> None:
    async with calling(driver, issuer.credentials("rollout", 3)) as client:
        registered = await client.call(REGISTER, member("rollout", 3), Registered, timeout=10)
        assert [str(peer) for peer in registered.peers] == ["rollout-3"]
        for other in (member("trainer", 0), member("rollout", 2)):
            with pytest.raises(Refused, match=f"rollout-3 may not call directory.register on behalf of {other}"):
                await client.call(REGISTER, other, Registered, timeout=10)
        with pytest.raises(Refused, match="on behalf of rollout-2"):
            await client.call(HEARTBEAT, Heartbeat(incarnation="rollout-2-a", revision=0), HeartbeatReply, timeout=10)
    assert driver.counters.refused == {"access": 3}


@pytest.mark.usefixtures("way")
async def test_a_rollout_publishes_no_weights(driver: RpcServer, issuer: Issuer, caplog: Any) -> None:
    async with calling(driver, issuer.credentials("rollout", 3)) as client:
        with caplog.at_level(logging.WARNING), pytest.raises(Refused, match=r"rollout-3 may not call weights\.publish"):
            await client.call("weights.publish", PART, Published, timeout=10)
    assert driver.counters.refused == {"access": 1}
    assert driver.counters.calls["weights.publish"] == 0
    assert "refused a peer (access): rollout-3 may not call weights.publish" in caplog.text


async def test_who_says_nothing_on_this_host_is_what_the_server_takes_it_for(issuer: Issuer) -> None:
    for unnamed in ("operator", CLIENT):
        server = RpcServer(name="queue", credentials=issuer.credentials("controller"), access=Access(unnamed=unnamed))
        Directory().attach(server)
        await server.start()
        async with calling(server, None) as client:
            await client.call(REGISTER, member(CLIENT, 7), Registered, timeout=10)
            with pytest.raises(Refused, match=f"{unnamed}-0 may not call directory.register on behalf of rollout-3"):
                await client.call(REGISTER, member("rollout", 3), Registered, timeout=10)
        await server.close()


async def test_a_process_of_another_job_on_this_host_reaches_no_method(driver: RpcServer, tmp_path: Path) -> None:
    other = Issuer(tmp_path / "other").credentials("rollout", 3)
    async with calling(driver, other) as client:
        calling_on = asyncio.create_task(client.call(REGISTER, member("rollout", 3), Registered, timeout=20))
        async with asyncio.timeout(10):
            while not driver.counters.refused["other_job"]:
                await asyncio.sleep(0.01)
        assert not calling_on.done()
    with pytest.raises(PeerLost):
        await calling_on
    assert not driver.counters.calls


def stranger(folder: Path) -> ssl.SSLContext:
    """Return a context that shows a certificate whatever it is, and believes every other."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return context


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"seed": b"s" * 32}, "other_authority"),
        ({"seed": b"s" * 32, "job": "job-8"}, "other_authority"),
        ({"periods": -4}, "expired"),
        ({"named": "job-8"}, "other_job"),
        ({"named": "a/b"}, "no_identity"),
    ],
    ids=["a stranger", "another job", "expired", "another job's name", "no name"],
)
async def test_a_certificate_that_is_not_of_this_job_reaches_no_method(
    given: Callable[..., Path], options: dict[str, Any], reason: str
) -> None:
    server = RpcServer(name="driver", credentials=Credentials(given("driver")))
    begun = []
    for method in ACCESS:
        server.route(method, Heartbeat, lambda *_: begun.append(1))  # type: ignore[arg-type]
    await server.start()
    context, said = stranger(given("rollout", 3, **options)), b""
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(*host_and_port(server.address), ssl=context)
        for _ in ACCESS:
            writer.write(framing.hello(None) + bytes(100))
            await writer.drain()
        said = await reader.read(1000)
    async with asyncio.timeout(10):
        while not server.counters.refused:
            await asyncio.sleep(0.01)
    assert server.counters.refused == {reason: 1}
    assert not begun
    assert said == b""
    await server.close()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("role", "index"), [("rollout", 3), ("viewer", 0), ("operator", 0)])
async def test_a_method_of_other_roles_is_refused_before_it_begins(issuer: Issuer, role: str, index: int) -> None:
    server, begun = RpcServer(name="driver", credentials=issuer.credentials("driver")), []
    for method in ACCESS:
        server.route(method, Number, lambda *_: begun.append(1))  # type: ignore[arg-type]
    await server.start()
    others = [method for method, roles in ACCESS.items() if role not in roles]
    async with calling(server, issuer.credentials(role, index)) as client:
        for method in others:
            with pytest.raises(Refused, match=f"{role}-{index} may not call {re.escape(method)}"):
                await client.call(method, Number(value=1.0), Number, timeout=10)
    assert server.counters.refused == {"access": len(others)}
    assert len(others) > 20
    assert not begun
    await server.close()


async def test_a_caller_that_does_not_speak_tls_is_told_what_it_lacks(
    driver: RpcServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHARED_MEMORY_ENV, "off")
    async with calling(driver, None) as client:
        await ends_late(
            lambda timeout: client.call(REGISTER, member("rollout", 3), Registered, timeout=timeout),
            says="do both sides have certificates of this job",
        )
    assert set(driver.counters.refused) == {"no_tls"}


async def test_a_rollout_cannot_pose_as_the_driver(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARED_MEMORY_ENV, "off")
    server = RpcServer(name="impostor", credentials=issuer.credentials("rollout", 1))
    Directory().attach(server)
    await server.start()
    async with calling(server, issuer.credentials("rollout", 3), expects=("driver",)) as client:
        await ends_late(
            lambda timeout: client.call(REGISTER, member("rollout", 3), Registered, timeout=timeout),
            says="rollout-1 answers where a driver is expected",
        )
    assert server.counters.calls.total() == 0
    await server.close()


async def test_a_method_that_the_table_does_not_have_cannot_be_served(issuer: Issuer) -> None:
    server = RpcServer(name="driver", credentials=issuer.credentials("driver"))
    server.route("weights.steal", ManifestPart, publish)
    with pytest.raises(ValueError, match=r"the access table has no entry for weights\.steal"):
        await server.start()


async def test_without_a_certificate_only_this_host_is_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, issuer: Issuer
) -> None:
    for credentials, bind in ((None, "tcp://127.0.0.1:*"), (issuer.credentials("driver"), "tcp://0.0.0.0:*")):
        server = RpcServer(name="server", bind=bind, credentials=credentials, advertise="here")
        await server.start()
        await server.close()
    exposed = RpcServer(name="server", bind="tcp://0.0.0.0:*", advertise="here")
    with pytest.raises(Refused, match=r"without a certificate 0\.0\.0\.0 is not served.*--insecure"):
        await exposed.start()
    assert not caplog.text
    monkeypatch.setenv(INSECURE_ENV, "1")
    await exposed.start()
    assert "INSECURE" in caplog.text
    await exposed.close()


@pytest.mark.usefixtures("way")
async def test_those_who_are_served_stay_so_under_400_idle_connections_at_256_descriptors(spawn: Any) -> None:
    peer = await asyncio.to_thread(spawn, "echo")
    holder = RpcClient(name="holder", resolve=peer.said)
    await holder.call("add", Number(value=1.0), Number, timeout=10)
    resource.prlimit(peer.process.pid, resource.RLIMIT_NOFILE, (256, 256))
    idle = [await asyncio.to_thread(socket.create_connection, host_and_port(peer.said), 10) for _ in range(400)]
    await holder.call("add", Number(value=1.0), Number, timeout=10)
    late = RpcClient(name="late", resolve=peer.said)
    await late.call("add", Number(value=1.0), Number, timeout=20)
    assert len(os.listdir(f"/proc/{peer.process.pid}/fd")) <= 256
    for connection in idle:
        connection.close()
    await holder.close()
    await late.close()


@pytest.fixture
async def echoing(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RpcServer]:
    """A server over TLS that answers when it is told to."""
    monkeypatch.setenv(SHARED_MEMORY_ENV, "off")
    access = Access(table={"echo": {"rollout": lambda _: ()}})
    server = RpcServer(name="driver", credentials=issuer.credentials("driver"), access=access)

    async def echo(request: Number, _frames: Sequence[memoryview]) -> Number:
        await asyncio.sleep(request.value)
        return request

    server.route("echo", Number, echo)
    await server.start()
    yield server
    await server.close()


async def test_nothing_of_a_connection_outlives_it_although_its_certificate_does(
    echoing: RpcServer, issuer: Issuer
) -> None:
    async with calling(echoing, issuer.credentials("rollout", 3)) as client:
        await client.call("echo", Number(value=0), Number, timeout=10)
        (peer,) = map(weakref.ref, echoing._peers)
    async with asyncio.timeout(10):
        while peer() is not None:
            await asyncio.sleep(0.01)
            gc.collect()


async def test_a_connection_ends_with_the_certificate_that_it_began_with(
    echoing: RpcServer, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([0.3])
    monkeypatch.setattr(tls, "expires_in", lambda _: next(seconds, 60.0))
    async with calling(echoing, issuer.credentials("rollout", 3)) as client:
        with pytest.raises(PeerLost):
            await client.call("echo", Number(value=5), Number, timeout=10)
        assert echoing.counters.refused == {"expired": 1}
        await client.call("echo", Number(value=0), Number, timeout=10)
