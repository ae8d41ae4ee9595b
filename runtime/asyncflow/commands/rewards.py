"""``asyncflow rewards``: a process that scores samples for the rollout beside it, and holds no secret of the job."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from asyncflow.api.load import load_reward
from asyncflow.leash import leash
from asyncflow.rewards.pool import RewardPool
from asyncflow.rewards.service import RewardServer
from asyncflow.telemetry.logs import setup_logging


def serve(reward: Path, *, socket: Path) -> None:
    """Serve until SIGTERM or SIGINT. Raises ManifestError where the file holds no section ``spec.reward``."""
    leash()
    setup_logging("rewards", 0)
    asyncio.run(_serve(reward, socket))


async def _serve(reward: Path, socket: Path) -> None:
    server = RewardServer(RewardPool.of(load_reward(reward), workdir=reward.parent), path=socket)
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    await server.start()
    try:
        await stopping.wait()
    finally:
        await server.close()
