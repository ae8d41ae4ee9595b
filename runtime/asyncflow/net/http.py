"""The HTTP face of a role: ``/metrics``, ``/healthz``, ``/readyz``, and what else the role adds.

Invariants: a POST is only heard with the bearer token that lies in the token file (no file: never); an error is
answered as JSON with the words of the error tree, and never with a traceback.
"""

from __future__ import annotations

import hmac
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, ManifestError, Refused
from asyncflow.net import hosts
from asyncflow.net.http_server import Answer, Handler, HttpServer, Request

__all__ = ["Answer", "HttpHandler", "Ready", "Request", "RoleHttp", "ready"]

log = logging.getLogger(__name__)

HttpHandler: TypeAlias = Handler
Ready: TypeAlias = Callable[[], tuple[bool, str]]

_STATUS: list[tuple[type[AsyncFlowError], HTTPStatus]] = [
    (ManifestError, HTTPStatus.BAD_REQUEST),
    (Refused, HTTPStatus.CONFLICT),
    (DeadlineExceeded, HTTPStatus.GATEWAY_TIMEOUT),
]


def ready() -> tuple[bool, str]:
    """Say that there is nothing to wait for."""
    return True, "ready"


class RoleHttp:
    """Serves one role over HTTP.

    registry: the metrics that ``/metrics`` shows; ready: asked by ``/readyz``, gives whether, and the reason in a few
    words; token_file: holds the bearer token for POST, read anew at each request so that it can be changed; refreshed:
    called before the metrics are read.
    """

    def __init__(
        self,
        *,
        registry: CollectorRegistry,
        ready: Ready = ready,
        token_file: Path | None = None,
        refreshed: Sequence[Callable[[], Awaitable[None]]] = (),
    ) -> None:
        self._registry = registry
        self._refreshed = refreshed
        self._ready = ready
        self._token_file = token_file
        self._server = HttpServer()
        self.add_get("/metrics", self._metrics)
        self.add_get("/healthz", self._healthz)
        self.add_get("/readyz", self._readyz)

    def add_get(self, path: str, handler: HttpHandler) -> None:
        """Answer GET ``path`` by ``handler``; parts of it in braces are ``params`` of the request."""
        self._server.route("GET", path, _in_words(handler))

    def add_post(self, path: str, handler: HttpHandler) -> None:
        """Answer POST ``path`` by ``handler``, for holders of the token only."""

        async def guarded(request: Request) -> Answer:
            if not self._authorized(request):
                return Answer.json({"what": "the bearer token is missing or wrong"}, status=HTTPStatus.UNAUTHORIZED)
            return await handler(request)

        self._server.route("POST", path, _in_words(guarded))

    async def start(
        self, host: str = "127.0.0.1", port: int = 0, *, advertise: str = "", bound: socket.socket | None = None
    ) -> str:
        """Serve from the running loop; return the URL that others dial (at the host ``advertise``, if set).

        Port 0 takes any free one; bound: a socket to listen on that already has host and port. Raises Refused where it
        cannot listen.
        """
        try:
            taken = await self._server.start(host, port, bound=bound)
        except OSError as error:
            hint = "Another process may hold that port"
            raise Refused(f"cannot listen at http://{host}:{port}: {error}", hint=hint) from error
        return f"http://{await hosts.dialled(host, advertise)}:{taken}"

    async def close(self) -> None:
        """Stop serving, within a second."""
        await self._server.close()

    def _authorized(self, request: Request) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if self._token_file is None or scheme.lower() != "bearer":
            return False
        try:
            token = self._token_file.read_bytes().strip()
        except OSError as error:
            log.error("the token file cannot be read: %s", error)
            return False
        return bool(token) and hmac.compare_digest(token, given.strip().encode("latin-1"))

    async def _metrics(self, request: Request) -> Answer:
        for refresh in self._refreshed:
            await refresh()
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Answer(encode(self._registry), content_type=content_type)

    async def _healthz(self, _request: Request) -> Answer:
        return Answer.text("ok\n")

    async def _readyz(self, _request: Request) -> Answer:
        ready, reason = self._ready()
        return Answer.text(f"{reason}\n", status=HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE)


def _in_words(handler: HttpHandler) -> HttpHandler:
    async def answer(request: Request) -> Answer:
        try:
            return await handler(request)
        except AsyncFlowError as error:
            status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
            return Answer.json(error.to_wire(), status=status)

    return answer
