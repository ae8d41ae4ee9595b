"""The training loops, and the prefetching of the slots of a step.

While one slot is computed, the next is claimed and fetched. The loops differ in the time of the first gradient of a
step, and in the number of updates of a step:

``synchronous``: D_k is collected whole, in the order of keys, before the first gradient. It is the reference, and gives
    bit-equal runs.
``streaming``: each micro-batch is computed as soon as its groups are ready, while other groups are still being
    generated; in delayed modes, D_{k+1} is generated at the same time, too.
``repeated``: D_k is collected whole and makes several optimizer updates, by mini-batches and over several epochs.

Invariants: slots arrive in order, each once, the last with the totals of the step. At most one slot is prefetched, and
none after the last. Waiting for samples has no time limit, because rollouts may be slow; waiting for the *queue* has
one. The first two loops pass each sample of D_k to the backend exactly once before ``finish(k)``, so both make the same
step up to the order of additions; the third passes it once per epoch. A mini-batch holds whole groups. Its groups are a
function of the set of groups in D_k alone, not of the order of arrival or of the rank. All ranks make the same number
of updates.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from asyncflow.queue.protocol.messages import LeasedRow, Slot, StepTotals
from asyncflow.rpc.columns import Jagged
from asyncflow.rpc.retry import retry
from asyncflow.training.batch import COLUMNS, MicroBatch
from asyncflow.training.meter import RankMeter
from asyncflow.training.settings import TrainerSettings

log = logging.getLogger(__name__)

_REQUEST_S = 10.0
_POLL_S = 0.5
_LOG_S = 60.0

COMPUTED_TOKENS = "computed_tokens"
SILENT_SAMPLES = "silent_samples"
COUNTS = (SILENT_SAMPLES, COMPUTED_TOKENS, "packed_tokens")
"""Metrics that add up over the updates of a step."""
TOKEN_MEANS = (
    "kl", "entropy", "surprise", "ratio", "approx_kl", "clip_low", "clip_high", "clip_dual",
    "correction_ess", "correction_mean", "correction_high", "correction_low", "correction_k1", "correction_k3",
    "value_loss", "value_clip", "return_mean",
)  # fmt: skip
"""Metrics that are means over the computed tokens of an update."""
MAXIMA = ("ratio_max", "correction_max")
MINIMA = ("skipped", "correction_min")
"""Metrics combined as the maximum or the minimum over all updates of a step."""
MEASURED_FIRST = "logprob_gap"
"""Prefix of metrics that compare with the weights before the step, so only the first update has them."""


class TrainQueue(Protocol):
    """The methods of ``queue.client.QueueClient`` that a trainer uses."""

    async def begin(self, *, partition: str, attempt: int, step: int, world: int, timeout: float) -> None:
        """Declare that the weights are θ_step."""

    async def slot(
        self, *, partition: str, attempt: int, step: int, slot: int, rank: int, tokens: int, timeout: float
    ) -> Slot | None:
        """Return this rank's part of a slot, or None if it was not decided before the timeout."""

    async def fetch(self, rows: Sequence[LeasedRow], columns: Sequence[str], *, timeout: float) -> dict[str, Jagged]:
        """Return columns of rows."""

    async def step_done(self, *, partition: str, attempt: int, step: int, rank: int, timeout: float) -> None:
        """Report that this rank has finished the step."""

    async def sync(self, *, timeout: float) -> None:
        """Sync the ledger to disk."""

    async def commit(self, *, partition: str, attempt: int, step: int, timeout: float) -> None:
        """Report that a checkpoint holds the step."""


@dataclass(frozen=True, kw_only=True)
class FilledSlot:
    """A slot with its content; only the last one has ``totals``."""

    batch: MicroBatch
    last: bool
    totals: StepTotals | None


