"""Prompts go out as fast as admission allows, in data order.

The loop is level-triggered: it looks at what is published, dispatched and trained, and puts what is missing. Putting
is idempotent by SampleKey, so a driver that was killed half-way through simply puts again.

Invariant: a prompt is in the book before its rows are created, and its step is open before its rows can be ready.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from asyncflow.driver.book import PromptBook
from asyncflow.driver.prompts import PROMPTS_PER_PUT, PromptColumns
from asyncflow.driver.tasks import TRAIN
from asyncflow.flow.admission import Admission, Flow, admit
from asyncflow.flow.schedule import Schedule
from asyncflow.net.batches import batches
from asyncflow.queue.client.client import QueueClient
from asyncflow.queue.protocol.messages import RowMeta

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 60.0


@dataclass(kw_only=True)
class Dispatcher:
    """Puts the training prompts.

    flow: gives the present counts. changed: waits until one of them may have changed.
    """

    queue: QueueClient
    prompts: PromptColumns
    book: PromptBook
    schedule: Schedule
    policies: Sequence[Admission]
    group_size: int
    flow: Callable[[], Flow | None]
    changed: Callable[[], Awaitable[None]]
    on_first: Callable[[], None]
    _opened: set[int] = field(default_factory=set)
    _issued: list[tuple[int, int]] = field(default_factory=list)

    async def run(self) -> None:
        """Put prompts until every step has its own; then wait for places that filtering makes free.

        May be run again after it failed: what was issued and not yet acknowledged is put first.
        """
        while True:
            if not self._issued:
                flow = self.flow()
                allowed = 0 if flow is None else min(admit(self.policies, flow), PROMPTS_PER_PUT)
                self._issued = [pair for pair in (self.book.issue() for _ in range(allowed)) if pair]
            if self._issued:
                await self.put(self._issued)
                self._issued = []
            else:
                await self.changed()

    async def put(self, issued: Sequence[tuple[int, int]]) -> None:
        """Create the rows of (serial, step) pairs; those that exist already are left as they are."""
        for step in sorted({step for _, step in issued} - self._opened):
            await self.queue.open_step(
                partition=TRAIN,
                step=step,
                groups=self.book.prompts_per_step,
                group_size=self.group_size,
                timeout=CALL_TIMEOUT_S,
            )
            self._opened.add(step)
        self.on_first()
        metas = [self._meta(serial, step, sample) for serial, step in issued for sample in range(self.group_size)]
        columns = self.prompts.columns([serial for serial, _ in issued], copies=self.group_size)
        await self.queue.create(
            metas, columns, group_size=self.group_size, outputs=self.prompts.outputs, timeout=CALL_TIMEOUT_S
        )

    def _meta(self, serial: int, step: int, sample: int) -> RowMeta:
        window = self.schedule.window(step)
        return RowMeta(
            partition=TRAIN,
            serial=serial,
            sample=sample,
            step=step,
            purpose="train",
            min_version=window.oldest,
            max_version=window.newest,
        )

    async def replace_lost(self) -> None:
        """Create again the rows whose bytes were lost with a storage unit, for as long as the job lasts.

        The lowest steps come first: others may have to wait for the bytes that their commit frees.
        """
        known = 0
        while True:
            wanted = await self.queue.wanted(partition=TRAIN, known=known, timeout=CALL_TIMEOUT_S)
            known = wanted.revision
            lost = [(serial, step) for step, serial in sorted({(meta.step, meta.serial) for meta in wanted.keys})]
            if lost:
                log.warning("generating %d groups again: their bytes were lost with a storage unit", len(lost))
            for some in batches(lost, PROMPTS_PER_PUT):
                await self.put(some)
