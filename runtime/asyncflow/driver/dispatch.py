"""Prompts on their way to the queue: which columns each has, and when it is put.

``PromptColumns`` makes the columns of a prompt's rows. ``Dispatcher`` puts them as fast as admission allows, each for
the step that ``flow.assignment`` says. Its loop is level-triggered: it looks at what is published, dispatched and
trained, and puts what is missing. Putting is idempotent by SampleKey, so a driver that was killed half-way through
simply puts again. Which prompts are too long, and so which step every other one belongs to, is a function of the data:
a serial that is skipped has no rows, and every driver skips it again.

Invariants: a prompt is in the assignment before its rows are created, and its step is open before its rows can be
ready; no sample holds more bytes than ``RLJobSpec.bytes_of_interval`` counts for it: what is larger than the manifest
says is not put, and room for the outputs is asked for together with that for the inputs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncflow.api.graph import ADVANTAGE
from asyncflow.api.job import RLJobSpec
from asyncflow.data.base import Prompt
from asyncflow.data.prompter import Prompter
from asyncflow.data.put import PutPrompts, PutSource
from asyncflow.driver.tasks import TRAIN, outputs_of
from asyncflow.errors import ManifestError, Refused
from asyncflow.flow.admission import Admission, InFlight, admit
from asyncflow.flow.assignment import LedgerStep, PromptAssignment
from asyncflow.flow.schedule import Schedule
from asyncflow.queue.client import QueueClient
from asyncflow.queue.protocol.messages import PartitionSnapshot, Samples
from asyncflow.rpc.columns import Jagged, batches
from asyncflow.telemetry.spans import NO_SPANS, Spans

log = logging.getLogger(__name__)

PROMPTS_PER_PUT = 32

CALL_TIMEOUT_S = 60.0
_MOST_SKIPPED_IN_A_ROW = 10_000
_LOGGED = frozenset(10**power for power in range(8))
"""The skipped prompts that are logged: the first, the tenth, the hundredth ..."""


class Overlong(ManifestError):
    """A prompt has more tokens, or its task more bytes, than the manifest allows."""


class EncodedPrompt(NamedTuple):
    """A prompt as it is put. ids: its tokens, int32; task: the packed ``Prompt``, uint8."""

    ids: NDArray[np.int32]
    task: NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class PromptColumns:
    """Makes the columns ``prompt_ids`` and ``task``.

    what: the kind of prompt, for messages; skips: whether prompts that are too long are left out (``data.overlong``);
    outputs: most bytes of each column that is written to a sample later.
    """

    what: str
    prompter: Prompter
    max_tokens: int
    max_task_bytes: int
    skips: bool
    outputs: Mapping[str, int]

    @classmethod
    def of(cls, spec: RLJobSpec, *, prompter: Prompter, what: str) -> PromptColumns:
        """Make them with the limits of a manifest."""
        return cls(
            what=what,
            prompter=prompter,
            max_tokens=spec.sampling.max_prompt_tokens,
            max_task_bytes=spec.data.max_task_bytes,
            skips=spec.data.overlong == "skip",
            outputs=outputs_of(spec),
        )

    def encode(self, serial: int) -> EncodedPrompt:
        """Return prompt ``serial``. Raises Overlong for one that is larger than the manifest allows."""
        return self._encoded(self.prompter.source.prompt(serial), serial)

    def take(self, request: PutPrompts) -> int:
        """Put prompts into the source, unless it is only asked whether that can be, and return how many there are.

        Raises Refused where the source is not for that, or they are not its next ones, and ManifestError, before any is
        put, for one that cannot be asked. Blocks for the disk.
        """
        source = self.prompter.source
        if not isinstance(source, PutSource):
            what, hint = "the driver makes the prompts of this job", "Give the manifest data.train.source: put://"
            raise Refused(what, where="put_prompts_data", hint=hint)
        for serial, prompt in enumerate(request.prompts, request.first):
            try:
                self._encoded(prompt, serial)
            except Overlong:
                if not self.skips:
                    raise
        return source.there if request.check else source.put(request.prompts, first=request.first)

    def _encoded(self, prompt: Prompt, serial: int) -> EncodedPrompt:
        tokens, task = self.prompter.encode(prompt), prompt.packed()
        self._check(serial, len(tokens), self.max_tokens, unit="tokens", where="sampling.maxPromptTokens")
        self._check(serial, len(task), self.max_task_bytes, unit="bytes of task", where="data.maxTaskBytes")
        return EncodedPrompt(np.asarray(tokens, dtype=np.int32), np.frombuffer(task, dtype=np.uint8))

    def columns(self, prompts: Sequence[EncodedPrompt], *, copies: int) -> dict[str, Jagged]:
        """Return the columns of ``copies`` rows for each prompt."""
        return {
            "prompt_ids": Jagged.from_rows([prompt.ids for prompt in prompts for _ in range(copies)], np.int32),
            "task": Jagged.from_rows([prompt.task for prompt in prompts for _ in range(copies)], np.uint8),
        }

    def _check(self, serial: int, size: int, most: int, *, unit: str, where: str) -> None:
        if size > most:
            raise Overlong(
                f"{self.what} {serial} has {size} {unit}, more than {most}",
                where=f"spec.{where}",
                hint="Raise it, give shorter prompts, or set data.overlong: skip",
            )


class Issued(NamedTuple):
    """A prompt of a step, ready to be put."""

    serial: int
    step: int
    encoded: EncodedPrompt


_step_of = attrgetter("step")


@dataclass(kw_only=True)
class Dispatcher:
    """Puts the training prompts.

    flow: returns the present counts. changed: waits until one of them may have changed. on_skip: called with how many
    prompts were skipped more, because they are too long. spans: records what is put, and why nothing is. skipped: how
    many were in all, by earlier drivers too. What is skipped is recorded with the next put, so that a serial without
    rows is known for skipped, or the next driver looks at it again.
    """

    queue: QueueClient
    prompts: PromptColumns
    assignment: PromptAssignment
    schedule: Schedule
    policies: Sequence[Admission]
    group_size: int
    flow: Callable[[], InFlight | None]
    changed: Callable[[], Awaitable[None]]
    on_first: Callable[[], None]
    on_skip: Callable[[int], None]
    spans: Spans = NO_SPANS
    skipped: int = 0
    _opened: set[int] = field(default_factory=set)
    _issued: list[Issued] = field(default_factory=list)
    _skipped: list[int] = field(default_factory=list)

    async def run(self) -> None:
        """Put prompts until every step has its own; then wait for places that filtering makes free.

        May be run again after it failed: what was issued and not yet acknowledged is put first. Raises ManifestError
        for a prompt that is too long, where such are refused, and where all of very many are.
        """
        while True:
            if not self._issued:
                flow = self.flow()
                allowed = 0 if flow is None else min(admit(self.policies, flow), PROMPTS_PER_PUT)
                await self._issue(allowed)
                self._record(flow, allowed)
            if self._issued:
                with self.spans.beside("dispatch", step=self._issued[0].step):
                    await self.put(self._issued)
                self.assignment.out(prompt.serial for prompt in self._issued)
                self._issued = []
            else:
                await self.changed()

    @property
    def lacks_prompts(self) -> bool:
        """True where the next prompt was not put yet."""
        return self.assignment.outruns(self.prompts.prompter.source.there)

    def _record(self, flow: InFlight | None, allowed: int) -> None:
        """Record why no more prompts go out."""
        if self.assignment.full:
            waits = "dispatched"
        elif self.lacks_prompts:
            waits = "calls"
        elif flow is None or (self.schedule.lag == 0 and not allowed):
            waits = "version"
        else:
            waits = "admission" if not allowed else "calls"
        self.spans.enter("idle", waits=waits)

    def count_skipped(self, skipped: int) -> None:
        """Count that so many more prompts were skipped, here or by an earlier driver."""
        self.skipped += skipped
        self.on_skip(skipped)

    async def put(self, issued: Sequence[Issued]) -> None:
        """Put the rows of prompts, step by step; those that exist already are left as they are."""
        for step in sorted({prompt.step for prompt in issued} - self._opened):
            await self.queue.open_step(
                partition=TRAIN,
                step=step,
                groups=self.assignment.prompts_per_step,
                group_size=self.group_size,
                timeout=CALL_TIMEOUT_S,
            )
            self._opened.add(step)
        self.on_first()
        for step, prompts in groupby(sorted(issued, key=_step_of), key=_step_of):
            await self._put_step(step, list(prompts))

    async def _put_step(self, step: int, prompts: Sequence[Issued]) -> None:
        window = self.schedule.window(step)
        samples = Samples(
            serials=[prompt.serial for prompt in prompts],
            step=step,
            oldest=window.oldest,
            newest=window.newest,
            tokens=[len(prompt.encoded.ids) for prompt in prompts for _ in range(self.group_size)],
            skipped=list(self._skipped),
        )
        await self.queue.put(
            TRAIN,
            self.prompts.columns([prompt.encoded for prompt in prompts], copies=self.group_size),
            group_size=self.group_size,
            outputs=self.prompts.outputs,
            samples=samples,
            timeout=CALL_TIMEOUT_S,
        )
        told = set(samples.skipped)
        self._skipped = [serial for serial in self._skipped if serial not in told]

    async def _issue(self, allowed: int) -> None:
        """Issue up to ``allowed`` prompts; those that are too long make room for the next ones.

        Of prompts that an earlier driver passed over any number may be too long.
        """
        in_a_row = 0
        there = self.prompts.prompter.source.there
        while len(self._issued) < allowed and (pair := self.assignment.issue(available=there)) is not None:
            serial, step = pair
            try:
                encoded = self.prompts.encode(serial)
            except Overlong as error:
                in_a_row += serial == self.assignment.next_serial - 1
                if not self.prompts.skips:
                    raise
                if in_a_row == _MOST_SKIPPED_IN_A_ROW:
                    raise ManifestError(
                        f"{in_a_row} prompts in a row are too long, the last: {error.what}",
                        where=error.where,
                        hint="Raise it, or give shorter prompts.",
                    ) from error
                self.assignment.skip(serial)
                self._skipped.append(serial)
                self.count_skipped(1)
                if self.skipped in _LOGGED:
                    log.warning("skipped a prompt: %s; %d so far", error.what, self.skipped)
                await asyncio.sleep(0)
            else:
                in_a_row = 0
                self._issued.append(Issued(serial, step, encoded))

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


def restore(assignment: PromptAssignment, snapshot: PartitionSnapshot) -> None:
    """Restore an assignment of prompts from what the ledger of the partition says."""
    assignment.restore(
        {
            step: LedgerStep(state.serials, undecided=state.undone[ADVANTAGE], excluded=state.excluded)
            for step, state in snapshot.steps.items()
        },
        committed=snapshot.last_committed_step,
        next_serial=snapshot.next_serial,
        missing=snapshot.missing,
    )
