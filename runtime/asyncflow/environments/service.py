"""The process of ``asyncflow rewards``, in a rollout's pod: it scores samples and answers turns, each at a socket."""

from __future__ import annotations

from pathlib import Path

from asyncflow.api.load import load_environment, load_reward
from asyncflow.environments.pool import EnvironmentPool, socket_beside
from asyncflow.rewards.components import WeightedRewards
from asyncflow.rewards.service import Rewards, serve


def serve_beside(reward: Path, environment: Path | None, *, path: Path) -> None:
    """Score at the Unix socket ``path``, and answer turns beside it, until SIGTERM or SIGINT.

    reward, environment: files with these sections of a job. Raises ManifestError where they have not.
    """
    spec, folder = load_reward(reward), reward.parent
    scorers: dict[Path, Rewards] = {path: WeightedRewards.of(spec, workdir=folder)}
    if environment is not None:
        scorers[socket_beside(path)] = EnvironmentPool(load_environment(environment), spec, workdir=folder)
    serve(scorers)
