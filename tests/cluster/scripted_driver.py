"""Drivers of many jobs in one server: each says what the test has it say, and remembers what it was told to do."""

import asyncio
import threading
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from asyncflow.api.status import DriverStatus

SILENT = 503


@dataclass
class Driver:
    """One job's driver. asked: the path of each POST, in order; heard: how often it has said the latest."""

    status: dict[str, Any] = field(default_factory=lambda: {"phase": "Running", "steps": 60})
    silent: bool = False
    asked: list[str] = field(default_factory=list)
    heard: int = 0

    def say(self, **fields: Any) -> None:
        """Change what it answers; the names are those of ``DriverStatus`` in Python."""
        changed = DriverStatus.model_validate(self.status | fields)
        self.status = changed.model_dump(exclude_unset=True)
        self.heard = 0

    def say_rollouts(self, *known: tuple[int, str], **each: Any) -> None:
        """Change which rollouts it knows, by index and state; ``each`` is said of all of them."""
        self.say(rollouts=[{"id": f"worker-{index}", "index": index, "state": state} | each for index, state in known])


class ScriptedDrivers:
    """The server. Its ``url`` goes into the operator's setting ``probe_url``."""

    def __init__(self) -> None:
        self._drivers: dict[tuple[str, str], Driver] = {}
        self._loop = asyncio.new_event_loop()
        self._port = 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> "ScriptedDrivers":
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/{{namespace}}/{{name}}"

    def of(self, namespace: str, name: str) -> Driver:
        """Return the driver of a job."""
        return self._drivers.setdefault((namespace, name), Driver())

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        runner = self._loop.run_until_complete(self._start())
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    async def _start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/{namespace}/{name}/v1/status", self._tell)
        app.router.add_post("/{namespace}/{name}/{path:.*}", self._take)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._port = runner.addresses[0][1]
        self._ready.set()
        return runner

    def _asked(self, request: web.Request) -> Driver:
        return self.of(request.match_info["namespace"], request.match_info["name"])

    async def _tell(self, request: web.Request) -> web.Response:
        driver = self._asked(request)
        if driver.silent:
            return web.Response(status=SILENT)
        status = DriverStatus.model_validate(driver.status)
        driver.heard += 1
        return web.json_response(text=status.model_dump_json(by_alias=True))

    async def _take(self, request: web.Request) -> web.Response:
        self._asked(request).asked.append(f"/{request.match_info['path']}")
        return web.json_response({})
