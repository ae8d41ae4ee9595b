"""Mooncake's master, which knows which holder has which value: a program of Mooncake's, run by this role.

Invariants: nobody relies on what it knows, because the queue's controller is the truth about what exists; when the
program ends, this role ends.
"""

from __future__ import annotations

import asyncio

from asyncflow.roles.base import run_role
from asyncflow.roles.post import Post, RoleOptions
from asyncflow.stores.programs import start_mooncake_master
from asyncflow.stores.server import Server
from asyncflow.telemetry.metrics import RoleMetrics


def main(options: RoleOptions) -> int:
    """Run a master."""
    return run_role(serve, options, alone=serve)


async def serve(post: Post) -> None:
    """Run the program until told to stop. Raises RoleFailed when it ends before."""
    await watch(post, await start_mooncake_master(post.host))


async def watch(post: Post, server: Server) -> None:
    """Make ``server`` known and watch it until told to stop. Raises RoleFailed when it ends before."""
    stopping, ended = asyncio.create_task(post.stopping.wait()), asyncio.create_task(server.ended())
    try:
        membership = await post.join(metrics=RoleMetrics(), address=f"tcp://{server.host}:{server.port}")
        await asyncio.wait((stopping, ended), return_when=asyncio.FIRST_COMPLETED)
        await membership.close()
        if ended.done():
            ended.result()
    finally:
        stopping.cancel()
        ended.cancel()
        await server.stop()
