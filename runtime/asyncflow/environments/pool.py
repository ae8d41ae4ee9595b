"""Processes that run a job's environment: every question is answered, or fails, within its deadline.

Invariant: an environment is confined, killed and replaced as a reward function is (``rewards.pool``), and a question
that fails is an outcome of its sample.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from asyncflow.api.names import ENVIRONMENT_SOCKET, REWARD_SOCKET_ENV
from asyncflow.api.placement import AcceleratorSpec
from asyncflow.api.rewards import EnvironmentSpec, RewardSpec
from asyncflow.rewards.pool import PoolLimits, RewardPool
from asyncflow.rewards.process import Scorer
from asyncflow.rewards.service import RewardClient, Rewards, silence_of
from asyncflow.rewards.wire import Example, Failure, RewardResult

_CHILD = "asyncflow.environments.child"


class EnvironmentAnswer(NamedTuple):
    """Answer to one turn.

    text: what the model reads next, None where the episode ends; failure, detail: why there is no answer, "" where
    there is one.
    """

    text: str | None = None
    failure: Failure | Literal[""] = ""
    detail: str = ""


class Environments(Protocol):
    """An environment that can be asked, for any number of episodes at once."""

    async def answer(self, example: Example) -> EnvironmentAnswer:
        """Answer the last turn of a transcript; never raises for what the environment does."""
        ...


class EnvironmentRunner:
    """An environment in processes of this one, or of a server beside it."""

    def __init__(self, processes: Rewards) -> None:
        self._processes = processes

    async def start(self) -> None:
        """Get ready. Raises ManifestError where the environment cannot be loaded, DeadlineExceeded, PeerLost."""
        await self._processes.start()

    async def answer(self, example: Example) -> EnvironmentAnswer:
        """See ``Environments``."""
        (found,) = await self._processes.score([example])
        detail = f"the environment: {found.detail}" if found.failure else ""
        return EnvironmentAnswer(found.text, found.failure, detail)

    async def close(self) -> None:
        """End it; what is asked then fails as ``died``."""
        await self._processes.close()


class EnvironmentPool:
    """Processes of an environment, as many as score for ``reward``, which a server serves as it does rewards."""

    by_group = False

    def __init__(self, spec: EnvironmentSpec, reward: RewardSpec, *, workdir: Path, run: Path | None = None) -> None:
        limits = PoolLimits(
            min_workers=reward.workers.min,
            max_workers=reward.workers.max,
            timeout_s=spec.timeout_seconds,
            start_timeout_s=reward.start_seconds,
        )
        self._pool = RewardPool(environment_process(spec, reward, workdir=workdir, run=run), limits)

    async def start(self) -> None:
        """Start processes."""
        await self._pool.start()

    async def score(self, examples: Sequence[Example]) -> list[RewardResult]:
        """Answer the last turn of each transcript."""
        return [
            RewardResult(value=0.0, failure=found.failure, detail=found.detail, text=found.text)
            for found in await self._pool.score(examples)
        ]

    async def close(self) -> None:
        """Kill all processes."""
        await self._pool.close()


def environment_process(spec: EnvironmentSpec, reward: RewardSpec, *, workdir: Path, run: Path | None = None) -> Scorer:
    """Return the definition of an environment's process, confined as ``reward`` says. workdir, run: of the job."""
    confined = Scorer.of(reward, workdir=workdir, run=run)[0]
    return replace(
        confined,
        function=spec.function,
        module=_CHILD,
        extractor="text",
        config=dict(spec.config),
        accelerator=AcceleratorSpec(),
    )


def open_environment(
    spec: EnvironmentSpec, reward: RewardSpec, *, workdir: Path, run: Path, within_s: float
) -> EnvironmentRunner:
    """Return the environment of a manifest, not started: beside the rewards, wherever those are.

    workdir: the job's folder; run: the run's own; within_s: how long a process beside this one may take to listen.
    """
    path = os.environ.get(REWARD_SOCKET_ENV)
    if path is None:
        return EnvironmentRunner(EnvironmentPool(spec, reward, workdir=workdir, run=run))
    silence_s = silence_of(reward, timeout_s=spec.timeout_seconds)
    return EnvironmentRunner(RewardClient(socket_beside(Path(path)), start_timeout_s=within_s, silence_s=silence_s))


def socket_beside(rewards: Path) -> Path:
    """Return the socket at which turns are answered, where rewards are scored at ``rewards``."""
    return rewards.with_name(Path(ENVIRONMENT_SOCKET).name)
