"""One process of a task: claims, fetches, computes and writes batches of rows under their leases.

While one batch is computed, another is claimed and fetched. A row whose computation failed is given back, so that this
or another process tries it again. After ``retries`` it is written without values and with the reason in its tag
``failure``; the driver, which decides finished groups, then drops and counts it like a sample without reward.

Invariants:
The lease of each held row is renewed until the row is written, given back or lost.
A write under a lease acknowledges the row, and a late write is refused, so each row is done once even if processes die.
No row is tried more often than the manifest allows, even if it crashes its process.
A process that is directed to leave claims nothing more, has ``drain_s`` seconds to finish running computations, and
gives back all other rows immediately.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from asyncflow.errors import AsyncFlowError, Refused, StaleHandle
from asyncflow.flow.claims import ENDED_PARTITION_S
from asyncflow.queue.client import QueueClient
from asyncflow.queue.protocol.messages import LeasedRow, Tag
from asyncflow.renewal import keep_renewing
from asyncflow.rpc.columns import Jagged
from asyncflow.rpc.membership import Status
from asyncflow.rpc.retry import Outage
from asyncflow.tasks.rows import Outcome, OutputColumn, RowFailure, TaggedValues, columns_of
from asyncflow.telemetry.busy import BusyClock
from asyncflow.telemetry.metrics import WorkerMetrics
from asyncflow.telemetry.spans import NO_SPANS, Spans

log = logging.getLogger(__name__)

Compute = Callable[[Sequence[LeasedRow], Mapping[str, Jagged]], Awaitable[Sequence[Outcome]]]
"""Computes a batch: takes the rows and the columns that the task reads, and returns an outcome for each row."""
T = TypeVar("T")
_PARK_S: Final = 30.0
_CALL_S: Final = 20.0


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """Settings of one process of a task.

    partitions, task: source of the claims; reads: columns to fetch; writes: columns to write; batch: most rows of a
    claim; parallel: number of batches computed at the same time; retries: most retries of a row, None for no limit;
    lease_s, drain_s: as in the manifest.
    """

    partitions: tuple[str, ...]
    task: str
    reads: tuple[str, ...]
    writes: tuple[OutputColumn, ...]
    batch: int
    parallel: int = 1
    retries: int | None = None
    lease_s: float = 60.0
    drain_s: float = 30.0


class TaskWorker:
    """The work of one process. compute: see ``Compute``; its exceptions end the process; spans: records computations
    and waits.
    """

    def __init__(
        self,
        *,
        queue: QueueClient,
        settings: TaskSettings,
        compute: Compute,
        metrics: WorkerMetrics,
        spans: Spans = NO_SPANS,
    ) -> None:
        self.busy = BusyClock()
        self._spans = spans
        self._computing = 0
        self.failed: Counter[str] = Counter()
        self._queue = queue
        self._settings = settings
        self._compute = compute
        self._metrics = metrics
        self._held: dict[str, int] = {}
        self._slots = asyncio.Semaphore(settings.parallel)
        self._leaving = asyncio.Event()
        self._outage = Outage(f"the queue for {settings.task}")
        self._done = 0
        self._first_failure = ""

    def leave(self) -> None:
        """Stop claiming, finish running computations, give back all other rows, and return from ``run``."""
        self._leaving.set()

    def status(self) -> Status:
        """Return the status for heartbeats: busy seconds, and counts of held, done, and failed rows by reason."""
        return {
            "busy_s": self.busy.total(),
            "held": sum(self._held.values()),
            "done": self._done,
            "failed": dict(self.failed),
            "first_failure": self._first_failure,
            "draining": self._leaving.is_set(),
        }

    async def run(self) -> None:
        """Work until ``leave`` is called. Raises the exceptions of ``compute``."""
        self._spans.enter("idle", waits="claim")
        async with asyncio.TaskGroup() as group:
            claiming = self._settings.partitions * (self._settings.parallel + 1)
            serving = [group.create_task(self._serve(partition)) for partition in claiming]
            renewing = group.create_task(self._renew())
            leaving = group.create_task(self._leaving.wait())
            await asyncio.wait((leaving, *serving), return_when=asyncio.FIRST_COMPLETED)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.drain_s):
                    await asyncio.wait(serving)
            for task in serving:
                task.cancel()
            await asyncio.wait(serving)
            renewing.cancel()
            leaving.cancel()

    async def _serve(self, partition: str) -> None:
        """Claim, fetch, compute and write one batch of a partition after another."""
        while not self._leaving.is_set():
            try:
                rows = await self._claim(partition)
            except AsyncFlowError as error:
                await self._outage.wait(error)
                continue
            self._outage.end()
            if not rows:
                continue
            for row in rows:
                self._held[row.lease] = self._held.get(row.lease, 0) + 1
            try:
                await self._work(rows)
            except BaseException:
                with contextlib.suppress(AsyncFlowError):
                    await self._queue.give_back(rows, reason="its replica leaves", timeout=_CALL_S / 4)
                raise
            finally:
                for lease in {row.lease for row in rows}:
                    self._held.pop(lease, None)

    async def _claim(self, partition: str) -> list[LeasedRow]:
        """Return claimed rows; none after a wait, if the partition has ended, or if this process leaves."""
        settings = self._settings
        claimed = await self._unless_leaving(
            self._queue.claim(partition=partition, task=settings.task, max_rows=settings.batch, timeout=_PARK_S)
        )
        if claimed is None:
            return []
        if claimed.ended:
            await self._unless_leaving(asyncio.sleep(ENDED_PARTITION_S))
        return claimed.rows

    async def _unless_leaving(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of ``work``; None if ``leave`` is called first."""
        working, leaving = asyncio.create_task(work), asyncio.create_task(self._leaving.wait())
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            working.cancel()
            leaving.cancel()
            await asyncio.wait((working, leaving))

    async def _work(self, rows: list[LeasedRow]) -> None:
        columns = await self._fetched(rows)
        if columns is None:
            return
        if not await self._unless_leaving(self._slots.acquire()):
            await self._give_back(rows, reason="its replica leaves")
            return
        try:
            with self._counted(step=rows[0].meta.step), self._metrics.batch_seconds.time():
                results = await self._results(rows, columns)
        finally:
            self._slots.release()
        await self._settle(rows, results)

    @contextlib.contextmanager
    def _counted(self, *, step: int) -> Iterator[None]:
        """Count and record the body as computing; the main span is "compute" while at least one batch is computed."""
        self._computing += 1
        self._spans.enter("compute", step=step)
        try:
            with self.busy("compute"):
                yield
        finally:
            self._computing -= 1
            if not self._computing:
                self._spans.enter("idle", waits="claim", step=-1)

    async def _results(self, rows: Sequence[LeasedRow], columns: Mapping[str, Jagged]) -> list[Outcome]:
        """Return an outcome for each row; rows without retries left are not computed again."""
        retries = self._settings.retries
        remaining = [i for i, row in enumerate(rows) if retries is None or row.attempt <= retries]
        detail = f"it was tried {(retries or 0) + 1} times; in the last, its replica was lost or gave it back"
        results: list[Outcome] = [RowFailure("died", detail)] * len(rows)
        if remaining:
            chosen = [rows[i] for i in remaining]
            cells = {name: column.take(remaining) for name, column in columns.items()}
            for i, result in zip(remaining, await self._compute(chosen, cells), strict=True):
                results[i] = result
        return results

    async def _fetched(self, rows: list[LeasedRow]) -> dict[str, Jagged] | None:
        """Return the columns of rows, None if they are unavailable. Removes lost rows from ``rows``."""
        while True:
            try:
                with self._spans.background("fetch"):
                    return await self._queue.fetch(rows, self._settings.reads, timeout=_CALL_S)
            except StaleHandle as error:
                available = await self._available(rows)
                log.info("%d of %d rows were lost: %s", len(rows) - len(available), len(rows), error)
                rows[:] = available
                if not rows:
                    return None
            except AsyncFlowError as error:
                await self._outage.wait(error)
                if not any(row.lease in self._held for row in rows) or self._leaving.is_set():
                    await self._give_back(rows, reason="its columns cannot be fetched")
                    return None

    async def _available(self, rows: Sequence[LeasedRow]) -> list[LeasedRow]:
        """Return the rows that can still be fetched, by a request for each row."""

        async def available(row: LeasedRow) -> bool:
            try:
                await self._queue.fetch([row], self._settings.reads[:1], timeout=_CALL_S)
            except StaleHandle:
                return False
            except AsyncFlowError:
                return True
            return True

        checks = await asyncio.gather(*map(available, rows))
        return [row for row, ok in zip(rows, checks, strict=True) if ok]

    async def _settle(self, rows: Sequence[LeasedRow], results: Sequence[Outcome]) -> None:
        """Write results and final failures, and give back the failed rows that have retries left."""
        retries = self._settings.retries
        retried: list[LeasedRow] = []
        done: list[tuple[LeasedRow, Outcome]] = []
        for row, result in zip(rows, results, strict=True):
            retry = isinstance(result, RowFailure) and (retries is None or row.attempt < retries)
            retried.append(row) if retry else done.append((row, result))
            if isinstance(result, RowFailure):
                self._log_failure(row, result.kind, result.tail, final=not retry)
            elif isinstance(result, TaggedValues) and (why := _failure(result)):
                self._log_failure(row, why, str(result.tags.get("detail", "")), final=True)
        if retried:
            await self._give_back(retried, reason="it failed")
            self._metrics.rows.labels("retried").inc(len(retried))
        if done:
            await self._write([row for row, _ in done], [result for _, result in done])

    def _log_failure(self, row: LeasedRow, kind: str, detail: str, *, final: bool) -> None:
        level = logging.WARNING if final and kind not in self.failed else logging.DEBUG
        log.log(level, "sample %s: %s: %s", tuple(row.meta.key), kind, detail)
        if final:
            self.failed[kind] += 1
            self._first_failure = self._first_failure or f"{kind}: {detail}"

    async def _write(self, rows: Sequence[LeasedRow], results: Sequence[Outcome]) -> None:
        """Write results; if the queue is unreachable, try again as long as a lease is held."""
        columns = columns_of(results, self._settings.writes)
        tags = [self._tags(result) for result in results]
        while True:
            try:
                written = await self._queue.complete(rows, columns, tags=tags, timeout=_CALL_S)
                break
            except Refused as error:
                log.warning("%d rows are not written: %s", len(rows), error)
                written = [False] * len(rows)
                break
            except AsyncFlowError as error:
                await self._outage.wait(error)
                if not any(row.lease in self._held for row in rows):
                    written = [False] * len(rows)
                    break
        self._outage.end()
        for result, ok in zip(results, written, strict=True):
            failure = _failure(result)
            self._metrics.rows.labels("lost" if not ok else failure or "done").inc()
            self._done += ok and not failure

    def _tags(self, result: Outcome) -> dict[str, Tag]:
        """Return the tags of a row; the driver reads ``failure`` from them (``driver.groups.failure_of``)."""
        if isinstance(result, TaggedValues):
            return dict(result.tags)
        if isinstance(result, RowFailure):
            return {"failure": f"{self._settings.task}: {result.kind}", "detail": result.tail}
        return {}

    async def _give_back(self, rows: Sequence[LeasedRow], *, reason: str) -> None:
        try:
            await self._queue.give_back(rows, reason=reason, timeout=_CALL_S)
        except AsyncFlowError as error:
            log.info("%d rows were not given back and stay leased until their leases end: %s", len(rows), error)

    async def _renew(self) -> None:
        """Renew the leases of all held rows without end, and forget the leases that have ended."""

        def ended(leases: set[str]) -> None:
            for lease in leases:
                self._held.pop(lease, None)

        await keep_renewing(self._queue, held=lambda: set(self._held), ended=ended, lease_s=self._settings.lease_s)


def _failure(result: Outcome) -> str:
    """Return why a row has failed, "" if it has not."""
    if isinstance(result, TaggedValues):
        return str(result.tags.get("failure", ""))
    return result.kind if isinstance(result, RowFailure) else ""
