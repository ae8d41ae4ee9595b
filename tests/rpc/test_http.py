"""HTTP of a role: what it shows and obeys, and what callers send or leave open that is not as it should be."""

import asyncio
import logging
import os
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, ManifestError, Refused
from asyncflow.local.issuer import Issuer
from asyncflow.local.placement import PortReservation
from asyncflow.rpc import addresses, http
from asyncflow.rpc.http import MAX_BODY, MAX_CONNECTIONS, MAX_LINE, Guard, HttpServer, role_routes
from asyncflow.telemetry.metrics import RolloutMetrics

TOKEN = "s3cret"
PROBE = b"GET /healthz HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as made:
        yield made


@asynccontextmanager
async def serving(*routes: web.RouteDef) -> AsyncIterator[str]:
    server = HttpServer([*role_routes(CollectorRegistry()), *routes])
    try:
        yield await server.start()
    finally:
        async with asyncio.timeout(5):
            await server.close()


async def test_a_server_at_a_port_of_its_own_is_reached_from_its_own_pod_as_kubectl_port_forward_does(
    session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "is_loopback", lambda host: host == "127.0.0.1")
    with PortReservation(1) as ports:
        port = ports[0]
    server = HttpServer(role_routes(CollectorRegistry()))
    assert await server.start("127.0.0.2", port) == f"http://127.0.0.2:{port}"
    for host in ("127.0.0.2", "127.0.0.1"):
        async with session.get(f"http://{host}:{port}/healthz") as answer:
            assert answer.status == 200
    beside = HttpServer(role_routes(CollectorRegistry()))
    assert await beside.start("127.0.0.3", port) == f"http://127.0.0.3:{port}", (
        "of two on one host one has the loopback"
    )
    await beside.close()
    await server.close()
    for host in ("127.0.0.2", "127.0.0.1"):
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.get(f"http://{host}:{port}/healthz")


async def test_the_url_has_an_ipv6_address_in_brackets() -> None:
    server = HttpServer(role_routes(CollectorRegistry()))
    assert (await server.start("::1")).startswith("http://[::1]:")
    await server.close()


class Slow:
    """A handler that answers when it may. begun: released by each request that has come to it."""

    def __init__(self) -> None:
        self.begun = asyncio.Semaphore(0)
        self.may = asyncio.Event()

    async def answer(self, _request: web.Request) -> web.Response:
        self.begun.release()
        await self.may.wait()
        return web.Response(text="done")


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


async def test_metrics_health_and_readiness(session: aiohttp.ClientSession) -> None:
    registry, reasons = CollectorRegistry(), ["waiting for the controller"]
    Gauge("asyncflow_driver_step", "steps", registry=registry).set(7)
    server = HttpServer(role_routes(registry, ready=lambda: (not reasons, reasons[0] if reasons else "ready")))
    url = await server.start()
    async with session.get(f"{url}/metrics") as answer:
        assert "asyncflow_driver_step 7.0" in await answer.text()
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
    async with session.get(f"{url}/healthz") as answer:
        assert (answer.status, await answer.text()) == (200, "ok\n")
    async with session.get(f"{url}/readyz") as answer:
        assert (answer.status, await answer.text()) == (503, "waiting for the controller\n")
    reasons.clear()
    async with session.get(f"{url}/readyz") as answer:
        assert answer.status == 200
    await server.close()


async def test_metrics_of_another_process_are_shown_as_they_are_when_asked(session: aiohttp.ClientSession) -> None:
    metrics, values = RolloutMetrics(), [3]

    async def source() -> str:
        if not values:
            raise AsyncFlowError("it is gone")
        return f'# TYPE vllm:running gauge\nvllm:running{{engine="0"}} {values.pop()}\n'

    metrics.relay(source)
    server = HttpServer(role_routes(metrics.registry, refreshed=metrics.refreshed))
    url = await server.start()
    async with session.get(f"{url}/metrics") as answer:
        text = await answer.text()
        assert 'vllm:running{engine="0"} 3.0' in text
        assert "asyncflow_rollout_probe_gap" in text
    async with session.get(f"{url}/metrics") as answer:
        assert answer.status == 200
        assert "vllm:running" not in await answer.text()
    await server.close()


