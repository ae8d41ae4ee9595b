"""The leased rows of one rollout instance: claimed, held during generation, and delivered or given back.

``Claimer`` keeps one claim parked at the queue for the rows that the instance wants now. When the instance has swapped,
filled up or staged another version, the claim is withdrawn and replaced, so that nothing waits for a claim's timeout.
``InFlightTable`` holds the rows, fetches their prompts, renews their leases, and saves partial responses of long
sequences, so that the next holder continues from them however this instance ends. ``Delivery`` writes finished samples:
one write at a time to each storage unit, with all samples that wait for it.

Invariants:
* At most one claim per purpose is open. Its rows always reach ``on_rows``, even if the claim was being withdrawn.
* The lease of a held row is renewed until the row is delivered, given back or lost. A row whose lease has passed to
  another holder is dropped immediately, together with its sequence.
* A sample is delivered or refused, and ``settled`` is called once with the result, or its lease is lost. If the queue
  cannot be reached, the row becomes available again when its lease ends.
* An unreachable storage unit delays only the samples that belong to it.
* No sequence waits for a save, and a response is saved only as far as another instance can continue it.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any

from asyncflow.api.names import EVAL, TRAIN
from asyncflow.data.base import Prompt
from asyncflow.errors import AsyncFlowError, Refused
from asyncflow.flow.claims import EMPTY_CLAIM_S, ENDED_PARTITION_S, claims_more, rows_at_once
from asyncflow.flow.instance import Claim, Instance, Purpose
from asyncflow.queue.client import QueueClient
from asyncflow.queue.protocol.messages import LeasedRow
from asyncflow.renewal import keep_renewing
from asyncflow.rollout.engines.base import Completion, SequenceName
from asyncflow.rollout.job import (
    INPUTS,
    ClaimedGroup,
    Job,
    RolloutSettings,
    SampleOutcome,
    columns,
    partial_of,
    response_columns,
    worth_saving,
)
from asyncflow.rpc.columns import Jagged
from asyncflow.rpc.retry import Outage
from asyncflow.telemetry.spans import NO_SPANS, Spans

log = logging.getLogger(__name__)

_TASK = "rollout"
_PARK_S = 30.0
_WITHDRAW_S = 5.0
_FETCH_S = 20.0
"""Timeout in seconds for fetching the columns of claimed rows, which are given back afterwards."""

Spawn = Callable[[Coroutine[Any, Any, None]], Awaitable[None]]

_MOST_ROWS = 256


class Claimer:
    """Claims rows for one purpose.

    on_rows: receives the rows; parked: called when a claim finds no ready row; slots: of the engine; backlog: see
    ``InFlightTable.backlog``.
    """

    def __init__(
        self,
        purpose: Purpose,
        *,
        queue: QueueClient,
        instance: Instance,
        slots: int,
        on_rows: Callable[[list[LeasedRow]], None],
        parked: Callable[[Purpose], None],
        backlog: Callable[[], int],
    ) -> None:
        self.changed = asyncio.Event()
        self._purpose = purpose
        self._partition = TRAIN if purpose == "train" else EVAL
        self._queue = queue
        self._instance = instance
        self._slots = slots
        self._on_rows = on_rows
        self._parked = parked
        self._backlog = backlog
        self._outage = Outage(f"claiming {purpose} rows")

    async def run(self) -> None:
        """Claim forever."""
        while True:
            self.changed.clear()
            wanted = self._next_claim()
            if wanted is None:
                await self.changed.wait()
                continue
            try:
                await self._claim(wanted)
            except AsyncFlowError as error:
                await self._outage.wait(error)
            else:
                self._outage.end()

    def _next_claim(self) -> Claim | None:
        claims = claims_more(backlog=self._backlog(), slots=self._slots)
        return self._instance.next_claim(self._purpose) if claims else None

    async def _claim(self, wanted: Claim) -> None:
        """Claim until rows arrive, the time is over, or the instance would request something else."""
        ticket = uuid.uuid4().hex
        claim = asyncio.create_task(self._take(wanted, ticket))
        claim.add_done_callback(lambda _: self.changed.set())
        try:
            await self._watch_claim(claim, wanted)
            if not claim.done():
                await self._queue.withdraw(ticket, partition=self._partition, task=_TASK, timeout=_WITHDRAW_S)
                await asyncio.wait((claim,), timeout=_WITHDRAW_S)
        finally:
            claim.cancel()
            await asyncio.wait((claim,))
        if not claim.cancelled():
            claim.result()

    async def _take(self, wanted: Claim, ticket: str) -> None:
        """Claim, and pass the rows on in the same step of the event loop, so that a cancellation cannot lose them.

        The queue answers immediately for a partition that has ended; the next follows after ``ENDED_PARTITION_S``.
        """
        claimed = await self._queue.claim(
            partition=self._partition,
            task=_TASK,
            max_rows=rows_at_once(wanted.rows, slots=self._slots),
            version=wanted.version,
            accept=wanted.accept,
            timeout=_PARK_S,
            ticket=ticket,
        )
        if rows := claimed.rows:
            self._on_rows(rows)
        elif claimed.ended:
            await asyncio.sleep(ENDED_PARTITION_S)

    async def _watch_claim(self, claim: asyncio.Task[None], wanted: Claim) -> None:
        """Wait until ``claim`` is done or its request is outdated; call ``parked`` once if it waits."""
        until: float | None = asyncio.get_running_loop().time() + EMPTY_CLAIM_S
        while not claim.done():
            try:
                async with asyncio.timeout_at(until):
                    await self.changed.wait()
            except TimeoutError:
                until = None
                self._parked(self._purpose)
                continue
            self.changed.clear()
            current = self._next_claim()
            if current is None or (current.version, current.accept) != (wanted.version, wanted.accept):
                return


class InFlightTable:
    """Holds the jobs of one instance.

    changed: called when a row may start or be claimed; holding: called with the number of held rows when it changes.
    spawn: runs a coroutine as a task of the worker; unfinished: see ``RolloutEngine``.
    trusted: returns the part of a response that other instances may continue.
    spans: records the fetching of columns; lost: number of rows whose lease ended here.
    """

    def __init__(
        self,
        *,
        queue: QueueClient,
        instance: Instance,
        settings: RolloutSettings,
        changed: Callable[[], None],
        holding: Callable[[int], None],
        spawn: Spawn,
        unfinished: Callable[[], Mapping[SequenceName, Completion]],
        trusted: Callable[[Completion], Completion],
        spans: Spans = NO_SPANS,
    ) -> None:
        self.lost = 0
        self._queue = queue
        self._instance = instance
        self._settings = settings
        self._changed = changed
        self._holding = holding
        self._spawn = spawn
        self._unfinished = unfinished
        self._trusted = trusted
        self._spans = spans
        self._jobs: set[Job] = set()
        self._returning: set[asyncio.Future[Any]] = set()

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def backlog(self) -> int:
        """Return the number of samples that are generated and not delivered, without those that await their group.

        The others of the group may wait for a swap, and the swap for a claim, which a large backlog prevents.
        """
        return sum(1 for job in self._jobs if job.generated and not job.awaits_group)

    def take(self, rows: Iterable[LeasedRow]) -> None:
        """Hold rows from a claim, and fetch their prompts."""
        groups: defaultdict[int, ClaimedGroup] = defaultdict(ClaimedGroup)
        jobs = [Job(row=row, group=groups[row.meta.serial]) for row in rows]
        self._jobs.update(jobs)
        self._holding(len(self._jobs))
        unusable = {work.id for work in self._instance.hold([job.work for job in jobs])}
        if unusable:
            self._spawn(self.give_back([job for job in jobs if job in unusable], reason="it needs another version"))
        for unit_jobs in by_unit(job for job in jobs if job not in unusable):
            self._spawn(self._fetch(unit_jobs))
        self._changed()

    async def _fetch(self, jobs: list[Job]) -> None:
        try:
            columns = await self._columns(jobs, INPUTS)
        except AsyncFlowError as error:
            log.warning("%d rows are given back: %s", len(jobs), error)
            await self.give_back(jobs, reason="the prompt cannot be fetched")
            return
        for index, job in enumerate(jobs):
            job.prompt_ids = tuple(columns["prompt_ids"].row(index).tolist())
            job.prompt = Prompt.unpack(columns["task"].row(index).tobytes())
        partials = [job for job in jobs if job.has_partial and not job.gone]
        if partials:
            await self._fetch_partial(partials)
        self._instance.ready([job for job in jobs if not job.gone])
        self._changed()

    async def _fetch_partial(self, jobs: list[Job]) -> None:
        """Fetch the partial responses of earlier holders; a response that cannot be fetched is made from scratch."""
        try:
            columns = await self._columns(jobs, self._settings.response)
        except AsyncFlowError as error:
            log.info("%d partial responses are made from scratch: %s", len(jobs), error)
            return
        for index, job in enumerate(jobs):
            job.partial = partial_of(columns, index)

    async def _columns(self, jobs: Iterable[Job], names: Sequence[str]) -> dict[str, Jagged]:
        with self._spans.background("fetch"):
            return await self._queue.fetch([job.row for job in jobs], names, timeout=_FETCH_S)

    async def renew(self) -> None:
        """Renew the leases of all held rows, forever; drop rows that have passed to another holder."""

        def ended(leases: set[str]) -> None:
            for job in [job for job in self._jobs if job.row.lease in leases]:
                self.lost += 1
                self.forget(job)

        await keep_renewing(
            self._queue,
            held=lambda: {job.row.lease for job in self._jobs},
            ended=ended,
            lease_s=self._settings.lease_s,
        )

    def partial_responses(self) -> dict[Job, Completion]:
        """Return the partial response of each undelivered row, as far as other instances can continue it."""
        running = self._unfinished()
        found = {
            job: running.get((job.purpose, job.row.meta.key)) if job.ended is None else job.ended.without_last()
            for job in self._jobs
        }
        return {job: self._trusted(part) for job, part in found.items() if part is not None}

    def unsaved(self) -> int:
        """Return how many tokens made here would have to be made again if this instance ended now."""
        return sum(max(0, len(part) - job.saved_tokens) for job, part in self.partial_responses().items())

    async def save(self) -> None:
        """Save the partial responses of long sequences at intervals, forever."""
        before: set[Job] = set()
        while True:
            await asyncio.sleep(self._settings.lease_s / 3)
            partial = self.partial_responses()
            for unit_jobs in by_unit(worth_saving(partial, before=before)):
                self._spawn(self._save({job: partial[job] for job in unit_jobs}))
            before = set(partial)

    async def _save(self, partial: Mapping[Job, Completion]) -> None:
        rows = [job.row for job in partial]
        columns = response_columns(list(partial.values()), names=self._settings.response)
        try:
            saved = await self._queue.save(rows, columns, timeout=self._settings.lease_s / 3)
        except AsyncFlowError as error:
            log.info("%d partial responses are not saved: %s", len(rows), error)
            return
        for (job, part), ok in zip(partial.items(), saved, strict=True):
            job.saved_tokens = len(part) if ok else job.saved_tokens
        if refused := sum(not ok and not job.gone for job, ok in zip(partial, saved, strict=True)):
            log.info("%d of %d partial responses are not saved: there is no room", refused, len(rows))

    async def give_back(
        self, jobs: Iterable[Job], *, reason: str, partial: Mapping[Job, Completion] | None = None
    ) -> None:
        """Return undelivered rows to the queue, so that others may claim them.

        partial: partial responses, which the next holders continue. The rows are dropped here immediately, and they are
        returned even if this call is cancelled: see ``returned``.
        """
        held = [job for job in jobs if not job.gone]
        for job in held:
            self.forget(job)
        partials = {
            job: part for job in held if partial and (part := partial.get(job)) and len(part) > job.saved_tokens
        }
        returning = asyncio.gather(
            self._return([job for job in held if job not in partials], reason=reason),
            *(
                self._hand_on({job: partials[job] for job in unit_jobs}, reason=reason)
                for unit_jobs in by_unit(partials)
            ),
        )
        self._returning.add(returning)
        returning.add_done_callback(self._returning.discard)
        await asyncio.shield(returning)

    async def returned(self) -> None:
        """Wait until every row that was given back is returned, or left to the end of its lease."""
        await asyncio.gather(*self._returning)

    async def _hand_on(self, partials: Mapping[Job, Completion], *, reason: str) -> None:
        """Return rows of one unit with their partial responses, or without them if the queue does not accept these."""
        rows = [job.row for job in partials]
        columns = response_columns(list(partials.values()), names=self._settings.response)
        try:
            await self._queue.give_back(rows, reason=reason, columns=columns, timeout=self._settings.call_s / 2)
        except AsyncFlowError as error:
            log.info("%d partial responses are not handed on: %s", len(partials), error)
            await self._return(list(partials), reason=reason)

    async def _return(self, jobs: list[Job], *, reason: str) -> None:
        if not jobs:
            return
        try:
            await self._queue.give_back([job.row for job in jobs], reason=reason, timeout=self._settings.call_s)
        except AsyncFlowError as error:
            log.info("%d rows wait for their leases to end: %s", len(jobs), error)

    def forget(self, job: Job) -> None:
        """Drop a row that was delivered, given back or lost."""
        self._jobs.discard(job)
        self._holding(len(self._jobs))
        job.gone = True
        job.group.break_up()
        self._instance.release(job)
        if job.task is not None and job.task is not asyncio.current_task():
            job.task.cancel()
        self._changed()


def by_unit(jobs: Iterable[Job]) -> Iterable[list[Job]]:
    """Return ``jobs`` grouped by the storage unit of their rows."""
    found: defaultdict[int, list[Job]] = defaultdict(list)
    for job in jobs:
        found[job.row.unit].append(job)
    return found.values()


class Delivery:
    """Writes samples.

    settled: called with each outcome and whether the queue accepted it; ended: called with each finished writer task,
    so that its error is not lost.
    """

    def __init__(
        self,
        queue: QueueClient,
        *,
        settled: Callable[[SampleOutcome, bool], None],
        ended: Callable[[asyncio.Task[None]], None],
        settings: RolloutSettings,
    ) -> None:
        self._queue = queue
        self._settled = settled
        self._ended = ended
        self._settings = settings
        self._waiting: dict[int, list[SampleOutcome]] = {}
        self._writers: dict[int, asyncio.Task[None]] = {}

    def put(self, outcome: SampleOutcome) -> None:
        """Queue ``outcome`` for writing."""
        unit = outcome.job.row.unit
        self._waiting.setdefault(unit, []).append(outcome)
        if unit not in self._writers:
            writer = self._writers[unit] = asyncio.create_task(self._write(unit), name=f"deliver to unit {unit}")
            writer.add_done_callback(self._ended)

    async def flush(self, *, timeout: float) -> None:
        """Wait until everything is delivered, at most ``timeout`` seconds; then drop the rest."""
        writers = list(self._writers.values())
        if not writers:
            return
        await asyncio.wait(writers, timeout=timeout)
        for writer in writers:
            writer.cancel()
        await asyncio.gather(*writers, return_exceptions=True)

    async def _write(self, unit: int) -> None:
        outage = Outage(f"delivering to storage unit {unit}")
        try:
            while batch := [outcome for outcome in self._waiting[unit] if not outcome.job.gone][:_MOST_ROWS]:
                try:
                    taken = await self._complete(batch)
                except AsyncFlowError as error:
                    await outage.wait(error)
                    continue
                outage.end()
                done = set(map(id, batch))
                self._waiting[unit] = [outcome for outcome in self._waiting[unit] if id(outcome) not in done]
                for outcome, ok in zip(batch, taken, strict=True):
                    self._settled(outcome, ok)
        finally:
            del self._waiting[unit], self._writers[unit]

    async def _complete(self, batch: list[SampleOutcome]) -> list[bool]:
        """Write one batch. If the queue refuses all of it (a lease or a row has ended), no sample was accepted."""
        try:
            return await self._queue.complete(
                [outcome.job.row for outcome in batch],
                columns(batch, settings=self._settings),
                tags=[outcome.tags for outcome in batch],
                timeout=self._settings.call_s,
            )
        except Refused:
            return [False] * len(batch)
