"""The HTTP server against what callers send that is not as it should be, byte by byte."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncflow.net.http_server import MAX_BODY, MAX_HEAD, Answer, HttpServer

LARGE = b"a" * (MAX_BODY + 1)


@asynccontextmanager
async def serving():
    server = HttpServer()

    async def echo(request):
        return Answer.json(
            {"params": request.params, "query": request.query, "bytes": len(request.body), "method": request.method}
        )

    async def fails(_request):
        raise ValueError("a secret")

    server.route("GET", "/echo/{name}", echo)
    server.route("POST", "/echo/{name}", echo)
    server.route("GET", "/fails", fails)
    try:
        yield await server.start("127.0.0.1", 0)
    finally:
        async with asyncio.timeout(5):
            await server.close()


async def said(port, sent, *, ends=True):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    if ends:
        writer.write_eof()
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    return answer


def status(answer):
    return int(answer.split(b" ", 2)[1])


async def test_requests_follow_each_other_on_one_connection():
    get = b"GET /echo/a%20b?x=1 HTTP/1.1\r\nHost: h\r\n\r\n"
    post = b"POST /echo/c HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc"
    async with serving() as port:
        answer = await said(port, get + post, ends=False)
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert b'{"params": {"name": "a b"}, "query": {"x": "1"}, "bytes": 0, "method": "GET"}' in answer
    assert b'"bytes": 3, "method": "POST"}' in answer


async def test_a_head_has_no_body_and_http_1_0_ends_the_connection():
    async with serving() as port:
        head = await said(port, b"HEAD /echo/a HTTP/1.0\r\n\r\n", ends=False)
    assert status(head) == 200
    assert head.endswith(b"\r\n\r\n")
    assert b"Connection: close" in head


async def test_who_expects_to_be_told_to_continue_is_told():
    async with serving() as port, asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /echo/a HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"x")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
        writer.close()


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"GET /nothing HTTP/1.1\r\nHost: h\r\n\r\n", 404),
        (b"GET /echo/ HTTP/1.1\r\nHost: h\r\n\r\n", 404),
        (b"DELETE /echo/a HTTP/1.1\r\nHost: h\r\n\r\n", 405),
        (b"GET /fails HTTP/1.1\r\nHost: h\r\n\r\n", 500),
        (b"GET /echo/a\r\n\r\n", 400),
        (b"GET http://elsewhere/ HTTP/1.1\r\nHost: h\r\n\r\n", 404),
        (b"GET /echo/a HTTP/2\r\nHost: h\r\n\r\n", 400),
        (b"GET /echo/a HTTP/1.1\r\nHost: h\r\nno colon\r\n\r\n", 400),
        (b"GET /echo/a HTTP/1.1\r\nHost: h\r\nName : folded\r\n\r\n", 400),
        (b"POST /echo/a HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
        (b"POST /echo/a HTTP/1.1\r\nHost: h\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /echo/a HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % (MAX_BODY + 1), 413),
        (b"POST /echo/a HTTP/1.1\r\nHost: h\r\nContent-Length: 1%s\r\n\r\n" % (b"0" * 5000), 400),
        (b"POST /echo/a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % (MAX_BODY + 1) + LARGE, 413),
        (b"GET /echo/a HTTP/1.1\r\n\r\n", 400),
        (b"GET /echo/a HTTP/1.1\r\nHost: h\r\nX: %s" % (b"a" * MAX_HEAD), 431),
    ],
)
async def test_what_is_wrong_is_answered_with_its_status_and_the_connection_closed(sent, expected):
    async with serving() as port:
        answer = await said(port, sent, ends=False)
    assert status(answer) == expected
    assert b"secret" not in answer


async def test_half_a_request_is_no_request():
    async with serving() as port:
        assert status(await said(port, b"GET /echo/a HTTP/1.1\r\nHo")) == 400
        assert status(await said(port, b"POST /echo/a HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\nab")) == 400


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_garbage_never_ends_the_service(garbage):
    async def send():
        async with serving() as port:
            await said(port, garbage + b"\r\n\r\n")
            assert status(await said(port, b"GET /echo/a HTTP/1.1\r\nHost: h\r\n\r\n")) == 200

    asyncio.run(send())
