"""A pool of reward processes for one function, which scores every sample within a deadline or reports a failure.

A call has one sample, a batch of waiting samples, or a group, depending on the function (``rewards.calling``). A
process with a concurrent function runs several calls at the same time.

Invariants: a sample that hangs delays only itself: its process is killed at the deadline, and meanwhile the pool grows,
up to ``max_workers``, whenever a caller has waited for a free process longer than PATIENCE_S. A sample whose failure
may be caused by another sample in its call or in its process is scored again without that sample.
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
"""Seconds for which the first sample of a batch waits for further samples."""


@dataclass(frozen=True, kw_only=True)
class PoolLimits:
    """Sizes and deadlines of a pool.

    min_workers, max_workers: number of processes; timeout_s: seconds that one call may take; timeout_field: the field
    that sets them; start_timeout_s: seconds that a process may take to load the function; batch: most samples of one
    call, for a function that takes batches; calls: most concurrent calls in a process, for a concurrent function.
    """

    min_workers: int = 1
    max_workers: int = 8
    timeout_s: float = 10.0
    timeout_field: str = "reward.timeoutSeconds"
    start_timeout_s: float = 60.0
    batch: int = 16
    calls: int = 64


class _CallResult(NamedTuple):
    """Result of one call. shared: it failed together with its process, in which other calls were running."""

    scores: list[Score]
    failed: bool = False
    shared: bool = False


class RewardPool:
    """Reward processes for one function.

    scored: number of samples with a score; failed: number of samples without one, by reason; takes: the kind of call of
    the function, known after the start.

    Use it from one event loop, in a thread that outlives the pool: the kernel kills the processes when the thread that
    started them ends.
    """

    def __init__(self, scorer: Scorer, limits: PoolLimits | None = None) -> None:
        self._scorer = scorer
        self._limits = limits or PoolLimits()
        self._max_workers = max(self._limits.min_workers, self._limits.max_workers)
        self._alive: set[RewardProcess] = set()
        self._free: asyncio.LifoQueue[RewardProcess] = asyncio.LifoQueue()
        self._waiting: deque[tuple[Example, asyncio.Future[Score]]] = deque()
        self._batching: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._isolated_lock = asyncio.Lock()
        self._isolated: asyncio.Task[list[Score]] | None = None
        self._growth: asyncio.Task[None] | None = None
        self._failure: AsyncFlowError | None = None
        self._closed = False
        self._reported: set[str] = set()
        self.takes: Takes = "sample"
        self.scored = 0
        self.failed: dict[Failure, int] = dict.fromkeys(FAILURES, 0)

    @property
    def workers(self) -> int:
        """Number of running processes."""
        return len(self._alive)

    async def start(self) -> None:
        """Start ``min_workers`` processes. Raises ManifestError if the function cannot be loaded."""
        while len(self._alive) < self._limits.min_workers:
            await self._add_worker()

    async def score(self, examples: Sequence[Example]) -> list[Score]:
        """Score samples, which are all samples of one prompt if the function takes groups.

        Errors of the function are returned as failures.
        """
        if self.takes == "group":
            scores = await self._score(examples)
        elif self.takes == "batch":
            scores = await asyncio.gather(*map(self._in_batch, examples))
        else:
            singles = await asyncio.gather(*(self._score([example]) for example in examples))
            scores = [score for (score,) in singles]
        for score in scores:
            self._count(score)
        return scores

    async def close(self) -> None:
        """Kill all processes; samples that are being scored fail as ``died``."""
        self._closed = True
        tasks = [task for task in (self._growth, self._batching, self._isolated) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail_waiting("the reward pool is closed")
        await asyncio.gather(*(worker.kill() for worker in self._alive))
        self._alive.clear()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def _count(self, score: Score) -> None:
        if not score.failure:
            self.scored += 1
            return
        self.failed[score.failure] += 1
        level = logging.DEBUG if score.failure in self._reported else logging.WARNING
        name = self._scorer.function
        logger.log(level, "%s: a sample has no reward (%s): %s", name, score.failure, score.detail)
        self._reported.add(score.failure)

    async def _score(self, examples: Sequence[Example], *, worker: RewardProcess | None = None) -> list[Score]:
        """Score the samples of one call, and repeat samples whose failure may have another cause.

        worker: the process for the call, None for any free one. A call whose process died is repeated once in any case.
        """
        result = await self._call(examples, worker)
        if result.failed and not self._closed:
            if len(examples) > 1 and self.takes == "batch":
                singles = await asyncio.gather(*(self._score([example]) for example in examples))
                return [score for (score,) in singles]
            if result.shared:
                return await self._score_isolated(examples)
            if result.scores[0].failure == "died":
                result = await self._call(examples, None)
        return result.scores

    async def _score_isolated(self, examples: Sequence[Example]) -> list[Score]:
        """Score in a new process without other calls, one call at a time; fails if the pool is closed."""
        async with self._isolated_lock:
            if not self._closed:
                self._isolated = isolated = asyncio.create_task(self._score_in_new_process(examples))
                try:
                    await asyncio.wait([isolated])
                finally:
                    isolated.cancel()
                if not isolated.cancelled():
                    return isolated.result()
            return _failed("died", "the reward pool is closed", examples)

    async def _score_in_new_process(self, examples: Sequence[Example]) -> list[Score]:
        try:
            worker = await RewardProcess.start(self._scorer, timeout=self._limits.start_timeout_s)
        except AsyncFlowError as error:
            return _failed("died", str(error), examples)
        self._alive.add(worker)
        try:
            return (await self._ask(worker, examples)).scores
        finally:
            await self._discard(worker)

    async def _in_batch(self, example: Example) -> Score:
        """Score a sample together with other samples that wait for a process at the same time."""
        answered: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        self._waiting.append((example, answered))
        if self._batching is None or self._batching.done():
            self._batching = asyncio.create_task(self._batch())
        return await answered

    async def _batch(self) -> None:
        """Pass the waiting samples to free processes, at most ``batch`` samples in each call."""
        await asyncio.sleep(_GATHER_S)
        while self._waiting:
            try:
                worker = await self._take()
            except AsyncFlowError as error:
                self._fail_waiting(str(error))
                return
            batch: list[tuple[Example, asyncio.Future[Score]]] = []
            while self._waiting and len(batch) < self._limits.batch:
                example, answered = self._waiting.popleft()
                if not answered.done():
                    batch.append((example, answered))
            if not batch:
                self._free.put_nowait(worker)
                return
            call = asyncio.create_task(self._answer(batch, worker))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _answer(self, batch: Sequence[tuple[Example, asyncio.Future[Score]]], worker: RewardProcess) -> None:
        scores = await self._score([example for example, _ in batch], worker=worker)
        for (_, answered), score in zip(batch, scores, strict=True):
            if not answered.done():
                answered.set_result(score)

    def _fail_waiting(self, why: str) -> None:
        while self._waiting:
            example, answered = self._waiting.popleft()
            if not answered.done():
                answered.set_result(*_failed("died", why, [example]))

    async def _call(self, examples: Sequence[Example], worker: RewardProcess | None) -> _CallResult:
        try:
            worker = worker or await self._take()
        except AsyncFlowError as error:
            return _CallResult(_failed("died", str(error), examples), failed=True)
        try:
            result = await self._ask(worker, examples)
        except BaseException:
            if worker.concurrent:
                self._free.put_nowait(worker)
            else:
                await self._discard(worker)
            raise
        if worker.broken is None:
            self._free.put_nowait(worker)
        else:
            await self._discard(worker)
        return result

    async def _ask(self, worker: RewardProcess, examples: Sequence[Example]) -> _CallResult:
        """Call the function in a process; afterwards ``worker.broken`` is set if the process is no longer usable."""
        try:
            answer = await worker.score(examples, timeout=self._limits.timeout_s)
        except (DeadlineExceeded, PeerLost) as error:
            shared = worker.open > 1
            worker.end("was ended, because a call in it took too long")
            late = isinstance(error, DeadlineExceeded)
            scores = self._late(examples) if late else _failed("died", str(error), examples)
            return _CallResult(scores, failed=True, shared=shared)
        except ValueError as error:
            return _CallResult(_failed("raised", str(error), examples), failed=True)
        if answer.failure == "timeout":
            return _CallResult(self._late(examples), failed=True)
        if answer.failure:
            return _CallResult(_failed(answer.failure, answer.detail, examples), failed=True)
        return _CallResult(answer.scores)

    def _late(self, examples: Sequence[Example]) -> list[Score]:
        """Return the scores of a call that took too long."""
        limits = self._limits
        return _failed("timeout", f"a call took longer than {limits.timeout_field}, {limits.timeout_s:g} s", examples)

    async def _take(self) -> RewardProcess:
        while True:
            worker = await self._next_free()
            if worker.broken is None:
                return worker
            if worker in self._alive:
                logger.warning("%s; a new process replaces it", worker.broken)
                await self._discard(worker)

    async def _next_free(self) -> RewardProcess:
        """Wait for a free process and grow the pool meanwhile; callers keep their order.

        Raises the error of a process that could not be started meanwhile if no other process is left.
        """
        turn, known = asyncio.create_task(self._free.get()), self._failure
        try:
            while not (await asyncio.wait({turn}, timeout=PATIENCE_S))[0]:
                if self._closed:
                    raise PeerLost("the reward pool is closed")
                if not self._alive and self._failure is not None and self._failure is not known:
                    raise self._failure
                self._grow(self._max_workers)
        except BaseException:
            if not turn.cancel():
                self._free.put_nowait(turn.result())
            raise
        return turn.result()

    async def _discard(self, worker: RewardProcess) -> None:
        if worker not in self._alive:
            return
        await worker.kill()
        self._alive.discard(worker)
        self._grow(self._limits.min_workers)

    def _grow(self, limit: int) -> None:
        growing = self._growth is not None and not self._growth.done()
        if not (growing or self._closed or len(self._alive) >= limit):
            self._growth = asyncio.create_task(self._try_to_add())

    async def _try_to_add(self) -> None:
        try:
            await self._add_worker()
        except AsyncFlowError as error:
            self._failure = error
            logger.warning("a further reward process cannot be started: %s", error)

    async def _add_worker(self) -> None:
        worker = await RewardProcess.start(self._scorer, timeout=self._limits.start_timeout_s)
        for missing in set(worker.unrestricted) - self._reported:
            logger.warning("the sandbox of rewards is incomplete: %s", missing)
        self._reported.update(worker.unrestricted)
        self._failure = None
        self.takes = worker.takes
        self._alive.add(worker)
        for _ in range(self._limits.calls if worker.concurrent else 1):
            self._free.put_nowait(worker)


def _failed(failure: Failure, detail: str, examples: Sequence[Example]) -> list[Score]:
    return [Score(failure=failure, detail=detail)] * len(examples)
