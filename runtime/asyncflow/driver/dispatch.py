"""Dispatch of prompts: creates the rows of prompts in the queue.

``PromptColumns`` makes the columns of a prompt's rows. ``Dispatcher`` puts them as fast as admission allows, each for
the step that ``flow.assignment`` assigns. Its loop is level-triggered: it compares published versions, dispatched
prompts and trained steps, and puts the missing prompts. A put is idempotent by SampleKey, so a driver that was killed
during a put repeats it. The data alone determine which prompts are too long, and so to which step each other prompt
belongs: a skipped serial has no rows, and every driver skips it again.

Invariants: a prompt is in the assignment before its rows are created, and its step is open before its rows can be
ready; no sample needs more bytes than ``RLJobSpec.bytes_of_interval`` counts for it, because prompts larger than the
manifest allows are not put, and a put reserves room for inputs and outputs together.
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
"""Counts of skipped prompts at which one is logged: 1, 10, 100, ..."""


class Overlong(ManifestError):
    """A prompt has more tokens, or its task more bytes, than the manifest allows."""


class EncodedPrompt(NamedTuple):
    """An encoded prompt. ids: its tokens, int32; task: the packed ``Prompt``, uint8."""

    ids: NDArray[np.int32]
    task: NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class PromptColumns:
    """Makes the columns ``prompt_ids`` and ``task``.

    what: the kind of prompt, for messages; max_tokens, max_task_bytes: limits of one prompt; skips: whether overlong
    prompts are skipped (``data.overlong``); outputs: maximum bytes of each column that is written to a sample after its
    creation.
    """

    what: str
    prompter: Prompter
    max_tokens: int
    max_task_bytes: int
    skips: bool
    outputs: Mapping[str, int]

    @classmethod
    def of(cls, spec: RLJobSpec, *, prompter: Prompter, what: str) -> PromptColumns:
        """Create it with the limits of a manifest."""
        return cls(
            what=what,
            prompter=prompter,
            max_tokens=spec.sampling.max_prompt_tokens,
            max_task_bytes=spec.data.max_task_bytes,
            skips=spec.data.overlong == "skip",
            outputs=outputs_of(spec),
        )

    def encode(self, serial: int) -> EncodedPrompt:
        """Return prompt ``serial``. Raises Overlong if it is larger than the manifest allows."""
        return self._encoded(self.prompter.source.prompt(serial), serial)

    def take(self, request: PutPrompts) -> int:
        """Add prompts to the source, unless ``request.check`` is set, and return the number of prompts in the source.

        Raises Refused if the source takes no prompts from clients, or these are not its next ones. Raises
        ManifestError, before any prompt is added, if one of them is not allowed. Blocks for the disk.
        """
        source = self.prompter.source
        if not isinstance(source, PutSource):
            what, hint = "the driver makes the prompts of this job", "Set data.train.source: put:// in the manifest"
            raise Refused(what, where="put_prompts_data", hint=hint)
        for serial, prompt in enumerate(request.prompts, request.first):
            try:
                self._encoded(prompt, serial)
            except Overlong:
                if not self.skips:
                    raise
        return source.available if request.check else source.put(request.prompts, first=request.first)

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
                hint="Raise the limit, use shorter prompts, or set data.overlong: skip",
            )


class Issued(NamedTuple):
    """A prompt that is assigned to a step and ready to be put."""

    serial: int
    step: int
    encoded: EncodedPrompt


_step_of = attrgetter("step")


@dataclass(kw_only=True)
class Dispatcher:
    """Puts the training prompts.

    flow: returns the current counts, None while no prompt may be dispatched. changed: waits until a count may have
    changed. on_first: called before each put. on_skip: called with the number of further prompts that were skipped
    because they are too long. spans: records each put, and why no prompt is put. skipped: total number of skipped
    prompts, including those of earlier drivers. Each put also records the serials skipped before it. If a driver dies
    before that, the next driver finds serials without rows and checks them again.
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
        """Put prompts until every step has its prompts; then replace groups that are filtered or dropped.

        May be run again after a failure: issued prompts without an acknowledged put are put first. Raises ManifestError
        for a prompt that is too long if these are not skipped, or if very many in a row are too long.
        """
        while True:
            if not self._issued:
                flow = self.flow()
                allowed = 0 if flow is None else min(admit(self.policies, flow), PROMPTS_PER_PUT)
                await self._issue(allowed)
                self._record(flow, allowed)
            if self._issued:
                with self.spans.background("dispatch", step=self._issued[0].step):
                    await self.put(self._issued)
                self.assignment.mark_put(prompt.serial for prompt in self._issued)
                self._issued = []
            else:
                await self.changed()

    @property
    def acknowledged(self) -> int:
        """Number of prompts whose rows the queue has acknowledged, to this driver or to earlier ones."""
        return self.assignment.issued - len(self._issued) - self.skipped

    @property
    def lacks_prompts(self) -> bool:
        """True if the next prompt is needed and the source does not have it yet."""
        return self.assignment.waits_for_prompt(self.prompts.prompter.source.available)

    def _record(self, flow: InFlight | None, allowed: int) -> None:
        """Record in the spans why no more prompts are put."""
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
        """Count further prompts that this driver or an earlier one skipped."""
        self.skipped += skipped
        self.on_skip(skipped)

    async def put(self, issued: Sequence[Issued]) -> None:
        """Put the rows of prompts, step by step; existing rows are not changed."""
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
        recorded = set(samples.skipped)
        self._skipped = [serial for serial in self._skipped if serial not in recorded]

    async def _issue(self, allowed: int) -> None:
        """Issue up to ``allowed`` prompts; the next prompts replace those that are too long.

        The limit of overlong prompts in a row does not count serials that an earlier driver skipped.
        """
        in_a_row = 0
        available = self.prompts.prompter.source.available
        while len(self._issued) < allowed and (pair := self.assignment.issue(available=available)) is not None:
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
                        hint="Raise the limit, or use shorter prompts",
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
        """Create again the rows whose bytes were lost with a storage unit; runs until the job ends.

        The lowest steps come first: higher steps may have to wait for the bytes that the commit of lower ones frees.
        """
        known = 0
        while True:
            wanted = await self.queue.wanted(partition=TRAIN, known=known, timeout=CALL_TIMEOUT_S)
            known = wanted.revision
            lost = [(serial, step) for step, serial in sorted({(meta.step, meta.serial) for meta in wanted.keys})]
            if lost:
                log.warning("generating %d groups again: their bytes were lost with a storage unit", len(lost))
            for batch in batches(lost, PROMPTS_PER_PUT):
                await self.put([Issued(serial, step, self.prompts.encode(serial)) for serial, step in batch])


def restore(assignment: PromptAssignment, snapshot: PartitionSnapshot) -> None:
    """Restore an assignment of prompts from a snapshot of the partition's ledger."""
    assignment.restore(
        {
            step: LedgerStep(state.serials, undecided=state.undone[ADVANTAGE], excluded=state.excluded)
            for step, state in snapshot.steps.items()
        },
        committed=snapshot.last_committed_step,
        next_serial=snapshot.next_serial,
        missing=snapshot.missing,
    )


def require_put(snapshot: PartitionSnapshot, *, prompts: int) -> None:
    """Raise Refused if the ledger has fewer prompts than the ``prompts`` that were put: it was lost.

    The driver cannot continue then; its next attempt starts with what the ledger has.
    """
    known = snapshot.next_serial - len(snapshot.missing)
    if known < prompts:
        hint = "On a cluster, set storage.ledger.claim: without it the ledger is lost with the controller's pod"
        raise Refused(f"{prompts} prompts were put, and it has {known}: it was lost", where="ledger", hint=hint)
