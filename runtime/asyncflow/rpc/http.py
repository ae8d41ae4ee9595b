"""HTTP server of a role, based on aiohttp: metrics, probes, and routes that the role adds.

Invariants: a server without a guard answers GET and HEAD only, and changes nothing. A server with a guard uses TLS 1.3,
and refuses every caller without a certificate of the job for an allowed role or the bearer token of its file. An error
of a handler is answered as JSON in the form of the error tree, never with a traceback. If there are too many
connections or no descriptor is left, the oldest idle connection is closed for a new one, so idle callers delay nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, TypeAlias

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, ManifestError, Refused
from asyncflow.rpc import addresses
from asyncflow.rpc.listener import Listener
from asyncflow.rpc.tls import Credentials, PeerRefused

log = logging.getLogger(__name__)

Ready: TypeAlias = Callable[[], tuple[bool, str]]
"""Returns whether a role is ready, and the reason in a few words."""

READING: Final = ("GET", "HEAD")
"""Methods that change nothing."""
MAX_BODY: Final = 1 << 20
"""Bytes of a request's body that a handler may read."""
MAX_LINE: Final = 2 << 10
"""Maximum bytes of the request line and of each header field. ``_MAX_FIELDS`` header fields are allowed."""
MAX_CONNECTIONS: Final = 512
"""Connections of one server, and at most an eighth of the process's file descriptors."""
_MAX_FIELDS = 32
_IDLE_S = 75.0
_CLOSE_S = 0.25
"""Seconds that aiohttp waits for a handler to end, and after that for its cancellation."""
_BACKLOG = 1024
_STATUS: list[tuple[type[AsyncFlowError], HTTPStatus]] = [
    (ManifestError, HTTPStatus.BAD_REQUEST),
    (Refused, HTTPStatus.CONFLICT),
    (DeadlineExceeded, HTTPStatus.GATEWAY_TIMEOUT),
]


def ready() -> tuple[bool, str]:
    """Report that a role is ready: the default of ``role_routes``."""
    return True, "ready"


def role_routes(
    registry: CollectorRegistry, *, ready: Ready = ready, refreshed: Sequence[Callable[[], Awaitable[None]]] = ()
) -> list[web.RouteDef]:
    """Return the routes that every role has: ``/metrics``, ``/healthz`` and ``/readyz``.

    registry: the exported metrics; ready: called by ``/readyz``; refreshed: called before the metrics are read.
    """

    async def metrics(request: web.Request) -> web.Response:
        for refresh in refreshed:
            await refresh()
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    async def healthz(_request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_request: web.Request) -> web.Response:
        is_ready, reason = ready()
        return web.Response(text=f"{reason}\n", status=HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE)

    return [web.get("/metrics", metrics), web.get("/healthz", healthz), web.get("/readyz", readyz)]


class Guard:
    """Access control of an HTTPS server.

    credentials: of this process; roles: those whose certificate is sufficient; token_file: holds the bearer token of
    callers without a certificate, read at each request so that it can be changed; refused: called for each refusal,
    with a message and the reason that is counted.
    """

    def __init__(
        self,
        credentials: Credentials,
        *,
        roles: Collection[str],
        token_file: Path | None = None,
        refused: Callable[[str, str], None] = lambda *_: None,
    ) -> None:
        self._credentials = credentials
        self._roles = roles
        self._token_file = token_file
        self._refused = refused

    def context(self) -> ssl.SSLContext:
        """Return the TLS context for the next connection."""
        return self._credentials.web()

    def count(self, refused: PeerRefused) -> None:
        """Count a connection that was refused."""
        self._refused(refused.what, refused.reason)

    def check(self, request: web.Request) -> None:
        """Raise HTTPForbidden for the certificate of another role, HTTPUnauthorized without certificate and token."""
        ssl_object: Any = request.transport.get_extra_info("ssl_object") if request.transport is not None else None
        caller = "a caller without a certificate"
        if ssl_object is not None and ssl_object.getpeercert():
            try:
                process = self._credentials.peer(ssl_object)
            except PeerRefused as refused:
                self.count(refused)
                raise web.HTTPForbidden(text=refused.what) from refused
            if process.role in self._roles:
                return
            caller = str(process)
        if self._has_token(request):
            return
        what = f"{caller} may not {request.method} {request.path}"
        self._refused(what, "access")
        if ssl_object is not None and ssl_object.getpeercert():
            raise web.HTTPForbidden(text=what)
        raise web.HTTPUnauthorized(text="the bearer token is missing or wrong")

    def _has_token(self, request: web.Request) -> bool:
        scheme, _, presented = request.headers.get("Authorization", "").partition(" ")
        if self._token_file is None or scheme.lower() != "bearer":
            return False
        try:
            token = self._token_file.read_bytes().strip()
        except OSError as error:
            log.error("the token file cannot be read: %s", error)
            return False
        return bool(token) and hmac.compare_digest(token, presented.strip().encode(errors="surrogateescape"))


