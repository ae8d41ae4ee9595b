"""One request to a process that may answer anything: it ends in time, takes few bytes, and gives JSON or a reason."""

import asyncio
import gzip
from collections.abc import Awaitable, Callable

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, PeerLost, ProtocolError
from asyncflow_operator.exchange import HttpAnswer, exchange

MOST = 20_000
BOMB = gzip.compress(b"0" * (10 << 20))
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
DriverOrder = Callable[[Talk], Awaitable[HttpAnswer]]


class Server:
    """A server that says what it is told. asked: the requests; sent: the bytes that were taken from it."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.sent = 0

    async def ask(self, talk: Talk, *, within_s: float = 5.0, method: str = "GET") -> HttpAnswer:
        served = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                self.asked.append(await reader.readuntil(b"\r\n\r\n"))
                await talk(reader, writer)
                await writer.drain()
                writer.write_eof()
                await reader.read()
            except (OSError, EOFError):
                pass
            finally:
                writer.transport.abort()
                served.set()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            return await exchange(method, f"http://127.0.0.1:{port}/v1/status", limit=MOST, within_s=within_s)
        finally:
            await served.wait()
            server.close()

    async def flood(self, writer: asyncio.StreamWriter, chunk: bytes) -> None:
        while True:
            writer.write(chunk)
            await writer.drain()
            self.sent += len(chunk)


@pytest.fixture
def server() -> Server:
    return Server()


def says(head: str, body: bytes = b"", *, kind: str = "application/json") -> Talk:
    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        typed = f"Content-Type: {kind}\r\n" if kind else ""
        writer.write(f"HTTP/1.1 {head}\r\n{typed}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    return talk


async def test_a_plain_answer_is_returned_as_it_is(server: Server) -> None:
    assert await server.ask(says("200 OK", b'{"a":1}')) == HttpAnswer(200, b'{"a":1}')
    assert await server.ask(says("409 Conflict", b"{}", kind="application/json; charset=utf-8")) == HttpAnswer(
        409, b"{}"
    )
    assert b"Accept-Encoding: identity\r\n" in server.asked[0]


async def test_an_order_has_no_body(server: Server) -> None:
    assert (await server.ask(says("202 Accepted", b"{}"), method="POST")).status == 202
    assert server.asked[0].startswith(b"POST /v1/status HTTP/1.1\r\n")
    assert b"Content-Length: 0\r\n" in server.asked[0]


@pytest.mark.parametrize(
    ("talk", "why"),
    [
        (says("302 Found\r\nLocation: http://169.254.169.254/"), "a redirect"),
        (says("200 OK\r\nContent-Encoding: gzip", BOMB[:MOST]), "an encoded body"),
        (says("200 OK", b"<html>", kind="text/html"), "HTTP 200 without a JSON body"),
        (says("503 Service Unavailable", b"no", kind=""), "HTTP 503 without a JSON body"),
        (says("200 OK", b"0" * (MOST + 1)), f"more than {MOST} bytes"),
        (says("200 OK\r\nContent-Length: 1" + "0" * 5000, b"{}"), "no HTTP|Length"),
        (says("200 OK\r\nX: " + "x" * (30 << 10), b"{}"), "too long"),
    ],
)
async def test_an_answer_that_is_not_plain_json_is_refused_with_the_reason(
    server: Server, talk: Talk, why: str
) -> None:
    with pytest.raises(ProtocolError, match=why):
        await server.ask(talk)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("first", "again"),
    [
        ("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000000000\r\n\r\n", "0" * 4096),
        ("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n", "0" * 4096),
        ("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n", "1\r\nx\r\n" * 700),
        ("", "HTTP/1.1 103 Early Hints\r\n\r\n" * 150),
        ("HTTP/1.1 200 OK\r\n", "X: y\r\n" * 700),
        ("", "\r\n" * 2000),
        ("", "no http at all " * 300),
    ],
    ids=["a gigabyte", "no end", "small chunks", "interim answers", "headers", "empty lines", "no http"],
)
async def test_a_flood_ends_after_few_bytes(server: Server, first: str, again: str) -> None:
    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(first.encode())
        await server.flood(writer, again.encode())

    with pytest.raises(ProtocolError):
        await server.ask(talk)


async def test_bytes_after_an_answer_are_not_read(server: Server) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await says("200 OK", b"{}")(reader, writer)
        await server.flood(writer, b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n" * 100)

    assert (await server.ask(talk)).body == b"{}"
    assert server.sent < 16 << 20


async def test_a_drip_ends_with_the_deadline(server: Server) -> None:
    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for letter in "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" * 100:
            writer.write(letter.encode())
            await writer.drain()
            await asyncio.sleep(0.02)

    with pytest.raises(DeadlineExceeded, match=r"no complete answer within 0\.3 s"):
        await server.ask(talk, within_s=0.3)


async def test_an_address_without_a_server_is_reported() -> None:
    with pytest.raises(PeerLost, match=r"GET http://127\.0\.0\.1:1/: no connection"):
        await exchange("GET", "http://127.0.0.1:1/", limit=MOST, within_s=5.0)
    with pytest.raises(PeerLost, match="no address"):
        await exchange("GET", "http://:9571/", limit=MOST, within_s=5.0)


HEADS = st.sampled_from(
    [
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.0 200\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n",
        b"HTTP/1.1 100 \r\n\r\n",
        b"HTTP/2 200\r\n",
        b"Content-Type: application/json\r\n",
        b"Content-Length: 3\r\n",
        b"Content-Length: -3\r\n",
        b"Content-Length: 99999999999999999999999\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"Connection: upgrade\r\nUpgrade: x\r\n",
        b"\r\n",
        b"3\r\n{} \r\n0\r\n\r\n",
        b"ffffffffffffffff\r\n",
        b"{} ",
    ]
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chunks=st.lists(HEADS | st.binary(max_size=40), max_size=10))
async def test_every_answer_ends_as_an_answer_or_as_a_known_error(chunks: list[bytes]) -> None:
    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for chunk in chunks:
            writer.write(chunk)

    try:
        answer = await Server().ask(talk)
    except AsyncFlowError:
        return
    assert answer.status >= 200
