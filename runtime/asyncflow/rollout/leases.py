"""The leased rows of one rollout instance: claimed, held while samples are made of them, delivered or given back.

``Claimer`` keeps one claim parked at the queue that says what the instance wants now; when the instance has swapped,
filled up or staged another version, it is withdrawn and a new one takes its place, so that nothing waits for a claim to
time out. ``InFlightTable`` holds the rows, fetches their prompts, renews their leases, and saves what there is of long
responses, so that whoever has the rows next goes on behind it, however this instance ends. ``Delivery`` writes finished
samples: one write at a time to each storage unit, with all that has piled up for it.

Invariants: at most one claim of a purpose is out; whatever it gives reaches ``got``, also when it was being withdrawn;
a row that is held has its lease renewed until it is delivered, given back or lost; a row whose lease went to another is
forgotten at once, its sequence with it; a sample is delivered, refused, or its lease is lost, and ``settled`` is called
once with which; what the queue cannot be told ends with its lease; a unit that is away holds up only what belongs
there; no sequence waits for anything to be saved, and a response is saved only as far as somebody can go on behind it.
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
from asyncflow.flow.claims import ENDED_S, PARKED_S, claims_more, rows_at_once
from asyncflow.flow.instance import Ask, Instance, Purpose
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
    begun_of,
    columns,
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
"""Seconds for the columns of rows that were claimed, which are given back afterwards."""

Spawn = Callable[[Coroutine[Any, Any, None]], Awaitable[None]]

_MOST_ROWS = 256


class Claimer:
    """Claims for one purpose.

    got: takes the rows; parked: called when a claim finds nothing ready; backlog: samples generated but not delivered;
    slots: of the engine.
    """

    def __init__(
        self,
        purpose: Purpose,
        *,
        queue: QueueClient,
        instance: Instance,
        slots: int,
        got: Callable[[list[LeasedRow]], None],
        parked: Callable[[Purpose], None],
        backlog: Callable[[], int],
    ) -> None:
        self.changed = asyncio.Event()
        self._purpose = purpose
        self._partition = TRAIN if purpose == "train" else EVAL
        self._queue = queue
        self._instance = instance
        self._slots = slots
        self._got = got
        self._parked = parked
        self._backlog = backlog
        self._outage = Outage(f"claiming {purpose} rows")

    async def run(self) -> None:
        """Claim for ever."""
        while True:
            self.changed.clear()
            ask = self._ask()
            if ask is None:
                await self.changed.wait()
                continue
            try:
                await self._claim(ask)
            except AsyncFlowError as error:
                await self._outage.wait(error)
            else:
                self._outage.end()

    def _ask(self) -> Ask | None:
        claims = claims_more(backlog=self._backlog(), slots=self._slots)
        return self._instance.ask(self._purpose) if claims else None

    async def _claim(self, ask: Ask) -> None:
        """Claim until rows come, the time is over, or the instance would ask for something else."""
        ticket = uuid.uuid4().hex
        claim = asyncio.create_task(self._take(ask, ticket))
        claim.add_done_callback(lambda _: self.changed.set())
        try:
            await self._outlive(claim, ask)
            if not claim.done():
                await self._queue.withdraw(ticket, partition=self._partition, task=_TASK, timeout=_WITHDRAW_S)
                await asyncio.wait((claim,), timeout=_WITHDRAW_S)
        finally:
            claim.cancel()
            await asyncio.wait((claim,))
        if not claim.cancelled():
            claim.result()

    async def _take(self, ask: Ask, ticket: str) -> None:
        """Claim; rows are handed on in the step in which they come: no cancellation finds them in between.

        A partition that has ended is answered at once, and is asked again after ``ENDED_S``.
        """
        claimed = await self._queue.claim(
            partition=self._partition,
            task=_TASK,
            max_rows=rows_at_once(ask.rows, slots=self._slots),
            version=ask.version,
            accept=ask.accept,
            timeout=_PARK_S,
            ticket=ticket,
        )
        if rows := claimed.rows:
            self._got(rows)
        elif claimed.ended:
            await asyncio.sleep(ENDED_S)

    async def _outlive(self, claim: asyncio.Task[None], ask: Ask) -> None:
        """Wait until ``claim`` is done or asks for what is no longer right; call ``parked`` once."""
        until: float | None = asyncio.get_running_loop().time() + PARKED_S
        while not claim.done():
            try:
                async with asyncio.timeout_at(until):
                    await self.changed.wait()
            except TimeoutError:
                until = None
                self._parked(self._purpose)
                continue
            self.changed.clear()
            now = self._ask()
            if now is None or (now.version, now.accept) != (ask.version, ask.accept):
                return


class InFlightTable:
    """Holds the jobs of one instance.

    changed: called whenever something may now begin or be claimed; holding: called with how many rows are here whenever
    that changes; spawn: runs a coroutine as a task of the worker; unfinished: see ``RolloutEngine``; trusted: gives as
    much of a response as others may go on behind; spans: records when columns are fetched. lost: rows whose lease ended
    here.
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
        """Return how many samples are generated and not delivered."""
        return sum(1 for job in self._jobs if job.generated)

    def take(self, rows: Iterable[LeasedRow]) -> None:
        """Hold rows that a claim gave, and fetch their prompts."""
        groups: defaultdict[int, ClaimedGroup] = defaultdict(ClaimedGroup)
        jobs = [Job(row=row, group=groups[row.meta.serial]) for row in rows]
        self._jobs.update(jobs)
        self._holding(len(self._jobs))
        never = {work.id for work in self._instance.take([job.work for job in jobs])}
        if never:
            self._spawn(self.give_back([job for job in jobs if job in never], reason="it needs another version"))
        for of_unit in by_unit(job for job in jobs if job not in never):
            self._spawn(self._fetch(of_unit))
        self._changed()

    async def _fetch(self, jobs: list[Job]) -> None:
        try:
            columns = await self._columns(jobs, INPUTS)
        except AsyncFlowError as error:
            log.warning("%d rows are given back: %s", len(jobs), error)
            await self.give_back(jobs, reason="the prompt cannot be had")
            return
        for index, job in enumerate(jobs):
            job.prompt_ids = tuple(columns["prompt_ids"].row(index).tolist())
            job.prompt = Prompt.unpack(columns["task"].row(index).tobytes())
        begun = [job for job in jobs if job.was_begun and not job.gone]
        if begun:
            await self._fetch_begun(begun)
        self._instance.ready([job for job in jobs if not job.gone])
        self._changed()

    async def _fetch_begun(self, jobs: list[Job]) -> None:
        """Fetch what earlier holders left; where it cannot be had, it is made anew."""
        try:
            columns = await self._columns(jobs, self._settings.response)
        except AsyncFlowError as error:
            log.info("%d responses that were begun are made anew: %s", len(jobs), error)
            return
        for index, job in enumerate(jobs):
            job.begun = begun_of(columns, index)

    async def _columns(self, jobs: Iterable[Job], names: Sequence[str]) -> dict[str, Jagged]:
        with self._spans.beside("fetch"):
            return await self._queue.fetch([job.row for job in jobs], names, timeout=_FETCH_S)

    async def renew(self) -> None:
        """Renew the leases of all that is here, for ever; what has gone to another is forgotten."""

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

    def there(self) -> dict[Job, Completion]:
        """Return what there is of each response that is not delivered, as far as others can go on behind it."""
        running = self._unfinished()
        found = {
            job: running.get((job.purpose, job.row.meta.key)) if job.ended is None else job.ended.unended()
            for job in self._jobs
        }
        return {job: self._trusted(so_far) for job, so_far in found.items() if so_far is not None}

    def unsaved(self) -> int:
        """Return how many of the tokens that were made here would be made again if this instance ended now."""
        return sum(max(0, len(so_far) - job.kept) for job, so_far in self.there().items())

    async def save(self) -> None:
        """Save at intervals, for ever, what there is of responses that have been under way since the last time."""
        before: set[Job] = set()
        while True:
            await asyncio.sleep(self._settings.lease_s / 3)
            there = self.there()
            for of_unit in by_unit(worth_saving(there, before=before)):
                self._spawn(self._save({job: there[job] for job in of_unit}))
            before = set(there)

    async def _save(self, there: Mapping[Job, Completion]) -> None:
        rows = [job.row for job in there]
        columns = response_columns(list(there.values()), names=self._settings.response)
        try:
            saved = await self._queue.save(rows, columns, timeout=self._settings.lease_s / 3)
        except AsyncFlowError as error:
            log.info("%d responses in the making are not saved: %s", len(rows), error)
            return
        for (job, so_far), ok in zip(there.items(), saved, strict=True):
            job.kept = len(so_far) if ok else job.kept
        if refused := sum(not ok and not job.gone for job, ok in zip(there, saved, strict=True)):
            log.info("%d of %d responses in the making are not saved: there is no room", refused, len(rows))

    async def give_back(
        self, jobs: Iterable[Job], *, reason: str, there: Mapping[Job, Completion] | None = None
    ) -> None:
        """Return rows of which nothing is delivered to the queue, so that others may claim them.

        there: beginnings of responses, from which the next holders go on. They are forgotten at once, and returned also
        where this is cancelled: see ``returned``.
        """
        held = [job for job in jobs if not job.gone]
        for job in held:
            self.forget(job)
        begun = {job: so_far for job in held if there and (so_far := there.get(job)) and len(so_far) > job.kept}
        returning = asyncio.gather(
            self._return([job for job in held if job not in begun], reason=reason),
            *(self._hand_on({job: begun[job] for job in of_unit}, reason=reason) for of_unit in by_unit(begun)),
        )
        self._returning.add(returning)
        returning.add_done_callback(self._returning.discard)
        await asyncio.shield(returning)

    async def returned(self) -> None:
        """Wait until all rows that were given back are returned, or it is known that they wait for their leases."""
        await asyncio.gather(*self._returning)

    async def _hand_on(self, begun: Mapping[Job, Completion], *, reason: str) -> None:
        """Return rows of one unit with what there is of their responses, or without it where that is not taken."""
        rows = [job.row for job in begun]
        columns = response_columns(list(begun.values()), names=self._settings.response)
        try:
            await self._queue.give_back(rows, reason=reason, columns=columns, timeout=self._settings.call_s / 2)
        except AsyncFlowError as error:
            log.info("%d responses that were begun are not handed on: %s", len(begun), error)
            await self._return(list(begun), reason=reason)

    async def _return(self, jobs: list[Job], *, reason: str) -> None:
        if not jobs:
            return
        try:
            await self._queue.give_back([job.row for job in jobs], reason=reason, timeout=self._settings.call_s)
        except AsyncFlowError as error:
            log.info("%d rows wait for their leases to end: %s", len(jobs), error)

    def forget(self, job: Job) -> None:
        """Forget a row that was delivered, given back or lost."""
        self._jobs.discard(job)
        self._holding(len(self._jobs))
        job.gone = True
        job.group.come_apart()
        self._instance.release(job)
        if job.task is not None and job.task is not asyncio.current_task():
            job.task.cancel()
        self._changed()


