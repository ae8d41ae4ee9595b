"""A pool of reward processes for one function: every sample gets its score or a flag within its deadline.

A call has one sample, a batch of those that wait, or a group, as the function takes them (``rewards.calling``). Of a
concurrent function a process has several calls under way.

Invariants: a sample that is stuck delays only itself: its process is killed at the deadline, and meanwhile the pool
grows, up to ``max_workers``, whenever somebody has waited for a free process longer than PATIENCE_S; a sample whose
failure may be that of another in its call or in its process is scored again without that one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, PeerLost
from asyncflow.rewards.process import RewardProcess, Scorer
from asyncflow.rewards.wire import FAILURES, Example, Failure, Score, Takes

logger = logging.getLogger(__name__)

PATIENCE_S: Final = 0.5
_GATHER_S: Final = 0.01
"""Seconds for which the first sample of a batch waits for others."""


@dataclass(frozen=True, kw_only=True)
class PoolLimits:
    """Sizes and deadlines.

    min_workers, max_workers: processes; timeout_s: how long one call may run; start_timeout_s: how long loading may
    take; batch: most samples of one call of a function that takes batches; calls: most calls at once in a process whose
    function is concurrent.
    """

    min_workers: int = 1
    max_workers: int = 8
    timeout_s: float = 10.0
    start_timeout_s: float = 60.0
    batch: int = 16
    calls: int = 64


class _Called(NamedTuple):
    """Outcome of one call. crowded: it failed with its process, in which other calls were under way."""

    scores: list[Score]
    failed: bool = False
    crowded: bool = False


class RewardPool:
    """Reward processes for one function.

    scored: samples that have their score; failed: those that have none, by why; takes: what the function is called
    with, known once the pool has started.

    Use from one event loop, in a thread that outlives the pool: the kernel kills the processes when the thread that
    started them ends.
    """

    def __init__(self, scorer: Scorer, limits: PoolLimits | None = None) -> None:
        self._scorer = scorer
        self._limits = limits or PoolLimits()
        self._most = max(self._limits.min_workers, self._limits.max_workers)
        self._alive: set[RewardProcess] = set()
        self._free: asyncio.LifoQueue[RewardProcess] = asyncio.LifoQueue()
        self._waiting: deque[tuple[Example, asyncio.Future[Score]]] = deque()
        self._batching: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._alone = asyncio.Lock()
        self._apart: asyncio.Task[list[Score]] | None = None
        self._growth: asyncio.Task[None] | None = None
        self._failure: AsyncFlowError | None = None
        self._closed = False
        self._told: set[str] = set()
        self.takes: Takes = "sample"
        self.scored = 0
        self.failed: dict[Failure, int] = dict.fromkeys(FAILURES, 0)

    @property
    def workers(self) -> int:
        """Number of processes that live now."""
        return len(self._alive)

    async def start(self) -> None:
        """Start ``min_workers`` processes. Raises ManifestError where the function cannot be loaded."""
        while len(self._alive) < self._limits.min_workers:
            await self._add()

    async def score(self, examples: Sequence[Example]) -> list[Score]:
        """Score samples, which are all of one prompt where the function takes groups.

        Never raises for what the function does.
        """
        if self.takes == "group":
            scores = await self._score(examples)
        elif self.takes == "batch":
            scores = await asyncio.gather(*map(self._in_batch, examples))
        else:
            alone = await asyncio.gather(*(self._score([example]) for example in examples))
            scores = [score for (score,) in alone]
        for score in scores:
            self._count(score)
        return scores

    async def close(self) -> None:
        """Kill all processes; samples that are being scored fail as ``died``."""
        self._closed = True
        tasks = [task for task in (self._growth, self._batching, self._apart) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._end_waiting("the reward pool is closed")
        await asyncio.gather(*(worker.kill() for worker in self._alive))
        self._alive.clear()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def _count(self, score: Score) -> None:
        if not score.failure:
            self.scored += 1
            return
        self.failed[score.failure] += 1
        level = logging.DEBUG if score.failure in self._told else logging.WARNING
        name = self._scorer.function
        logger.log(level, "%s: a sample has no reward (%s): %s", name, score.failure, score.detail)
        self._told.add(score.failure)

    async def _score(self, examples: Sequence[Example], *, worker: RewardProcess | None = None) -> list[Score]:
        """Score the samples of one call, and again what may have failed because of others.

        worker: the process that is taken for it. A call whose process died is tried once more in any case: it may have
        died of something else.
        """
        called = await self._call(examples, worker)
        if called.failed and not self._closed:
            if len(examples) > 1 and self.takes == "batch":
                alone = await asyncio.gather(*(self._score([example]) for example in examples))
                return [score for (score,) in alone]
            if called.crowded:
                return await self._score_alone(examples)
            if called.scores[0].failure == "died":
                called = await self._call(examples, None)
        return called.scores

    async def _score_alone(self, examples: Sequence[Example]) -> list[Score]:
        """Score in a process that has no other calls; one of them at a time, and none once the pool is closed."""
        async with self._alone:
            if not self._closed:
                self._apart = apart = asyncio.create_task(self._score_apart(examples))
                try:
                    await asyncio.wait([apart])
                finally:
                    apart.cancel()
                if not apart.cancelled():
                    return apart.result()
            return _failed("died", "the reward pool is closed", examples)

    async def _score_apart(self, examples: Sequence[Example]) -> list[Score]:
        try:
            worker = await RewardProcess.start(self._scorer, timeout=self._limits.start_timeout_s)
        except AsyncFlowError as error:
            return _failed("died", str(error), examples)
        self._alive.add(worker)
        try:
            return (await self._ask(worker, examples)).scores
        finally:
            await self._bury(worker)

    async def _in_batch(self, example: Example) -> Score:
        """Score a sample together with others that wait for a process at the same time."""
        answered: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        self._waiting.append((example, answered))
        if self._batching is None or self._batching.done():
            self._batching = asyncio.create_task(self._batch())
        return await answered

    async def _batch(self) -> None:
        """Hand what waits to processes as they become free, as much as a call may have."""
        await asyncio.sleep(_GATHER_S)
        while self._waiting:
            try:
                worker = await self._take()
            except AsyncFlowError as error:
                self._end_waiting(str(error))
                return
            wanted: list[tuple[Example, asyncio.Future[Score]]] = []
            while self._waiting and len(wanted) < self._limits.batch:
                example, answered = self._waiting.popleft()
                if not answered.done():
                    wanted.append((example, answered))
            if not wanted:
                self._free.put_nowait(worker)
                return
            call = asyncio.create_task(self._answer(wanted, worker))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _answer(self, wanted: Sequence[tuple[Example, asyncio.Future[Score]]], worker: RewardProcess) -> None:
        scores = await self._score([example for example, _ in wanted], worker=worker)
        for (_, answered), score in zip(wanted, scores, strict=True):
            if not answered.done():
                answered.set_result(score)

    def _end_waiting(self, why: str) -> None:
        while self._waiting:
            example, answered = self._waiting.popleft()
            if not answered.done():
                answered.set_result(*_failed("died", why, [example]))

    async def _call(self, examples: Sequence[Example], worker: RewardProcess | None) -> _Called:
        try:
            worker = worker or await self._take()
        except AsyncFlowError as error:
            return _Called(_failed("died", str(error), examples), failed=True)
        try:
            called = await self._ask(worker, examples)
        except BaseException:
            if worker.concurrent:
                self._free.put_nowait(worker)
            else:
                await self._bury(worker)
            raise
        if worker.broken is None:
            self._free.put_nowait(worker)
        else:
            await self._bury(worker)
        return called

    async def _ask(self, worker: RewardProcess, examples: Sequence[Example]) -> _Called:
        """Have a process score; it is broken afterwards where it can be asked no more."""
        try:
            answer = await worker.score(examples, timeout=self._limits.timeout_s)
        except (DeadlineExceeded, PeerLost) as error:
            crowded = worker.open > 1
            worker.end("was ended, because a call in it took too long")
            failure: Failure = "timeout" if isinstance(error, DeadlineExceeded) else "died"
            return _Called(_failed(failure, str(error), examples), failed=True, crowded=crowded)
        except ValueError as error:
            return _Called(_failed("raised", str(error), examples), failed=True)
        if answer.failure:
            return _Called(_failed(answer.failure, answer.detail, examples), failed=True)
        return _Called(answer.scores)

    async def _take(self) -> RewardProcess:
        while True:
            worker = await self._turn()
            if worker.broken is None:
                return worker
            if worker in self._alive:
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
                self._grow(self._most)
        except BaseException:
            if not turn.cancel():
                self._free.put_nowait(turn.result())
            raise
        return turn.result()

    async def _bury(self, worker: RewardProcess) -> None:
        if worker not in self._alive:
            return
        await worker.kill()
        self._alive.discard(worker)
        self._grow(self._limits.min_workers)

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
        worker = await RewardProcess.start(self._scorer, timeout=self._limits.start_timeout_s)
        for lacking in set(worker.unrestricted) - self._told:
            logger.warning("the sandbox of rewards is incomplete: %s", lacking)
        self._told.update(worker.unrestricted)
        self._failure = None
        self.takes = worker.takes
        self._alive.add(worker)
        for _ in range(self._limits.calls if worker.concurrent else 1):
            self._free.put_nowait(worker)


def _failed(failure: Failure, detail: str, examples: Sequence[Example]) -> list[Score]:
    return [Score(failure=failure, detail=detail)] * len(examples)
