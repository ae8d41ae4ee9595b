"""The driver over HTTP: ``GET /v1/status``, and what a person or the operator may ask for.

Invariant: a request only sets what is wanted (drain this rollout, write a checkpoint, suspend); the driver's directives
carry it out, level-triggered, so that asking twice is asking once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from aiohttp import web

from asyncflow.api.status import DriverStatus


class Control(Protocol):
    """Requests that the driver accepts. AsyncFlow's errors become HTTP errors with their words."""

    def drain(self, worker: str) -> None:
        """Let a rollout hand back its work and leave. Raises StaleHandle for an unknown one."""

    def checkpoint(self) -> None:
        """Write a checkpoint at the next step boundary."""

    def suspend(self) -> None:
        """Checkpoint at the next step boundary, then end all roles; the run can be resumed."""

    def resume(self) -> None:
        """Go on after a pause. Raises Refused where the job is not paused."""


def routes(*, status: Callable[[], DriverStatus], control: Control) -> list[web.RouteDef]:
    """Return the driver's routes."""

    async def get_status(_request: web.Request) -> web.Response:
        return web.json_response(text=status().model_dump_json(by_alias=True))

    async def drain(request: web.Request) -> web.Response:
        worker = request.match_info["id"]
        control.drain(worker)
        return web.json_response({"draining": worker}, status=202)

    async def checkpoint(_request: web.Request) -> web.Response:
        control.checkpoint()
        return web.json_response({"checkpoint": "asked for"}, status=202)

    async def suspend(_request: web.Request) -> web.Response:
        control.suspend()
        return web.json_response({"suspend": "asked for"}, status=202)

    async def resume(_request: web.Request) -> web.Response:
        control.resume()
        return web.json_response({"resume": "done"}, status=202)

    return [
        web.get("/v1/status", get_status),
        web.post("/v1/rollouts/{id}/drain", drain),
        web.post("/v1/checkpoint", checkpoint),
        web.post("/v1/suspend", suspend),
        web.post("/v1/resume", resume),
    ]
