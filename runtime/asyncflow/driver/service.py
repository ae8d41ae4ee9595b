"""The driver over HTTP: ``GET /v1/status``, and what a person or the operator may ask for.

Invariant: a request only sets what is wanted (drain this rollout, write a checkpoint, suspend); the driver's directives
carry it out, level-triggered, so that asking twice is asking once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from asyncflow.api.status import DriverStatus
from asyncflow.net.http import Answer, Request, RoleHttp


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


def add_routes(http: RoleHttp, *, status: Callable[[], DriverStatus], control: Control) -> None:
    """Add the driver's routes to ``http``, before it starts."""

    async def get_status(_request: Request) -> Answer:
        return Answer.json(status().model_dump_json(by_alias=True))

    async def drain(request: Request) -> Answer:
        control.drain(request.params["id"])
        return Answer.json({"draining": request.params["id"]}, status=202)

    async def checkpoint(_request: Request) -> Answer:
        control.checkpoint()
        return Answer.json({"checkpoint": "asked for"}, status=202)

    async def suspend(_request: Request) -> Answer:
        control.suspend()
        return Answer.json({"suspend": "asked for"}, status=202)

    async def resume(_request: Request) -> Answer:
        control.resume()
        return Answer.json({"resume": "done"}, status=202)

    http.add_get("/v1/status", get_status)
    http.add_post("/v1/rollouts/{id}/drain", drain)
    http.add_post("/v1/checkpoint", checkpoint)
    http.add_post("/v1/suspend", suspend)
    http.add_post("/v1/resume", resume)
