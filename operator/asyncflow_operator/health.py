"""``/healthz``, ``/readyz`` and ``/metrics`` of the operator.

Invariant: healthy means that this process gets somewhere: its loop turns, no object waits for ever, and the watches
hear the server; a process that only exists is not healthy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, Never

from aiohttp import web
from prometheus_client.exposition import choose_encoder

from asyncflow.errors import Refused
from asyncflow_operator.telemetry import Metrics

MOST_LAG_S: Final = 10.0
MOST_WAIT_S: Final = 120.0
MOST_SILENCE_S: Final = 300.0
_TICK_S: Final = 1.0


class Vitals:
    """Measurements by which ``/healthz`` answers.

    oldest_s: wait of the object longest due; silent_s: silence of the quietest watch.
    """

    def __init__(self, *, oldest_s: Callable[[], float], silent_s: Callable[[], float], metrics: Metrics) -> None:
        self._oldest_s = oldest_s
        self._silent_s = silent_s
        self._lag_s = 0.0
        metrics.oldest_seconds.set_function(oldest_s)
        metrics.watch_age.set_function(silent_s)
        metrics.loop_lag.set_function(lambda: self._lag_s)

    async def run(self) -> Never:
        """Measure how late the event loop is, until cancelled."""
        while True:
            begun = time.monotonic()
            await asyncio.sleep(_TICK_S)
            self._lag_s = max(0.0, time.monotonic() - begun - _TICK_S)

    def ailments(self) -> list[str]:
        """Return what is wrong, nothing if all is well."""
        limits = (
            ("the event loop is late by", self._lag_s, MOST_LAG_S),
            ("an object waits for its turn since", self._oldest_s(), MOST_WAIT_S),
            ("a watch has been silent for", self._silent_s(), MOST_SILENCE_S),
        )
        return [f"{what} {value:.1f} s" for what, value, most in limits if value > most]


class Http:
    """Serves the three. ready: gives what is still waited for, nothing if ready; refresh: brings metrics up to date."""

    def __init__(
        self, *, metrics: Metrics, vitals: Vitals, ready: Callable[[], list[str]], refresh: Callable[[], None]
    ) -> None:
        self._metrics = metrics
        self._vitals = vitals
        self._ready = ready
        self._refresh = refresh
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._show)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5, handle_signals=False)

    async def start(self, host: str, port: int) -> int:
        """Serve; give the port. Raises Refused where it cannot listen."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            await self._runner.cleanup()
            hint = "Another process may hold that port: give --http-port"
            raise Refused(f"cannot listen: {error}", where=f"http://{host}:{port}", hint=hint) from error
        bound: int = self._runner.addresses[0][1]
        return bound

    async def close(self) -> None:
        """Stop serving."""
        await self._runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        return _verdict(self._vitals.ailments())

    async def _readyz(self, _: web.Request) -> web.Response:
        return _verdict(self._ready())

    async def _show(self, request: web.Request) -> web.Response:
        self._refresh()
        encode, form = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._metrics.registry), headers={"Content-Type": form})


def _verdict(wrong: list[str]) -> web.Response:
    return web.Response(text="; ".join(wrong) or "ok", status=503 if wrong else 200)
