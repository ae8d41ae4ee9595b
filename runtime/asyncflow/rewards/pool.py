"""A pool of reward processes: every sample gets its reward or a flag within its deadline.

Invariant: a sample that is stuck delays only itself: its process is killed at the deadline, and meanwhile the pool
grows, up to ``max_workers``, whenever somebody has waited for a free process longer than PATIENCE_S.
"""

from __future__ import annotations

import asyncio
import logging
import math
from pathlib import Path
from typing import Final

from asyncflow.api.learning import RewardSpec
from asyncflow.errors import AsyncFlowError, DeadlineExceeded, PeerLost
from asyncflow.rewards.process import RewardProcess, Scorer
from asyncflow.rewards.wire import FAILURES, Example, Failure, RewardResult, ScoreAnswer

logger = logging.getLogger(__name__)

PATIENCE_S: Final = 0.5


class RewardPool:
    """Reward processes for one function.

    low, high: rewards outside of them are failures; timeout_s: how long one score may run; start_timeout_s: how long
    loading may take; scored: samples that have their reward; failed: those that have none, by why.

    Use from one event loop, in a thread that outlives the pool: the kernel kills the processes when the thread that
    started them ends.
    """

    def __init__(
        self,
        scorer: Scorer,
        *,
        low: float = -math.inf,
        high: float = math.inf,
        min_workers: int = 1,
        max_workers: int = 8,
        timeout_s: float = 10.0,
        start_timeout_s: float = 60.0,
    ) -> None:
        self._scorer = scorer
        self._low = low
        self._high = high
        self._min = min_workers
        self._max = max(min_workers, max_workers)
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._alive: set[RewardProcess] = set()
        self._free: asyncio.LifoQueue[RewardProcess] = asyncio.LifoQueue()
        self._growth: asyncio.Task[None] | None = None
        self._failure: AsyncFlowError | None = None
        self._closed = False
        self._told: set[str] = set()
        self.scored = 0
        self.failed: dict[Failure, int] = dict.fromkeys(FAILURES, 0)

    @classmethod
    def of(cls, spec: RewardSpec, *, workdir: Path, run: Path | None = None) -> RewardPool:
        """Return the pool that a manifest asks for. workdir, run: as for ``Scorer.of``."""
        return cls(
            Scorer.of(spec, workdir=workdir, run=run),
            low=spec.min,
            high=spec.max,
            min_workers=spec.workers.min,
            max_workers=spec.workers.max,
            timeout_s=spec.timeout_seconds,
        )

    @property
    def workers(self) -> int:
        """Number of processes that live now."""
        return len(self._alive)

    async def start(self) -> None:
        """Start ``min_workers`` processes. Raises ManifestError where the function cannot be loaded."""
        while len(self._alive) < self._min:
            await self._add()

    async def score(self, example: Example) -> RewardResult:
        """Score one sample; never raises for what the function does.

        A sample whose process died is tried once more: the process may have died of something else.
        """
        result = await self._score(example)
        if result.failure == "died" and not self._closed:
            result = await self._score(example)
        if not result.failure:
            self.scored += 1
            return result
        self.failed[result.failure] += 1
        level = logging.DEBUG if result.failure in self._told else logging.WARNING
        logger.log(level, "a sample has no reward (%s): %s", result.failure, result.detail)
        self._told.add(result.failure)
        return result

    async def close(self) -> None:
        """Kill all processes; samples that are being scored fail as ``died``."""
        self._closed = True
        if self._growth is not None:
            self._growth.cancel()
            await asyncio.gather(self._growth, return_exceptions=True)
        await asyncio.gather(*(worker.kill() for worker in self._alive))
        self._alive.clear()

    async def _score(self, example: Example) -> RewardResult:
        try:
            worker = await self._take()
        except AsyncFlowError as error:
            return RewardResult(value=0.0, failure="died", detail=str(error))
        try:
            answer = await worker.score(example, timeout=self._timeout_s)
        except DeadlineExceeded as error:
            await self._bury(worker)
            return RewardResult(value=0.0, failure="timeout", detail=str(error))
        except PeerLost as error:
            await self._bury(worker)
            return RewardResult(value=0.0, failure="died", detail=str(error))
        except ValueError as error:
            self._free.put_nowait(worker)
            return RewardResult(value=0.0, failure="raised", detail=str(error))
        except BaseException:
            await self._bury(worker)
            raise
        self._free.put_nowait(worker)
        return self._judge(answer)

    def _judge(self, answer: ScoreAnswer) -> RewardResult:
        if answer.failure:
            return RewardResult(value=0.0, failure=answer.failure, detail=answer.detail)
        if not math.isfinite(answer.value):
            return RewardResult(value=0.0, failure="invalid", detail=f"the reward function returned {answer.value}")
        if not self._low <= answer.value <= self._high:
            detail = f"{answer.value:g} is outside of reward.min {self._low:g} and reward.max {self._high:g}"
            return RewardResult(value=0.0, failure="out_of_range", detail=detail)
        return RewardResult(value=answer.value)

    async def _take(self) -> RewardProcess:
        while True:
            worker = await self._turn()
            if worker.broken is None:
                return worker
            logger.warning("%s; another takes its place", worker.broken)
            await self._bury(worker)

    async def _turn(self) -> RewardProcess:
        """Wait for a free process, first come first served: growing the pool costs nobody its place."""
        turn = asyncio.create_task(self._free.get())
        try:
            while not (await asyncio.wait({turn}, timeout=PATIENCE_S))[0]:
                if self._closed:
                    raise PeerLost("the reward pool is closed")
                if not self._alive and self._failure is not None:
                    raise self._failure
                self._grow(self._max)
        except BaseException:
            if not turn.cancel():
                self._free.put_nowait(turn.result())
            raise
        return turn.result()

    async def _bury(self, worker: RewardProcess) -> None:
        await worker.kill()
        self._alive.discard(worker)
        self._grow(self._min)

    def _grow(self, limit: int) -> None:
        growing = self._growth is not None and not self._growth.done()
        if not (growing or self._closed or len(self._alive) >= limit):
            self._growth = asyncio.create_task(self._replace())

    async def _replace(self) -> None:
        try:
            await self._add()
        except AsyncFlowError as error:
            self._failure = error
            logger.warning("no further reward process: %s", error)

    async def _add(self) -> None:
        worker = await RewardProcess.start(self._scorer, timeout=self._start_timeout_s)
        for lacking in set(worker.unrestricted) - self._told:
            logger.warning("the sandbox of rewards is incomplete: %s", lacking)
        self._told.update(worker.unrestricted)
        self._failure = None
        self._alive.add(worker)
        self._free.put_nowait(worker)