class Directed:
    """A server that may be directed, and who tried in vain."""

    url = ""

    def __init__(self, folder: Path) -> None:
        self.issuer = Issuer(folder / "tls")
        self.token = folder / "token"
        self.refused: list[str] = []
        self.heard: list[str] = []
        guard = Guard(
            self.issuer.credentials("driver"),
            roles=("operator", "driver"),
            token_file=self.token,
            refused=lambda _why, reason: self.refused.append(reason),
        )
        self.server = HttpServer([web.post("/v1/rollouts/{id}/drain", self._drain)], guard=guard)

    async def _drain(self, request: web.Request) -> web.Response:
        self.heard.append(request.match_info["id"])
        return web.json_response({})

    def context(self, shown: Path | None = None) -> ssl.SSLContext:
        """Return the context of a caller that shows the certificate in a folder, or none."""
        context = ssl.create_default_context(cafile=self.issuer.issue("driver") / "ca.crt")
        if shown is not None:
            context.load_cert_chain(shown / "tls.crt", shown / "tls.key")
        return context

    async def post(self, rollout: str, context: ssl.SSLContext, authorization: str | None = None) -> int:
        headers = {} if authorization is None else {"Authorization": authorization}
        where = f"{self.url}/v1/rollouts/{rollout}/drain"
        async with (
            aiohttp.ClientSession() as session,
            session.post(where, headers=headers, ssl=context, server_hostname="driver-0") as answer,
        ):
            return answer.status


@pytest.fixture
async def directed(tmp_path: Path) -> AsyncIterator[Directed]:
    made = Directed(tmp_path)
    made.url = await made.server.start()
    yield made
    await made.server.close()


