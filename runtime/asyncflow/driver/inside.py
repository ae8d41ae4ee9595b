"""Progress within the current step, for whoever waits for its end.

Invariant: every figure is counted by who does the work: generated samples by the queue, trained ones by the trainer's
ranks, tokens and running sequences by the rollouts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from asyncflow.api.status import StepProgress
from asyncflow.driver.dispatch import CALL_TIMEOUT_S
from asyncflow.driver.members import Members
from asyncflow.driver.tasks import TRAIN
from asyncflow.queue.client.client import QueueClient

log = logging.getLogger(__name__)

TELL_S = 7.0
"""Seconds between two lines of progress: an event loop that is busy for a while still keeps to the promised 10."""
_WINDOW = 5
"""Looks over which the rate of generation is taken."""


class StepWatch:
    """Looks into a step. samples: of one step; clock: monotonic seconds."""

    def __init__(
        self, queue: QueueClient, *, members: Members, samples: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._queue = queue
        self._members = members
        self._samples = samples
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque(maxlen=_WINDOW)

    async def look(self, step: int) -> StepProgress:
        """Return how far ``step`` is. Raises PeerLost or DeadlineExceeded while the queue cannot be asked."""
        told = await self._queue.snapshot(partition=TRAIN, step=step, timeout=CALL_TIMEOUT_S)
        state, trainers = told.steps.get(step), self._members.told("trainer")
        behind = [status for status in trainers if status.get("step") == step - 1]
        publishing = max((int(status.get("publishing", -1)) for status in trainers), default=-1)
        return StepProgress(
            step=step,
            samples=self._samples,
            generated=min(state.done.get("rollout", 0), self._samples) if state else 0,
            filtered=state.filtered if state else 0,
            trained=sum(int(status.get("trained", 0)) for status in behind),
            running=sum(int(status.get("running", 0)) for status in self._members.told("rollout")),
            tokens_per_second=self._rate(),
            publishing=publishing if publishing >= 0 else None,
            saving=any(bool(status.get("saving")) for status in trainers),
        )

    def _rate(self) -> float:
        now, tokens = self._clock(), self._members.lives.tokens_generated
        self._seen.append((now, tokens))
        since, before = self._seen[0]
        return max(0, tokens - before) / (now - since) if now > since else 0.0


async def tell(words: Callable[[], str]) -> None:
    """Log ``words()`` again and again, whoever else is waited for."""
    while True:
        await asyncio.sleep(TELL_S)
        log.info("%s", words())
