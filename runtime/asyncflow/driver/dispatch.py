"""Prompts go out as fast as admission allows, in data order.

The loop is level-triggered: it looks at what is published, dispatched and trained, and puts what is missing. Putting
is idempotent by SampleKey, so a driver that was killed half-way through simply puts again.

Invariant: a prompt is in the book before its rows are created, and its step is open before its rows can be ready.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from asyncflow.data.prompter import Prompter
from asyncflow.driver.book import PromptBook
from asyncflow.driver.tasks import TRAIN
from asyncflow.errors import ManifestError
from asyncflow.flow.admission import Admission, Flow, admit
from asyncflow.flow.schedule import Schedule
from asyncflow.net.frames import Jagged
from asyncflow.queue.client import QueueClient
from asyncflow.queue.messages import RowMeta

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 60.0
PROMPTS_PER_PUT = 32


def prompt_columns(prompter: Prompter, serials: Iterable[int], *, copies: int) -> dict[str, Jagged]:
    """Give the columns ``prompt_ids`` int32 and ``task`` uint8 (a packed ``Prompt``), ``copies`` rows a serial."""
    ids: list[np.ndarray] = []
    tasks: list[np.ndarray] = []
    for serial in serials:
        prompt = prompter.source.prompt(serial)
        ids.extend([np.asarray(prompter.encode(prompt), dtype=np.int32)] * copies)
        tasks.extend([np.frombuffer(prompt.packed(), dtype=np.uint8)] * copies)
    return {"prompt_ids": Jagged.from_rows(ids, np.int32), "task": Jagged.from_rows(tasks, np.uint8)}


@dataclass(kw_only=True)
class Dispatcher:
    """Puts the training prompts.

    flow: gives the present counts. changed: waits until one of them may have changed.
    """

    queue: QueueClient
    prompter: Prompter
    book: PromptBook
    schedule: Schedule
    policies: Sequence[Admission]
    group_size: int
    max_prompt_tokens: int
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
        columns = prompt_columns(self.prompter, [serial for serial, _ in issued], copies=self.group_size)
        self._check_lengths([serial for serial, _ in issued], columns["prompt_ids"])
        await self.queue.create(metas, columns, group_size=self.group_size, timeout=CALL_TIMEOUT_S)

    def _check_lengths(self, serials: Sequence[int], ids: Jagged) -> None:
        for serial, length in zip(serials, ids.lengths[:: self.group_size], strict=True):
            if length > self.max_prompt_tokens:
                raise ManifestError(
                    f"prompt {serial} has {length} tokens, more than {self.max_prompt_tokens}",
                    where="spec.sampling.maxPromptTokens",
                    hint="Raise it, or give shorter prompts.",
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
        """Create again the rows whose bytes were lost with a storage unit, for as long as the job lasts."""
        known = 0
        while True:
            wanted = await self.queue.wanted(partition=TRAIN, known=known, timeout=CALL_TIMEOUT_S)
            known = wanted.revision
            if wanted.keys:
                lost = sorted({(meta.serial, meta.step) for meta in wanted.keys})
                log.warning("generating %d groups again: their bytes were lost with a storage unit", len(lost))
                await self.put(lost)