async def test_a_person_directs_with_the_token_of_the_file(directed: Directed) -> None:
    directed.token.write_text(f"{TOKEN}\n")
    context = directed.context()
    for wrong in (None, "", "Bearer", "Bearer ", "Bearer s3cre", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer é"):
        assert await directed.post("3", context, wrong) == 401
    assert directed.refused == ["access"] * 8
    assert await directed.post("3", context, f"Bearer {TOKEN}") == 200
    directed.token.write_text("other")
    assert await directed.post("4", context, f"Bearer {TOKEN}") == 401
    directed.token.write_text("\n")
    assert await directed.post("4", context, "Bearer ") == 401
    directed.token.unlink()
    assert await directed.post("4", context, "Bearer other") == 401
    assert directed.heard == ["3"]


async def test_a_certificate_of_these_roles_directs_and_no_other(directed: Directed, tmp_path: Path) -> None:
    for role in ("operator", "driver"):
        assert await directed.post(role, directed.context(directed.issuer.issue(role))) == 200
    for role in ("rollout", "trainer", "viewer", "controller"):
        assert await directed.post(role, directed.context(directed.issuer.issue(role))) == 403
    assert directed.refused == ["access"] * 4
    stranger = Issuer(tmp_path / "another").issue("operator")
    with pytest.raises(aiohttp.ClientError):
        await directed.post("stranger", directed.context(stranger))
    assert directed.heard == ["operator", "driver"]
    assert directed.refused == ["access"] * 4 + ["other_authority"]


async def test_who_does_not_speak_tls_1_3_directs_nothing(directed: Directed) -> None:
    old = directed.context(directed.issuer.issue("operator"))
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(aiohttp.ClientError):
        await directed.post("old", old)
    plain = directed.url.replace("https", "http")
    with pytest.raises((aiohttp.ClientError, OSError)):
        async with aiohttp.ClientSession() as session, session.post(f"{plain}/v1/rollouts/3/drain"):
            pass
    assert directed.heard == []
    assert set(directed.refused) == {"no_tls"}


async def test_handshakes_that_do_not_go_on_keep_nobody_out(directed: Directed) -> None:
    idle = [socket.create_connection(("127.0.0.1", port_of(directed.url))) for _ in range(MAX_CONNECTIONS + 88)]
    context = directed.context(directed.issuer.issue("operator"))
    async with asyncio.timeout(9):
        assert await directed.post("3", context) == 200
    for each in idle:
        each.close()


async def test_a_reading_port_changes_nothing(session: aiohttp.ClientSession) -> None:
    async def never(_request: web.Request) -> web.Response:
        raise AssertionError

    async with (
        serving(web.post("/v1/suspend", never)) as url,
        session.post(f"{url}/v1/suspend", headers={"Authorization": f"Bearer {TOKEN}"}) as answer,
    ):
        assert (answer.status, await answer.json()) == (405, {"what": "this port is for reading only"})
        assert answer.headers["Allow"] == "GET,HEAD"


async def test_errors_are_answered_in_their_own_words(
    session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[AsyncFlowError] = [
        Refused("no", where="row 1", hint="ask again"),
        ManifestError("bad"),
        DeadlineExceeded("late"),
        AsyncFlowError("e"),
    ]

    async def fail(request: web.Request) -> web.Response:
        raise errors[int(request.query["n"])]

    async with serving(web.get("/fail", fail)) as url:
        for n, status in enumerate((409, 400, 504, 500)):
            async with session.get(f"{url}/fail", params={"n": n}) as answer:
                assert (answer.status, await answer.json()) == (status, errors[n].to_wire())
        async with session.get(f"{url}/nowhere") as answer:
            assert (answer.status, await answer.json()) == (404, {"what": "404: Not Found"})
        assert caplog.records == []
        async with session.get(f"{url}/fail") as answer:
            assert answer.status == 500
            assert (await answer.json()).keys() == {"what"}
    assert "GET /fail failed" in caplog.text
    assert "KeyError" in caplog.text


async def test_a_port_in_use_is_refused_and_close_does_not_wait_for_slow_clients(
    session: aiohttp.ClientSession,
) -> None:
    slow = Slow()
    async with serving(web.get("/slow", slow.answer)) as url:
        with pytest.raises(Refused, match="cannot listen"):
            await HttpServer([]).start(port=port_of(url))
        pending = asyncio.create_task(session.get(f"{url}/slow"))
        await slow.begun.acquire()
    with pytest.raises(aiohttp.ClientError):
        await pending


@asynccontextmanager
async def echoing() -> AsyncIterator[int]:
    async def echo(request: web.Request) -> web.Response:
        said = {"name": request.match_info["name"], "query": dict(request.query), "bytes": len(await request.read())}
        return web.json_response({**said, "method": request.method})

    async def fails(_request: web.Request) -> web.Response:
        raise ValueError("a secret")

    routes = (web.get("/echo/{name}", echo), web.post("/orders", fails), web.get("/fails", fails))
    async with serving(*routes) as url:
        yield port_of(url)


async def said(port: int, sent: bytes, *, ends: bool = False, timeout: float = 10) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    if ends:
        writer.write_eof()
    try:
        async with asyncio.timeout(timeout):
            return await reader.read()
    finally:
        writer.close()


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


async def test_requests_follow_each_other_on_one_connection() -> None:
    get = b"GET /echo/a%20b?x=1 HTTP/1.1\r\nHost: h\r\n\r\n"
    body = b"GET /echo/c HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc"
    async with echoing() as port:
        answer = await said(port, get + body)
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert b'{"name": "a b", "query": {"x": "1"}, "bytes": 0, "method": "GET"}' in answer
    assert b'"bytes": 3, "method": "GET"}' in answer


async def test_a_head_has_no_body_and_http_1_0_ends_the_connection() -> None:
    async with echoing() as port:
        head = await said(port, b"HEAD /echo/a HTTP/1.0\r\n\r\n")
    assert status(head) == 200
    assert head.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"GET /nothing HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n", 404),
        (b"GET /echo/ HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n", 404),
        (b"GET /orders HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n", 405),
        (b"DELETE /echo/a HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n", 405),
        (b"POST /orders HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n", 405),
        (b"GET /fails HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n", 500),
        (b"nonsense\r\n\r\n", 400),
        (b"GET /echo/a HTTP/2\r\nHost: h\r\n\r\n", 400),
        (b"GET /echo/a HTTP/1.1\r\nHost: h\r\nno colon\r\n\r\n", 400),
        (b"GET /echo/a HTTP/1.1\r\nHost: h\r\nName : folded\r\n\r\n", 400),
        (b"GET /echo/a HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
        (b"GET /echo/a HTTP/1.1\r\nHost: h\r\nContent-Length: -1\r\n\r\n", 400),
        (b"GET /echo/a HTTP/1.1\r\nHost: h\r\nContent-Length: 1%s\r\n\r\n" % (b"0" * 1000), 400),
        (b"GET /%s HTTP/1.1\r\nHost: h\r\n\r\n" % (b"a" * MAX_LINE), 400),
        (b"GET /echo/a HTTP/1.1\r\nHost: h\r\nX: %s" % (b"a" * (MAX_LINE + 1)), 400),
        (b"GET /echo/a HTTP/1.1\r\nHost: h\r\n%s\r\n" % b"".join(b"X-%d: a\r\n" % n for n in range(33)), 400),
    ],
)
async def test_what_is_wrong_is_answered_with_its_status(sent: bytes, expected: int) -> None:
    async with echoing() as port:
        answer = await said(port, sent)
    assert status(answer) == expected
    assert b"secret" not in answer
    assert b"Traceback" not in answer


@pytest.mark.parametrize(
    "begun", [b"Content-Length: %d\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n%x\r\n"], ids=["length", "chunked"]
)
async def test_a_body_that_is_too_large_is_refused(begun: bytes) -> None:
    head = b"GET /echo/a HTTP/1.1\r\nHost: h\r\nConnection: close\r\n" + begun % (MAX_BODY + 1)
    async with echoing() as port:
        answer = await said(port, head + b"a" * (MAX_BODY + 1) + b"\r\n0\r\n\r\n")
    assert status(answer) == 413


