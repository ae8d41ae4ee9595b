"""The process of ``asyncflow rewards``: it scores samples and answers turns, each at a socket.

It is in each pod of a rollout, or of the role ``reward`` where there is one: then that in a rollout's pod only answers.
"""

from __future__ import annotations

from pathlib import Path

from asyncflow.api.load import load_environment, load_reward
from asyncflow.environments.pool import EnvironmentPool, socket_beside
from asyncflow.rewards.components import WeightedRewards
from asyncflow.rewards.service import Rewards, serve


def serve_beside(reward: Path, environment: Path | None, *, path: Path) -> None:
    """Serve what ``beside`` says until SIGTERM or SIGINT. Raises as it does."""
    serve(beside(reward, environment, path=path))


def beside(reward: Path, environment: Path | None, *, path: Path) -> dict[Path, Rewards]:
    """Return what scores at the Unix socket ``path``, and what answers turns beside it, by socket.

    reward, environment: files with these sections of a job; with an environment, nothing is scored where the reward
    has a role of its own. Raises ManifestError where they have not.
    """
    spec, folder = load_reward(reward), reward.parent
    scorers: dict[Path, Rewards] = {}
    if spec.role is None or environment is None:
        scorers[path] = WeightedRewards.of(spec, workdir=folder)
    if environment is not None:
        scorers[socket_beside(path)] = EnvironmentPool(load_environment(environment), spec, workdir=folder)
    return scorers
