"""The driver's process: directory, catalogue, HTTP service and the driver's loops on one address."""

from __future__ import annotations

import logging

from asyncflow.data.sources import open_prompter
from asyncflow.driver.driver import Driver
from asyncflow.driver.service import add_routes
from asyncflow.errors import RoleFailed
from asyncflow.models.source import materialize_config
from asyncflow.models.tokenizer import Tokenizer
from asyncflow.net.directory import Directory
from asyncflow.net.rpc import RpcServer
from asyncflow.queue.client import QueueClient
from asyncflow.roles.base import Post, RoleOptions, run_role
from asyncflow.telemetry.metrics import DriverMetrics

log = logging.getLogger(__name__)


async def serve(post: Post) -> None:
    """Drive the job to its end, or until told to end."""


def main(options: RoleOptions) -> int:
    """Run the driver."""
    return run_role(serve, options)
