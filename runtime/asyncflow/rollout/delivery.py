"""Brings finished samples to the queue: one write at a time to each storage unit, with all that has piled up for it.

Invariant: a sample is delivered, refused, or its lease is lost, and ``settled`` hears which, once; a unit that is away
holds up only what belongs there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncflow.errors import AsyncFlowError, Refused
from asyncflow.net.retry import Outage
from asyncflow.queue.client.client import QueueClient
from asyncflow.rollout.job import Outcome, columns

_MOST_ROWS = 256


class Delivery:
    """Completes rows. settled: told each outcome and whether the queue took it; call_s: seconds for one write."""

    def __init__(self, queue: QueueClient, *, settled: Callable[[Outcome, bool], None], call_s: float) -> None:
        self._queue = queue
        self._settled = settled
        self._call_s = call_s
        self._waiting: dict[int, list[Outcome]] = {}
        self._writers: dict[int, asyncio.Task[None]] = {}

    def put(self, outcome: Outcome) -> None:
        """Deliver ``outcome`` soon."""
        unit = outcome.job.row.unit
        self._waiting.setdefault(unit, []).append(outcome)
        if unit not in self._writers:
            self._writers[unit] = asyncio.create_task(self._write(unit), name=f"deliver to unit {unit}")

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

    async def _complete(self, batch: list[Outcome]) -> list[bool]:
        """Write one batch; refused as a whole (the lease or the row is gone) means that none was taken."""
        try:
            return await self._queue.complete(
                [outcome.job.row for outcome in batch],
                columns(batch),
                tags=[outcome.tags for outcome in batch],
                timeout=self._call_s,
            )
        except Refused:
            return [False] * len(batch)