class SlotPrefetcher:
    """The slots of one rank. meter: counts the waiting time; poll: awaited about twice a second while waiting, so that
    the trainer can react to directives; an exception that it raises ends the iteration.
    """

    def __init__(
        self,
        queue: TrainQueue,
        *,
        rank: int,
        settings: TrainerSettings,
        meter: RankMeter,
        poll: Callable[[], Awaitable[None]],
    ) -> None:
        self.waiting_for = ""
        self._queue = queue
        self._rank = rank
        self._settings = settings
        self._meter = meter
        self._poll = poll

    async def slots(self, step: int, *, tokens: int) -> AsyncGenerator[FilledSlot, None]:
        """Yield the slots of ``step``, prefetching the next one; close the iterator (``aclosing``) to end early.

        tokens: most tokens of a rank's part of a slot.
        """
        number = 0
        prefetch = asyncio.create_task(self._fill(step, number, tokens))
        try:
            while True:
                filled = await self._await(prefetch, f"slot {number} of step {step}", step=step)
                if not filled.last:
                    number += 1
                    prefetch = asyncio.create_task(self._fill(step, number, tokens))
                yield filled
                if filled.last:
                    return
                await self._poll()
        finally:
            prefetch.cancel()
            await asyncio.wait([prefetch])

    async def _await(self, prefetch: asyncio.Task[FilledSlot], what: str, *, step: int) -> FilledSlot:
        self.waiting_for = what
        started = logged = asyncio.get_running_loop().time()
        try:
            with self._meter("wait", step=step):
                while not (await asyncio.wait([prefetch], timeout=_POLL_S))[0]:
                    await self._poll()
                    now = asyncio.get_running_loop().time()
                    if now - logged > _LOG_S:
                        logged = now
                        log.info("waiting for %s for %.0f s", what, now - started)
        finally:
            self.waiting_for = ""
        return prefetch.result()

    async def _fill(self, step: int, number: int, tokens: int) -> FilledSlot:
        settings, patience = self._settings, self._settings.patience_s
        what = f"slot {number} of step {step}"
        slot: Slot | None = None
        with self._meter.spans.background("claim", step=step):
            while slot is None:
                slot = await retry(
                    lambda: self._request(step, number, tokens),
                    what=f"requesting {what} from the queue",
                    timeout=patience,
                )
        rows, columns = slot.rows, [*COLUMNS, settings.decided, *settings.extra_columns]
        if not rows:
            return FilledSlot(batch=MicroBatch.empty(), last=slot.last, totals=slot.totals)
        with self._meter.spans.background("fetch", step=step):
            fetched = await retry(
                lambda: self._queue.fetch(rows, columns, timeout=patience), what=f"fetching {what}", timeout=patience
            )
        return FilledSlot(
            batch=MicroBatch.of([row.meta.key for row in rows], fetched), last=slot.last, totals=slot.totals
        )

    async def _request(self, step: int, number: int, tokens: int) -> Slot | None:
        settings = self._settings
        return await self._queue.slot(
            partition=settings.partition,
            attempt=settings.attempt,
            step=step,
            slot=number,
            rank=self._rank,
            tokens=tokens,
            timeout=_REQUEST_S,
        )


def mini_batches(serials: NDArray[np.int64], *, groups: NDArray[np.int64], count: int) -> list[NDArray[np.int64]]:
    """Return the indices of this rank's samples in each mini-batch.

    serials: serials of this rank's samples, [n]; groups: serials of D_k on all ranks, in any order, possibly repeated;
    count: number of mini-batches (fewer if there are fewer groups). Sizes differ by at most one group.
    """
    known = np.unique(groups)
    count = max(1, min(count, len(known)))
    number = np.searchsorted(known, serials) * count // max(1, len(known))
    return [np.flatnonzero(number == index) for index in range(count)]


def combined(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of a step from the metrics of its updates, of which there is at least one.

    ``COUNTS`` are summed, ``TOKEN_MEANS`` averaged over the tokens of all updates, ``MAXIMA`` and ``MINIMA`` reduced
    accordingly (so ``skipped`` is 1 if no update changed the weights). Metrics that start with ``MEASURED_FIRST`` are
    those of the first update. All other metrics are averaged over the updates that have them.
    """
    first = updates[0]
    if len(updates) == 1:
        return dict(first)
    measured = {name: value for name, value in first.items() if name.startswith(MEASURED_FIRST)}
    others = dict.fromkeys(name for update in updates for name in update if not name.startswith(MEASURED_FIRST))
    return measured | {name: _combined(name, [update for update in updates if name in update]) for name in others}


def _combined(name: str, updates: Sequence[Mapping[str, float]]) -> float:
    values = [update[name] for update in updates]
    if name in COUNTS:
        return sum(values)
    if name in MAXIMA:
        return max(values)
    if name in MINIMA:
        return min(values)
    weights = [update[COMPUTED_TOKENS] if name in TOKEN_MEANS else 1.0 for update in updates]
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / max(1.0, sum(weights))


class Stepping(Protocol):
    """The trainer's methods that its loops call."""

    def steps(self) -> AsyncIterator[int]:
        """Return the remaining steps in order."""

    def slots(self, step: int) -> AsyncGenerator[FilledSlot, None]:
        """Return the slots of D_step."""

    async def accumulate(self, step: int, slot: FilledSlot) -> None:
        """Compute the gradient of one slot."""

    async def revisit(self, step: int, slots: Sequence[FilledSlot]) -> None:
        """Make all updates of a step except the last, whose gradient is accumulated."""

    async def finish(self, step: int, totals: StepTotals | None) -> None:
        """Make θ_step from the accumulated gradient, and notify queue and driver."""


async def synchronous(trainer: Stepping) -> None:
    """Train until the last step, or until the trainer is asked to leave; each step starts when D_k is complete."""
    async for step in trainer.steps():
        whole = await _collected(trainer, step)
        for slot in whole:
            await trainer.accumulate(step, slot)
        await trainer.finish(step, whole[-1].totals)


async def streaming(trainer: Stepping) -> None:
    """Train until the last step, or until the trainer is asked to leave; each slot is computed when it arrives."""
    async for step in trainer.steps():
        totals = None
        async with aclosing(trainer.slots(step)) as slots:
            async for slot in slots:
                await trainer.accumulate(step, slot)
                totals = slot.totals
        await trainer.finish(step, totals)


async def repeated(trainer: Stepping) -> None:
    """Train until the last step, or until the trainer is asked to leave, with several updates per step."""
    async for step in trainer.steps():
        whole = await _collected(trainer, step)
        await trainer.revisit(step, whole)
        await trainer.finish(step, whole[-1].totals)


async def _collected(trainer: Stepping, step: int) -> list[FilledSlot]:
    async with aclosing(trainer.slots(step)) as slots:
        return [slot async for slot in slots]
