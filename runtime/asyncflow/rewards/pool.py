"""A pool of reward processes: every sample gets its reward or a flag within its deadline.

Invariant: a sample that is stuck delays only itself: its process is killed at the deadline, and meanwhile the pool
grows, up to ``max_workers``, whenever somebody has waited for a free process longer than PATIENCE_S.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, PeerLost
from asyncflow.rewards.process import RewardProcess
from asyncflow.rewards.wire import Example, Flag, RewardResult

logger = logging.getLogger(__name__)

PATIENCE_S = 0.5


class RewardPool:
    """Reward processes for one function.

    function, extractor: see ``rewards.registry`` and ``rewards.extract``; workdir: the job's folder, from where a
    user's module is imported; timeout_s: how long one score may run; start_timeout_s: how long loading may take;
    outcomes: results so far, by flag.

    Use from one event loop, in a thread that outlives the pool: the kernel kills the processes when the thread that
    started them ends.
    """

    def __init__(
        self,
        *,
        function: str,
        extractor: str = "text",
        workdir: Path,
        min_workers: int = 1,
        max_workers: int = 8,
        timeout_s: float = 10.0,
        start_timeout_s: float = 60.0,
    ) -> None:
        self._function = function
        self._extractor = extractor
        self._workdir = workdir.resolve()
        self._min = min_workers
        self._max = max(min_workers, max_workers)
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._alive: set[RewardProcess] = set()
        self._free: asyncio.LifoQueue[RewardProcess] = asyncio.LifoQueue()
        self._growth: asyncio.Task[None] | None = None
        self._failure: AsyncFlowError | None = None
        self._closed = False
        self.outcomes: dict[Flag, int] = {"": 0, "timeout": 0, "error": 0, "crashed": 0}

    @property
    def workers(self) -> int:
        """How many processes live now."""
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
        if result.flag == "crashed" and not self._closed:
            result = await self._score(example)
        self.outcomes[result.flag] += 1
        if result.flag:
            logger.warning("reward %s: %s", result.flag, result.detail)
        return result

    async def close(self) -> None:
        """Kill all processes; samples that are being scored get the flag ``crashed``."""
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
            return RewardResult(value=0.0, flag="crashed", detail=str(error))
        try:
            scored = await worker.score(example, timeout=self._timeout_s)
        except DeadlineExceeded as error:
            await self._bury(worker)
            return RewardResult(value=0.0, flag="timeout", detail=str(error))
        except PeerLost as error:
            await self._bury(worker)
            return RewardResult(value=0.0, flag="crashed", detail=str(error))
        except ValueError as error:
            self._free.put_nowait(worker)
            return RewardResult(value=0.0, flag="error", detail=str(error))
        except BaseException:
            await self._bury(worker)
            raise
        self._free.put_nowait(worker)
        if scored.error:
            return RewardResult(value=0.0, flag="error", detail=scored.error)
        return RewardResult(value=scored.value)

    async def _take(self) -> RewardProcess:
        while True:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    return await self._free.get()
            except TimeoutError:
                if self._closed:
                    raise PeerLost("the reward pool is closed") from None
                if not self._alive and self._failure is not None:
                    raise self._failure from None
                self._grow(self._max)

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
        worker = await RewardProcess.start(
            function=self._function,
            extractor=self._extractor,
            workdir=self._workdir,
            timeout=self._start_timeout_s,
        )
        self._failure = None
        self._alive.add(worker)
        self._free.put_nowait(worker)
