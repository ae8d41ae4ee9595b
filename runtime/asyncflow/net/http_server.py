"""HTTP/1.1 for a handful of callers: what a role's metrics, probes and orders need, and no more. h11 speaks it.

GET (and HEAD) and POST on fixed paths, whose parts may be names. Anything else is answered with the status that says
so, and the connection is closed.

Invariants: nothing that a caller sends takes more than ``MAX_HEAD`` + ``MAX_BODY`` bytes or ``_REQUEST_S`` seconds;
there are never more than ``_MOST`` connections; a handler that fails is logged here and tells its caller nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

import h11

log = logging.getLogger(__name__)

MAX_HEAD = 16 << 10
MAX_BODY = 1 << 20
TEXT = "text/plain; charset=utf-8"
_JSON = "application/json; charset=utf-8"
_MOST = 512
_REQUEST_S = 10.0
_IDLE_S = 75.0
_CLOSE_S = 0.5
_CHUNK = 64 << 10


@dataclass(frozen=True, slots=True)
class Request:
    """One request. params: the named parts of the path; headers: by names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    query: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Answer:
    """What is answered."""

    body: bytes = b""
    status: int = HTTPStatus.OK
    content_type: str = TEXT

    @classmethod
    def text(cls, words: str, *, status: int = HTTPStatus.OK) -> Answer:
        """Answer with words."""
        return cls(words.encode(), status)

    @classmethod
    def json(cls, value: Any, *, status: int = HTTPStatus.OK) -> Answer:
        """Answer with plain data, or with the text of a JSON document."""
        return cls((value if isinstance(value, str) else json.dumps(value)).encode(), status, _JSON)


Handler: TypeAlias = Callable[[Request], Awaitable[Answer]]


class _Wrong(Exception):
    """A request that is answered with a status, after which the connection is closed."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


class HttpServer:
    """Answers requests on the routes that it was given, from the running loop."""

    def __init__(self) -> None:
        self._routes: list[tuple[str, list[str], Handler]] = []
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    def route(self, method: str, path: str, handler: Handler) -> None:
        """Answer ``method`` on ``path`` by ``handler``; a part in braces stands for any, under that name."""
        self._routes.append((method, path.split("/"), handler))

    async def start(self, host: str, port: int, *, bound: socket.socket | None = None) -> int:
        """Listen, on ``bound`` where that is given, and return the port. Raises OSError where it cannot."""
        where: dict[str, Any] = {"host": host, "port": port} if bound is None else {"sock": bound}
        self._server = await asyncio.start_server(self._connected, **where, limit=_CHUNK)
        taken: int = self._server.sockets[0].getsockname()[1]
        return taken

    async def close(self) -> None:
        """Stop listening and end all connections, within a second."""
        if self._server is None:
            return
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        if self._connections:
            await asyncio.wait(self._connections, timeout=_CLOSE_S)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        caller = _Caller(reader, writer)
        try:
            while len(self._connections) <= _MOST and (request := await caller.request()) is not None:
                await caller.answer(request, await self._answer(request))
        except _Wrong as wrong:
            await caller.refuse(wrong.status)
        except h11.RemoteProtocolError as wrong:
            await caller.refuse(HTTPStatus(wrong.error_status_hint))
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError) as gone:
            log.debug("a caller went away, or this server is closed: %r", gone)
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, request: Request) -> Answer:
        method = "GET" if request.method == "HEAD" else request.method
        parts, known = request.path.split("/"), False
        for allowed, pattern, handler in self._routes:
            if (params := _params(pattern, parts)) is None:
                continue
            known = True
            if allowed == method:
                named = Request(request.method, request.path, request.headers, request.query, params, request.body)
                try:
                    return await handler(named)
                except Exception:
                    log.exception("%s %s failed", request.method, request.path)
                    raise _Wrong(HTTPStatus.INTERNAL_SERVER_ERROR) from None
        raise _Wrong(HTTPStatus.METHOD_NOT_ALLOWED if known else HTTPStatus.NOT_FOUND)


class _Caller:
    """One connection, and what h11 knows of it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)

    async def request(self) -> Request | None:
        """Give the next request, None when none can follow."""
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
        if self._http.our_state is not h11.IDLE:
            return None
        async with asyncio.timeout(_IDLE_S):
            head = await self._event()
        if not isinstance(head, h11.Request):
            return None
        target = urlsplit(head.target.decode("latin-1"))
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
        if int(headers.get("content-length", 0)) > MAX_BODY:
            raise _Wrong(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        async with asyncio.timeout(_REQUEST_S):
            body = await self._body()
        query = dict(parse_qsl(target.query))
        return Request(head.method.decode("latin-1"), unquote(target.path), headers, query=query, body=body)

    async def answer(self, request: Request, answer: Answer) -> None:
        """Answer ``request``."""
        await self._send(answer, with_body=request.method != "HEAD")

    async def refuse(self, status: HTTPStatus) -> None:
        """Answer with a status, if that can still be done, and be done with this caller."""
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            with contextlib.suppress(OSError, TimeoutError):
                await self._send(Answer.text(f"{status.phrase}\n", status=status), last=True)

    async def _body(self) -> bytes:
        body = bytearray()
        while isinstance(event := await self._event(), h11.Data):
            body += event.data
            if len(body) > MAX_BODY:
                raise _Wrong(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        return bytes(body)

    async def _event(self) -> Any:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            if self._http.they_are_waiting_for_100_continue:
                going_on = h11.InformationalResponse(status_code=HTTPStatus.CONTINUE, headers=[], reason=b"Continue")
                self._write(going_on)
            self._http.receive_data(await self._reader.read(_CHUNK))
        return event

    async def _send(self, answer: Answer, *, with_body: bool = True, last: bool = False) -> None:
        headers = [("Content-Type", answer.content_type), ("Content-Length", str(len(answer.body)))]
        headers += [("Connection", "close")] if last else []
        reason = HTTPStatus(answer.status).phrase
        self._write(h11.Response(status_code=answer.status, headers=headers, reason=reason.encode()))
        if with_body:
            self._write(h11.Data(data=answer.body))
        self._write(h11.EndOfMessage())
        async with asyncio.timeout(_REQUEST_S):
            await self._writer.drain()

    def _write(self, event: Any) -> None:
        self._writer.write(self._http.send(event) or b"")


def _params(pattern: list[str], parts: list[str]) -> dict[str, str] | None:
    """Give the named parts of a path that fits ``pattern``, else None."""
    if len(pattern) != len(parts):
        return None
    params: dict[str, str] = {}
    for wanted, part in zip(pattern, parts, strict=True):
        if wanted.startswith("{") and part:
            params[wanted.strip("{}")] = part
        elif wanted != part:
            return None
    return params