def by_unit(jobs: Iterable[Job]) -> Iterable[list[Job]]:
    """Return ``jobs`` apart by the storage unit at which their rows lie."""
    found: defaultdict[int, list[Job]] = defaultdict(list)
    for job in jobs:
        found[job.row.unit].append(job)
    return found.values()


class Delivery:
    """Writes samples. settled: called with each outcome and whether the queue took it; ended: with each task that has
    written, whose error nobody would see otherwise.
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
        """Deliver ``outcome`` soon."""
        unit = outcome.job.row.unit
        self._waiting.setdefault(unit, []).append(outcome)
        if unit not in self._writers:
            writer = self._writers[unit] = asyncio.create_task(self._write(unit), name=f"deliver to unit {unit}")
            writer.add_done_callback(self._ended)

    async def flush(self, *, timeout: float) -> None:
        """Wait until nothing is undelivered, at most ``timeout`` seconds; then give up what is left."""
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
        """Write one batch; refused as a whole (the lease or the row is gone) means that none was taken."""
        try:
            return await self._queue.complete(
                [outcome.job.row for outcome in batch],
                columns(batch, settings=self._settings),
                tags=[outcome.tags for outcome in batch],
                timeout=self._settings.call_s,
            )
        except Refused:
            return [False] * len(batch)
