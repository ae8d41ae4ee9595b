"""The HTTP face of a role: ``/metrics``, ``/healthz``, ``/readyz``, and what else the role adds.

Invariants: a POST is only heard with the bearer token that lies in the token file (no file: never); an error is
answered as JSON with the words of the error tree, and never with a traceback.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, ManifestError, Refused
from asyncflow.net import hosts

log = logging.getLogger(__name__)

HttpHandler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
Ready: TypeAlias = Callable[[], tuple[bool, str]]

_MAX_BODY = 1 << 20
_CLOSE_S = 0.5
_STATUS: list[tuple[type[AsyncFlowError], int]] = [
    (ManifestError, web.HTTPBadRequest.status_code),
    (Refused, web.HTTPConflict.status_code),
    (DeadlineExceeded, web.HTTPGatewayTimeout.status_code),
]


def ready() -> tuple[bool, str]:
    """Say that there is nothing to wait for."""
    return True, "ready"


class RoleHttp:
    """Serves one role over HTTP.

    registry: the metrics that ``/metrics`` shows; ready: asked by ``/readyz``, gives whether, and the reason in a few
    words; token_file: holds the bearer token for POST, read anew at each request so that it can be changed.
    """

    def __init__(self, *, registry: CollectorRegistry, ready: Ready = ready, token_file: Path | None = None) -> None:
        self._registry = registry
        self._ready = ready
        self._token_file = token_file
        self._app = web.Application(client_max_size=_MAX_BODY, middlewares=[_errors])
        self._runner: web.AppRunner | None = None
        self.add_get("/metrics", self._metrics)
        self.add_get("/healthz", self._healthz)
        self.add_get("/readyz", self._readyz)

    def add_get(self, path: str, handler: HttpHandler) -> None:
        """Answer GET ``path`` (aiohttp's syntax) by ``handler``; to be called before ``start``."""
        self._app.router.add_get(path, handler)

    def add_post(self, path: str, handler: HttpHandler) -> None:
        """Answer POST ``path`` by ``handler``, for holders of the token only; to be called before ``start``."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            if not self._authorized(request):
                return web.json_response({"what": "the bearer token is missing or wrong"}, status=401)
            return await handler(request)

        self._app.router.add_post(path, guarded)

    async def start(self, host: str = "127.0.0.1", port: int = 0, *, advertise: str = "") -> str:
        """Serve from the running loop; give the URL that others dial (at the host ``advertise``, if set).

        Port 0 takes any free one. Raises Refused where it cannot listen.
        """
        runner = web.AppRunner(self._app, access_log=None, shutdown_timeout=_CLOSE_S, handle_signals=False)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port, reuse_address=True).start()
        except OSError as error:
            await runner.cleanup()
            hint = "Another process may hold that port"
            raise Refused(f"cannot listen at http://{host}:{port}: {error}", hint=hint) from error
        self._runner = runner
        return f"http://{hosts.dialled(host, advertise)}:{runner.addresses[0][1]}"

    async def close(self) -> None:
        """Stop serving, within a second."""
        if self._runner is not None:
            await self._runner.cleanup()

    def _authorized(self, request: web.Request) -> bool:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if self._token_file is None or scheme.lower() != "bearer":
            return False
        try:
            token = self._token_file.read_bytes().strip()
        except OSError as error:
            log.error("the token file cannot be read: %s", error)
            return False
        return bool(token) and hmac.compare_digest(token, given.strip().encode("utf-8", "surrogateescape"))

    async def _metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._registry), headers={"Content-Type": content_type})

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _request: web.Request) -> web.Response:
        ready, reason = self._ready()
        return web.Response(text=f"{reason}\n", status=200 if ready else 503)


@web.middleware
async def _errors(request: web.Request, handler: HttpHandler) -> web.StreamResponse:
    try:
        return await handler(request)
    except AsyncFlowError as error:
        status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
        return web.json_response(error.to_wire(), status=status)
