"""The slots of a step, fetched ahead: while one is computed, the next is claimed and fetched.

Invariant: slots come in their order, each once, the last one with the totals of the step; at most one is fetched
ahead, never one beyond the last. Waiting for samples has no end of its own, since rollouts may be slow; waiting for
the *queue* has one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from asyncflow.net.frames import Jagged
from asyncflow.net.retry import retry
from asyncflow.queue.protocol.lot import Lot, Slot
from asyncflow.queue.protocol.messages import StepTotals
from asyncflow.telemetry.busy import BusyClock
from asyncflow.train.batch import COLUMNS, MicroBatch
from asyncflow.train.settings import TrainerSettings

log = logging.getLogger(__name__)

_ASK_S = 10.0
_ATTEND_S = 0.5
_REMIND_S = 60.0


class TrainQueue(Protocol):
    """Methods of ``queue.client.QueueClient`` that a trainer uses."""

    async def begin(self, *, partition: str, attempt: int, step: int, world: int, timeout: float) -> None:
        """Declare that the weights are θ_step."""

    async def slot(
        self, *, partition: str, attempt: int, step: int, slot: int, rank: int, tokens: int, timeout: float
    ) -> Slot | None:
        """Return this rank's part of a slot, or None when it was not decided in time."""

    async def fetch(self, rows: Lot, columns: Sequence[str], *, timeout: float) -> dict[str, Jagged]:
        """Return columns of rows."""

    async def step_done(self, *, partition: str, attempt: int, step: int, rank: int, timeout: float) -> None:
        """Report that this rank has finished the step."""

    async def sync(self, *, timeout: float) -> None:
        """Have the ledger on disk."""

    async def commit(self, *, partition: str, attempt: int, step: int, timeout: float) -> None:
        """Report that a checkpoint holds the step."""


@dataclass(frozen=True, kw_only=True)
class Filled:
    """A slot with its content; ``totals`` with the last one."""

    batch: MicroBatch
    last: bool
    totals: StepTotals | None


class Feed:
    """One rank's slots. wait: the clock on which waiting counts; attend: awaited about twice a second while waiting,
    so that the trainer can obey; what it raises ends the feed.
    """

    def __init__(
        self,
        queue: TrainQueue,
        *,
        rank: int,
        settings: TrainerSettings,
        waits: BusyClock,
        attend: Callable[[], Awaitable[None]],
    ) -> None:
        self.waiting_for = ""
        self._queue = queue
        self._rank = rank
        self._settings = settings
        self._waits = waits
        self._attend = attend

    async def slots(self, step: int, *, tokens: int) -> AsyncGenerator[Filled, None]:
        """Yield the slots of ``step``, fetching ahead; close the iterator (``aclosing``) to end early.

        tokens: most tokens of a rank's part of a slot.
        """
        number = 0
        ahead = asyncio.create_task(self._fill(step, number, tokens))
        try:
            while True:
                filled = await self._arrival(ahead, f"slot {number} of step {step}")
                if not filled.last:
                    number += 1
                    ahead = asyncio.create_task(self._fill(step, number, tokens))
                yield filled
                if filled.last:
                    return
                await self._attend()
        finally:
            ahead.cancel()
            await asyncio.wait([ahead])

    async def _arrival(self, ahead: asyncio.Task[Filled], what: str) -> Filled:
        self.waiting_for = what
        begun = reminded = asyncio.get_running_loop().time()
        try:
            with self._waits("wait"):
                while not (await asyncio.wait([ahead], timeout=_ATTEND_S))[0]:
                    await self._attend()
                    now = asyncio.get_running_loop().time()
                    if now - reminded > _REMIND_S:
                        reminded = now
                        log.info("waiting for %s since %.0f s", what, now - begun)
        finally:
            self.waiting_for = ""
        return ahead.result()

    async def _fill(self, step: int, number: int, tokens: int) -> Filled:
        settings, patience = self._settings, self._settings.patience_s
        what = f"slot {number} of step {step}"
        slot: Slot | None = None
        while slot is None:
            slot = await retry(
                lambda: self._ask(step, number, tokens), what=f"asking the queue for {what}", timeout=patience
            )
        lot, columns = slot.lot, [*COLUMNS, *settings.extra_columns]
        if lot is None:
            return Filled(batch=MicroBatch.empty(), last=slot.last, totals=slot.totals)
        fetched = await retry(
            lambda: self._queue.fetch(lot, columns, timeout=patience), what=f"fetching {what}", timeout=patience
        )
        return Filled(batch=MicroBatch.of(lot.keys, fetched), last=slot.last, totals=slot.totals)

    async def _ask(self, step: int, number: int, tokens: int) -> Slot | None:
        settings = self._settings
        return await self._queue.slot(
            partition=settings.partition,
            attempt=settings.attempt,
            step=step,
            slot=number,
            rank=self._rank,
            tokens=tokens,
            timeout=_ASK_S,
        )
