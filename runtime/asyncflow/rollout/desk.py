"""The rows that an instance has on lease: fetched, kept alive, and given back.

Invariants: a row that is here has its lease renewed until it is delivered, given back or lost; a row whose lease went
to another is forgotten at once, its sequence with it; what cannot be told to the queue ends with its lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import Any

from asyncflow.data.base import Prompt
from asyncflow.errors import AsyncFlowError
from asyncflow.flow.instance import Instance
from asyncflow.net.retry import Outage
from asyncflow.queue.client.client import QueueClient
from asyncflow.queue.protocol.messages import LeasedRow
from asyncflow.rollout.job import INPUTS, Job, RolloutSettings

log = logging.getLogger(__name__)

Spawn = Callable[[Coroutine[Any, Any, None]], Awaitable[None]]


class Desk:
    """Holds the jobs of one instance.

    changed: called whenever something may now begin or be claimed; holding: told how many rows are here whenever that
    changes; spawn: runs a coroutine as a task of the worker. lost: rows whose lease ended here.
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
    ) -> None:
        self.lost = 0
        self._queue = queue
        self._instance = instance
        self._settings = settings
        self._changed = changed
        self._holding = holding
        self._spawn = spawn
        self._jobs: set[Job] = set()

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def backlog(self) -> int:
        """Return how many samples are generated and not delivered."""
        return sum(1 for job in self._jobs if job.generated)

    def take(self, rows: Iterable[LeasedRow]) -> None:
        """Hold rows that a claim gave, and fetch their prompts."""
        jobs = [Job(row=row) for row in rows]
        self._jobs.update(jobs)
        self._holding(len(self._jobs))
        never = {work.id for work in self._instance.take([job.work for job in jobs])}
        if never:
            self._spawn(self.give_back([job for job in jobs if job in never], reason="it needs too old a version"))
        by_unit: defaultdict[int, list[Job]] = defaultdict(list)
        for job in jobs:
            if job not in never:
                by_unit[job.row.unit].append(job)
        for mine in by_unit.values():
            self._spawn(self._fetch(mine))
        self._changed()

    async def _fetch(self, jobs: list[Job]) -> None:
        try:
            columns = await self._queue.fetch([job.row for job in jobs], INPUTS, timeout=self._settings.fetch_s)
        except AsyncFlowError as error:
            log.warning("%d rows are given back: %s", len(jobs), error)
            await self.give_back(jobs, reason="the prompt cannot be had")
            return
        for index, job in enumerate(jobs):
            job.prompt_ids = tuple(columns["prompt_ids"].row(index).tolist())
            job.prompt = Prompt.unpack(columns["task"].row(index).tobytes())
        self._instance.ready([job for job in jobs if not job.gone])
        self._changed()

    async def renew(self) -> None:
        """Renew the leases of all that is here, for ever."""
        outage = Outage("renewing leases")
        while True:
            await asyncio.sleep(self._settings.lease_s / 3)
            asked = {job.row.lease for job in self._jobs}
            if not asked:
                continue
            try:
                valid = set(await self._queue.renew(sorted(asked), timeout=self._settings.lease_s / 3))
            except AsyncFlowError as error:
                await outage.wait(error)
                continue
            outage.end()
            for job in [job for job in self._jobs if job.row.lease in asked - valid]:
                self.lost += 1
                self.forget(job)

    async def give_back(self, jobs: Iterable[Job], *, reason: str) -> None:
        """Let others have rows of which nothing is delivered."""
        mine = [job for job in jobs if not job.gone]
        for job in mine:
            self.forget(job)
        if not mine:
            return
        try:
            await self._queue.give_back([job.row for job in mine], reason=reason, timeout=self._settings.call_s)
        except AsyncFlowError as error:
            log.info("%d rows wait for their leases to end: %s", len(mine), error)

    def forget(self, job: Job) -> None:
        """Have nothing more to do with a row: delivered, given back or lost."""
        self._jobs.discard(job)
        self._holding(len(self._jobs))
        job.gone = True
        self._instance.release(job)
        if job.task is not None and job.task is not asyncio.current_task():
            job.task.cancel()
        self._changed()
