"""The process of ``asyncflow rewards``: scores samples and answers turns, each at a socket of its own.

It runs in each pod of a rollout, and in the pods of the role ``reward`` if the job has that role. The process in a
rollout's pod then answers turns only.
"""

from __future__ import annotations

from pathlib import Path

from asyncflow.api.load import load_environment, load_reward
from asyncflow.environments.pool import EnvironmentPool, environment_socket
from asyncflow.rewards.components import WeightedRewards
from asyncflow.rewards.service import Rewards, serve


def serve_pools(reward: Path, environment: Path | None, *, path: Path) -> None:
    """Serve the pools that ``pools_by_socket`` returns until SIGTERM or SIGINT. Raises the same errors."""
    serve(pools_by_socket(reward, environment, path=path))


def pools_by_socket(reward: Path, environment: Path | None, *, path: Path) -> dict[Path, Rewards]:
    """Return the scorer at the Unix socket ``path`` and the environment at the socket next to it, by socket.

    reward, environment: files that contain these sections of a job. With an environment, there is no scorer if the
    rewards have a role of their own. Raises ManifestError if a section is missing or invalid.
    """
    spec, folder = load_reward(reward), reward.parent
    scorers: dict[Path, Rewards] = {}
    if spec.role is None or environment is None:
        scorers[path] = WeightedRewards.of(spec, workdir=folder)
    if environment is not None:
        scorers[environment_socket(path)] = EnvironmentPool(load_environment(environment), spec, workdir=folder)
    return scorers
