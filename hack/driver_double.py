"""An HTTP server that answers for the drivers of many jobs whose pods do not really run; ``--probe-url`` points to it.

Invariant: the answer for a job depends only on the number of earlier requests for that job. After a request to suspend,
a driver reports that it is suspended until ``resume`` is called.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

from aiohttp import web

from asyncflow.api.status import DriverStatus

Answer = Callable[[int], DriverStatus]
"""Returns the answer to a request, from the number of earlier requests."""


def steady(_: int) -> DriverStatus:
    """Return the same answer every time: a job in the middle of its run."""
    return DriverStatus(phase="Running", step=3, steps=60, reward=0.5, version=3)


def stepping(earlier: int) -> DriverStatus:
    """Return an answer whose step and reward grow with each request."""
    return DriverStatus(phase="Running", step=earlier, steps=1_000_000, reward=earlier / 1e6, version=earlier)


class DriverDouble:
    """The drivers of all jobs, served by one thread."""

    def __init__(self, answer: Answer = steady) -> None:
        self._answer = answer
        self._loop = asyncio.new_event_loop()
        self._listens = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._asked: Counter[str] = Counter()
        self._suspended: set[str] = set()
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._listens.wait(10):
            raise TimeoutError("waited 10 s for the drivers to listen")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def resume(self, namespace: str, name: str) -> None:
        """End the suspension of a job's driver, as a restart does."""
        self._suspended.discard(f"/{namespace}/{name}/v1/status")

    async def _suspend(self, request: web.Request) -> web.Response:
        self._suspended.add(request.path.replace("/v1/suspend", "/v1/status"))
        return web.json_response({"suspend": "asked for"}, status=202)

    async def _status(self, request: web.Request) -> web.Response:
        status = self._answer(self._asked[request.path])
        self._asked[request.path] += 1
        if request.path in self._suspended:
            status = status.model_copy(update={"phase": "Suspended"})
        return web.json_response(text=status.model_dump_json(by_alias=True))

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        runner = self._loop.run_until_complete(self._listen())
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    async def _listen(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/{namespace}/{name}/v1/status", self._status)
        app.router.add_post("/{namespace}/{name}/v1/suspend", self._suspend)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address: Any = runner.addresses[0]
        self.url = f"http://127.0.0.1:{address[1]}/{{namespace}}/{{name}}"
        self._listens.set()
        return runner