async def test_half_a_request_is_never_answered_as_if_it_were_whole() -> None:
    async with echoing() as port:
        for half in (b"GET /echo/a HTTP/1.1\r\nHo", b"GET /echo/a HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\nab"):
            answer = await said(port, half, ends=True)
            assert not answer or status(answer) >= 400


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=200), min_size=1, max_size=4))
def test_garbage_never_ends_the_service(garbage: list[bytes]) -> None:
    async def send() -> None:
        async with echoing() as port:
            await asyncio.gather(*(said(port, each + b"\r\n\r\n", ends=True) for each in garbage))
            assert status(await said(port, PROBE)) == 200

    asyncio.run(send())


async def test_what_is_no_http_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with echoing() as port:
        for wrong in (b"\x16\x03\x01\x00\xa5\x01\r\n\r\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n"):
            assert status(await said(port, wrong)) == 400
        no_chunk = b"GET /healthz HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nno chunk\r\n"
        assert status(await said(port, no_chunk)) in (200, 400)
    assert [record.message for record in caplog.records] == []


@pytest.fixture
def idle() -> Iterator[list[socket.socket]]:
    """Sockets that end with the test, whose process may open as many as it likes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with ExitStack() as stack:
        opened: list[socket.socket] = []
        stack.callback(lambda: [each.close() for each in opened])
        yield opened
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def connected(port: int) -> socket.socket:
    made = socket.socket()
    made.setblocking(False)
    await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", port))
    return made


def is_open(caller: socket.socket) -> bool:
    try:
        return caller.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


@pytest.mark.parametrize("count", [513, 2000])
async def test_idle_connections_keep_no_probe_waiting(idle: list[socket.socket], count: int) -> None:
    slow = Slow()
    async with serving(web.get("/slow", slow.answer)) as url:
        worked = asyncio.create_task(said(port_of(url), b"GET /slow HTTP/1.0\r\n\r\n"))
        await slow.begun.acquire()
        for number in range(count):
            idle.append(await connected(port_of(url)))
            with suppress(OSError):
                idle[-1].send(PROBE[: number % 20])
        assert status(await said(port_of(url), PROBE)) == 200
        await asyncio.sleep(0.1)
        still = [is_open(caller) for caller in idle]
        assert MAX_CONNECTIONS - 10 < sum(still) < MAX_CONNECTIONS
        assert still == sorted(still)
        slow.may.set()
        assert (await worked).endswith(b"done")


async def test_where_all_are_busy_one_more_is_turned_away(
    idle: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 2)
    slow = Slow()
    async with serving(web.get("/slow", slow.answer)) as url:
        worked = [asyncio.create_task(said(port_of(url), b"GET /slow HTTP/1.0\r\n\r\n")) for _ in range(2)]
        for _ in worked:
            await slow.begun.acquire()
        with suppress(ConnectionError):
            assert await said(port_of(url), PROBE) == b""
        slow.may.set()
        assert all(answer.endswith(b"done") for answer in await asyncio.gather(*worked))
        assert status(await said(port_of(url), PROBE)) == 200


async def test_a_caller_that_does_not_read_makes_room_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 1)

    async def much(_request: web.Request) -> web.Response:
        return web.Response(body=bytes(16 << 20))

    async with serving(web.get("/much", much)) as url:
        greedy = await connected(port_of(url))
        greedy.send(b"GET /much HTTP/1.1\r\nHost: h\r\n\r\n")
        assert (await asyncio.get_running_loop().sock_recv(greedy, 8)).startswith(b"HTTP")
        assert status(await said(port_of(url), PROBE)) == 200
        greedy.close()


@pytest.mark.parametrize("probe", [PROBE, PROBE.replace(b"close", b"keep-alive")], ids=["close", "keep-alive"])
async def test_probes_are_answered_while_no_descriptor_is_left(no_descriptors: Any, probe: bytes) -> None:
    loop = asyncio.get_running_loop()
    async with serving() as url:
        callers = [socket.socket() for _ in range(6)]
        with no_descriptors():
            for caller in callers:
                caller.setblocking(False)
                async with asyncio.timeout(10):
                    await loop.sock_connect(caller, ("127.0.0.1", port_of(url)))
                    await loop.sock_sendall(caller, probe)
                    assert status(await loop.sock_recv(caller, 1 << 10)) == 200
                    if probe == PROBE:
                        assert await loop.sock_recv(caller, 1) == b""
                with pytest.raises(OSError, match="Too many open files"):
                    os.dup(0)
        for caller in callers:
            caller.close()
        assert status(await said(port_of(url), PROBE)) == 200
