"""The two training loops. All that differs is when the first gradient of a step is computed.

``synchronous``: D_k is collected whole, in the order of keys, before the first gradient: the reference, and the way to
bit-equal runs. ``streaming``: each micro-batch is computed as its groups become ready, while others are still being
generated, and, in delayed modes, while D_{k+1} is generated as well.

Invariant: both give each sample of D_k to the backend exactly once before ``finish(k)``, so both make the same step
up to the order of additions.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncflow.train.trainer import Trainer


async def synchronous(trainer: Trainer) -> None:
    """Train until the last step, or until the trainer is told to leave."""
    async for step in trainer.steps():
        async with aclosing(trainer.slots(step)) as slots:
            whole = [slot async for slot in slots]
        for slot in whole:
            await trainer.accumulate(step, slot)
        await trainer.finish(step, whole[-1].totals)


async def streaming(trainer: Trainer) -> None:
    """Train until the last step, or until the trainer is told to leave."""
    async for step in trainer.steps():
        totals = None
        async with aclosing(trainer.slots(step)) as slots:
            async for slot in slots:
                await trainer.accumulate(step, slot)
                totals = slot.totals
        await trainer.finish(step, totals)
