"""Prompts go out as fast as admission allows, in data order.

The loop is level-triggered: it looks at what is published, dispatched and trained, and puts what is missing. Putting
is idempotent by SampleKey, so a driver that was killed half-way through simply puts again. Which prompts are too long,
and so which step every other one belongs to, is a function of the data: a serial that is skipped has no rows, and every
driver skips it again.

Invariant: a prompt is in the book before its rows are created, and its step is open before its rows can be ready.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncflow.driver.book import PromptBook
from asyncflow.driver.prompts import PROMPTS_PER_PUT, EncodedPrompt, Overlong, PromptColumns
from asyncflow.driver.tasks import TRAIN
from asyncflow.errors import ManifestError
from asyncflow.flow.admission import Admission, Flow, admit
from asyncflow.flow.schedule import Schedule
from asyncflow.net.batches import batches
from asyncflow.queue.client.client import QueueClient
from asyncflow.queue.protocol.messages import RowMeta

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 60.0
_MOST_SKIPPED_IN_A_ROW = 10_000
_TOLD = frozenset(10**power for power in range(8))
"""The skipped prompts that are logged: the first, the tenth, the hundredth ..."""


class Issued(NamedTuple):
    """A prompt of a step, ready to be put."""

    serial: int
    step: int
    encoded: EncodedPrompt


@dataclass(kw_only=True)
class Dispatcher:
    """Puts the training prompts.

    flow: gives the present counts. changed: waits until one of them may have changed. on_skip: told how many prompts
    were skipped more, because they are too long. skipped: how many were in all.
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
    on_skip: Callable[[int], None]
    skipped: int = 0
    _opened: set[int] = field(default_factory=set)
    _issued: list[Issued] = field(default_factory=list)

    async def run(self) -> None:
        """Put prompts until every step has its own; then wait for places that filtering makes free.

        May be run again after it failed: what was issued and not yet acknowledged is put first. Raises ManifestError
        for a prompt that is too long, where such are refused, and where all of very many are.
        """
        while True:
            if not self._issued:
                flow = self.flow()
                await self._issue(0 if flow is None else min(admit(self.policies, flow), PROMPTS_PER_PUT))
            if self._issued:
                await self.put(self._issued)
                self._issued = []
            else:
                await self.changed()

    async def recall(self) -> None:
        """Count again what earlier drivers skipped: what is too long of the serials that they passed over."""
        overlong = await asyncio.to_thread(lambda: {serial for serial in self.book.missing if self._overlong(serial)})
        self.book.skip(overlong)
        self._count(len(overlong))

    async def put(self, issued: Sequence[Issued]) -> None:
        """Create the rows of prompts; those that exist already are left as they are."""
        for step in sorted({prompt.step for prompt in issued} - self._opened):
            await self.queue.open_step(
                partition=TRAIN,
                step=step,
                groups=self.book.prompts_per_step,
                group_size=self.group_size,
                timeout=CALL_TIMEOUT_S,
            )
            self._opened.add(step)
        self.on_first()
        metas = [self._meta(prompt, sample) for prompt in issued for sample in range(self.group_size)]
        columns = self.prompts.columns([prompt.encoded for prompt in issued], copies=self.group_size)
        await self.queue.create(
            metas, columns, group_size=self.group_size, outputs=self.prompts.outputs, timeout=CALL_TIMEOUT_S
        )

    async def _issue(self, allowed: int) -> None:
        """Issue up to ``allowed`` prompts; those that are too long make room for the next ones."""
        in_a_row = 0
        while len(self._issued) < allowed and (pair := self.book.issue()) is not None:
            serial, step = pair
            try:
                encoded = self.prompts.encode(serial)
            except Overlong as error:
                in_a_row += 1
                if not self.prompts.skips:
                    raise
                if in_a_row == _MOST_SKIPPED_IN_A_ROW:
                    raise ManifestError(
                        f"{in_a_row} prompts in a row are too long, the last: {error.what}",
                        where=error.where,
                        hint="Raise it, or give shorter prompts.",
                    ) from error
                self.book.skip([serial])
                self._count(1)
                if self.skipped in _TOLD:
                    log.warning("skipped a prompt: %s; %d so far", error.what, self.skipped)
                await asyncio.sleep(0)
            else:
                in_a_row = 0
                self._issued.append(Issued(serial, step, encoded))

    def _overlong(self, serial: int) -> bool:
        try:
            self.prompts.encode(serial)
        except Overlong:
            return self.prompts.skips
        return False

    def _count(self, skipped: int) -> None:
        self.skipped += skipped
        self.on_skip(skipped)

    def _meta(self, prompt: Issued, sample: int) -> RowMeta:
        window = self.schedule.window(prompt.step)
        return RowMeta(
            partition=TRAIN,
            serial=prompt.serial,
            sample=sample,
            step=prompt.step,
            purpose="train",
            tokens=len(prompt.encoded.ids),
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
                await self.put([Issued(serial, step, self.prompts.encode(serial)) for serial, step in some])
