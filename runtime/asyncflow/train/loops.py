"""The training loops. They differ in when the first gradient of a step is computed, and in how many updates it makes.

``synchronous``: D_k is collected whole, in the order of keys, before the first gradient: the reference, and the way to
bit-equal runs. ``streaming``: each micro-batch is computed as its groups become ready, while others are still being
generated, and, in delayed modes, while D_{k+1} is generated as well. ``repeated``: D_k is collected whole and makes
several optimizer updates, by mini-batches and over several epochs.

Invariant: the first two give each sample of D_k to the backend exactly once before ``finish(k)``, so both make the same
step up to the order of additions; the third gives it once in each epoch.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Protocol

from asyncflow.queue.protocol.messages import StepTotals
from asyncflow.train.feed import Filled


class Stepping(Protocol):
    """The trainer, to its loops."""

    def steps(self) -> AsyncIterator[int]:
        """Return the steps that are left, one after another."""

    def slots(self, step: int) -> AsyncGenerator[Filled, None]:
        """Return the slots of D_step."""

    async def accumulate(self, step: int, slot: Filled) -> None:
        """Compute the gradient of one slot."""

    async def revisit(self, step: int, slots: Sequence[Filled]) -> None:
        """Make all updates of a step but the last, whose gradient is computed."""

    async def finish(self, step: int, totals: StepTotals | None) -> None:
        """Make θ_step out of what was accumulated, and let everybody know."""


async def synchronous(trainer: Stepping) -> None:
    """Train until the last step, or until the trainer is told to leave."""
    async for step in trainer.steps():
        whole = await _collected(trainer, step)
        for slot in whole:
            await trainer.accumulate(step, slot)
        await trainer.finish(step, whole[-1].totals)


async def streaming(trainer: Stepping) -> None:
    """Train until the last step, or until the trainer is told to leave."""
    async for step in trainer.steps():
        totals = None
        async with aclosing(trainer.slots(step)) as slots:
            async for slot in slots:
                await trainer.accumulate(step, slot)
                totals = slot.totals
        await trainer.finish(step, totals)


async def repeated(trainer: Stepping) -> None:
    """Train until the last step, or until the trainer is told to leave."""
    async for step in trainer.steps():
        whole = await _collected(trainer, step)
        await trainer.revisit(step, whole)
        await trainer.finish(step, whole[-1].totals)


async def _collected(trainer: Stepping, step: int) -> list[Filled]:
    async with aclosing(trainer.slots(step)) as slots:
        return [slot async for slot in slots]
