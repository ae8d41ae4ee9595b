"""Processes that run a job's environment: every request is answered, or fails, within its deadline.

Invariant: an environment is confined, killed and replaced like a reward function (``rewards.pool``). A request that
fails becomes the outcome of its sample.
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
from asyncflow.rewards.service import RewardClient, Rewards, silence_limit
from asyncflow.rewards.wire import Example, Failure, RewardResult

_CHILD = "asyncflow.environments.child"


class EnvironmentAnswer(NamedTuple):
    """Answer to one turn.

    text: the text that the model reads next, None if the episode ends.
    failure, detail: the reason for a missing answer, "" if there is an answer.
    """

    text: str | None = None
    failure: Failure | Literal[""] = ""
    detail: str = ""


class Environments(Protocol):
    """Interface of an environment that answers requests for any number of episodes concurrently."""

    async def answer(self, example: Example) -> EnvironmentAnswer:
        """Answer the last turn of a transcript. Never raises for an error of the environment."""
        ...


class EnvironmentRunner:
    """An environment that runs in child processes, or in a server next to this process."""

    def __init__(self, processes: Rewards) -> None:
        self._processes = processes

    async def start(self) -> None:
        """Start. Raises ManifestError if the environment cannot be loaded, DeadlineExceeded, PeerLost."""
        await self._processes.start()

    async def answer(self, example: Example) -> EnvironmentAnswer:
        """See ``Environments``."""
        (found,) = await self._processes.score([example])
        detail = f"the environment: {found.detail}" if found.failure else ""
        return EnvironmentAnswer(found.text, found.failure, detail)

    async def close(self) -> None:
        """Stop. Open requests fail as ``died``."""
        await self._processes.close()


class EnvironmentPool:
    """A pool of environment processes, of the size of the pool of ``reward``. A server serves it like a reward pool."""

    by_group = False

    def __init__(self, spec: EnvironmentSpec, reward: RewardSpec, *, workdir: Path, run: Path | None = None) -> None:
        limits = PoolLimits(
            min_workers=reward.workers.min,
            max_workers=reward.workers.max,
            timeout_s=spec.timeout_seconds,
            timeout_field="environment.timeoutSeconds",
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
    """Return the definition of an environment's process, confined as ``reward`` says.

    workdir, run: the folders of the job and of the run.
    """
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
    """Return the environment of a manifest, not started: in child processes, or at the rewards' server if there is one.

    workdir: the job's folder; run: the folder of the run; within_s: how long that server may take until it listens.
    """
    path = os.environ.get(REWARD_SOCKET_ENV)
    if path is None:
        return EnvironmentRunner(EnvironmentPool(spec, reward, workdir=workdir, run=run))
    silence_s = silence_limit(reward, timeout_s=spec.timeout_seconds)
    return EnvironmentRunner(
        RewardClient(environment_socket(Path(path)), start_timeout_s=within_s, silence_s=silence_s)
    )


def environment_socket(rewards: Path) -> Path:
    """Return the socket at which turns are answered, if rewards are scored at the socket ``rewards``."""
    return rewards.with_name(Path(ENVIRONMENT_SOCKET).name)