class HttpServer:
    """HTTP server of ``routes`` in the running event loop. guard: access control; None allows reading only."""

    def __init__(self, routes: Iterable[web.RouteDef], *, guard: Guard | None = None) -> None:
        self._guard = guard
        self._busy: set[web.RequestHandler] = set()
        app = web.Application(middlewares=[self._answer], client_max_size=MAX_BODY)
        app.add_routes(routes)
        self._runner = web.AppRunner(
            app,
            logger=_AiohttpLog(log, {}),
            access_log=None,
            keepalive_timeout=_IDLE_S,
            shutdown_timeout=_CLOSE_S,
            max_line_size=MAX_LINE,
            max_field_size=MAX_LINE,
            max_headers=_MAX_FIELDS,
        )
        self._listener: Listener | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0, *, bound: socket.socket | None = None) -> str:
        """Start to serve, and return the URL that peers dial.

        Port 0 selects a free port. Another port is also served on loopback if it is free there, for ``kubectl
        port-forward``. bound: a socket that is already bound to host and port. Raises Refused if it cannot listen.
        """
        loopback: list[socket.socket] = []
        try:
            if bound is None:
                places = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
                bound = socket.create_server(places[0][4], family=places[0][0])
                if port and not addresses.is_loopback(str(places[0][4][0])):
                    with contextlib.suppress(OSError):  # in use, for example by this socket if it has all addresses
                        loopback = [socket.create_server(("127.0.0.1", port))]
            bound.listen(_BACKLOG)
        except OSError as error:
            hint = "Another process may hold that port"
            raise Refused(f"cannot listen at {self._scheme}://{host}:{port}: {error}", hint=hint) from error
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        self._listener = Listener(
            [bound, *loopback],
            most=MAX_CONNECTIONS,
            share=1 / 8,
            handshake=partial(self._handshake, server),
            connected=lambda: len(server.connections),
            make_room=partial(self._make_room, server),
            refused=self._guard.count if self._guard is not None else lambda refused: log.debug("%s", refused),
        )
        address = addresses.address_of(await addresses.dialled(host), bound.getsockname()[1])
        return address.replace(addresses.SCHEME, f"{self._scheme}://")

    async def close(self) -> None:
        """Stop serving and end all connections, within a second."""
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()

    async def _handshake(self, server: web.Server, caller: socket.socket) -> None:
        context = self._guard.context() if self._guard is not None else None
        await asyncio.get_running_loop().connect_accepted_socket(server, caller, ssl=context)

    def _make_room(self, server: web.Server) -> bool:
        """Close the oldest connection without a running handler, otherwise the oldest handshake."""
        for handler in server.connections:
            transport = handler.transport
            if handler not in self._busy and transport is not None and not transport.is_closing():
                transport.abort()  # close() would wait for a caller that does not read
                return True
        return self._listener is not None and self._listener.end_handshake()

    @property
    def _scheme(self) -> str:
        return "http" if self._guard is None else "https"

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._busy.add(request.protocol)
        try:
            if self._guard is not None:
                self._guard.check(request)
            elif request.method not in READING:
                raise web.HTTPMethodNotAllowed(request.method, READING, text="this port is for reading only")
            return await handler(request)
        except web.HTTPException as error:
            error.text = json.dumps({"what": error.text})
            error.content_type = "application/json"
            raise
        except AsyncFlowError as error:
            status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
            return web.json_response(error.to_wire(), status=status)
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            return web.json_response({"what": "internal error; see the log of the server"}, status=500)
        finally:
            self._busy.discard(request.protocol)


class _AiohttpLog(logging.LoggerAdapter[logging.Logger]):
    """Logger for aiohttp that hides malformed requests: a port scan would fill the log with their tracebacks."""

    def exception(self, msg: object, *args: object, exc_info: Any = True, **kwargs: Any) -> None:
        level = logging.DEBUG if isinstance(exc_info, (HttpProcessingError, web.RequestPayloadError)) else logging.ERROR
        self.log(level, msg, *args, exc_info=exc_info, **kwargs)
