"""The queue's controller: one process with a controller per task, and the ledger."""

from __future__ import annotations

from asyncflow.queue.controller import Controller
from asyncflow.roles.base import Post, RoleOptions, run_role
from asyncflow.telemetry.metrics import ControllerMetrics


async def serve(post: Post) -> None:
    """Serve until told to stop."""


def main(options: RoleOptions) -> int:
    """Run a controller."""
    return run_role(serve, options)
