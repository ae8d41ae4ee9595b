"""Prompts on their way to the queue: which step each belongs to, which columns it has, and when it is put.

``PromptAssignment`` assigns serials to steps: in data order, each to the lowest step that is short of prompts; a group
that was filtered or dropped leaves its step short, and the next serial takes its place. Under ``fill: completion`` a
group that is finished early changes steps with one that is late. ``PromptColumns`` makes the
columns of a prompt's rows. ``Dispatcher`` puts them as fast as admission allows. Its loop is level-triggered: it looks
at what is published, dispatched and trained, and puts what is missing. Putting is idempotent by SampleKey, so a driver
that was killed half-way through simply puts again. Which prompts are too long, and so which step every other one
belongs to, is a function of the data: a serial that is skipped has no rows, and every driver skips it again.

Invariants: every serial below ``next_serial`` belongs to exactly one step or was skipped, and a step never holds more
than ``prompts_per_step`` groups that are neither filtered nor dropped; a prompt is in the assignment before its rows
are created, and its step is open before its rows can be ready; no sample holds more bytes than
``RLJobSpec.bytes_of_interval`` counts for it: what is larger than the manifest says is not put, and room for the
outputs is asked for together with that for the inputs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncflow.api.job import RLJobSpec
from asyncflow.data.prompter import Prompter
from asyncflow.driver.tasks import TRAIN, outputs_of
from asyncflow.errors import ManifestError
from asyncflow.flow.admission import Admission, InFlight, admit
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


@dataclass(kw_only=True)
class PromptAssignment:
    """The assignment of prompts to steps; pure, rebuilt from the ledger by ``restore``."""

    prompts_per_step: int
    steps: int
    next_serial: int = 0
    _step_of: dict[int, int] = field(default_factory=dict)
    _counted: Counter[int] = field(default_factory=Counter)
    _excluded: set[int] = field(default_factory=set)
    _finished: set[int] = field(default_factory=set)
    _undecided: Counter[int] = field(default_factory=Counter)
    _out: dict[int, set[int]] = field(default_factory=dict)
    _missing: list[int] = field(default_factory=list)
    _lowest: int = 1

    def issue(self) -> tuple[int, int] | None:
        """Return the next (serial, step), or None when every step has its prompts."""
        while self._lowest <= self.steps and self._counted[self._lowest] >= self.prompts_per_step:
            self._lowest += 1
        if self._lowest > self.steps:
            return None
        serial = self._missing.pop(0) if self._missing else self.next_serial
        self.note(serial=serial, step=self._lowest)
        self._undecided[self._lowest] += 1
        return serial, self._step_of[serial]

    @property
    def full(self) -> bool:
        """Return whether every step had its prompts when one was asked for last."""
        return self._lowest > self.steps

    def note(self, *, serial: int, step: int) -> None:
        """Record that ``serial`` belongs to ``step``."""
        self._step_of[serial] = step
        self._counted[step] += 1
        self.next_serial = max(self.next_serial, serial + 1)

    def skip(self, serials: Collection[int]) -> None:
        """Record that these serials have no rows and belong to no step; the step of one that was issued is short."""
        self._missing = [serial for serial in self._missing if serial not in serials]
        for serial in serials:
            if serial in self._step_of:
                self.finish(serial)
                self.exclude(serial)

    def finish(self, serial: int) -> bool:
        """Record that the group was generated, and that it is decided what becomes of it; False: it was recorded."""
        if serial in self._finished:
            return False
        self._finished.add(serial)
        step = self._step_of[serial]
        self._undecided[step] = max(0, self._undecided[step] - 1)
        self._no_longer_out(serial)
        return True

    def out(self, serials: Iterable[int]) -> None:
        """Record that these prompts were put: until they are finished, others may take their place (``late``)."""
        for serial in serials:
            if serial not in self._finished:
                self._out.setdefault(self._step_of[serial], set()).add(serial)

    def late(self, serial: int, *, alike: Callable[[int], object]) -> tuple[int, int] | None:
        """Return the step to which a finished group may go that is early, and the group there that is late.

        It is the lowest step that still waits for a group, of those below the group's own to which ``alike`` says the
        same; None where there is none. Prompts that an earlier driver put are never late.
        """
        own = self._step_of[serial]
        steps = [step for step in self._out if step < own and alike(step) == alike(own)]
        return (min(steps), max(self._out[min(steps)])) if steps else None

    def exchange(self, serial: int, late: int) -> None:
        """Record that a finished group and an unfinished one have changed their steps."""
        own, step = self._step_of[serial], self._step_of[late]
        self._no_longer_out(late)
        self._step_of[serial], self._step_of[late] = step, own
        self._undecided[step] -= 1
        self._undecided[own] += 1
        self.out([late])

    def _no_longer_out(self, serial: int) -> None:
        step = self._step_of[serial]
        out = self._out.get(step, set()) - {serial}
        if out:
            self._out[step] = out
        else:
            self._out.pop(step, None)

    def exclude(self, serial: int) -> bool:
        """Record that the group was filtered or dropped: its step lacks a prompt again; False: it was recorded."""
        if serial in self._excluded:
            return False
        self._excluded.add(serial)
        step = self._step_of[serial]
        self._counted[step] -= 1
        self._lowest = min(self._lowest, step)
        return True

    def restore(self, snapshot: PartitionSnapshot) -> None:
        """Take over what the ledger knows; committed steps are full, serials that were never created come first."""
        for step in range(1, snapshot.last_committed_step + 1):
            self._counted[step] = self.prompts_per_step
        for step, state in sorted(snapshot.steps.items()):
            self._counted[step] = 0
            for serial in state.serials:
                self.note(serial=serial, step=step)
            self._counted[step] -= state.excluded
        self.next_serial = snapshot.next_serial
        self._missing = sorted(snapshot.missing)
        self._undecided = Counter({step: state.undone["advantage"] for step, state in snapshot.steps.items()})

    @property
    def running(self) -> int:
        """Prompts issued of which it is not decided yet what becomes of their groups."""
        return self._undecided.total()

    def complete(self, step: int) -> bool:
        """Return whether the step has all its prompts, and what becomes of each group is decided."""
        return self._counted[step] >= self.prompts_per_step and not self._undecided[step]

    @property
    def missing(self) -> Sequence[int]:
        """Serials below ``next_serial`` that were never created, as far as they are not issued again."""
        return self._missing

    @property
    def dispatched(self) -> int:
        """Prompts given out that are neither filtered nor dropped."""
        return self._counted.total()

    def unfinished(self, *, trained_step: int) -> set[int]:
        """Return the steps after ``trained_step`` that have prompts."""
        return {step for step, count in self._counted.items() if step > trained_step and count > 0}


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
        prompt = self.prompter.source.prompt(serial)
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
    many were in all.
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

    def _record(self, flow: InFlight | None, allowed: int) -> None:
        """Record why no more prompts go out."""
        if self.assignment.full:
            waits = "dispatched"
        elif flow is None or (self.schedule.lag == 0 and not allowed):
            waits = "version"
        else:
            waits = "admission" if not allowed else "calls"
        self.spans.enter("idle", waits=waits)

    async def recall(self) -> None:
        """Count again what earlier drivers skipped: what is too long of the serials that they passed over."""
        overlong = await asyncio.to_thread(
            lambda: {serial for serial in self.assignment.missing if self._overlong(serial)}
        )
        self.assignment.skip(overlong)
        self._count(len(overlong))

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
        )
        await self.queue.put(
            TRAIN,
            self.prompts.columns([prompt.encoded for prompt in prompts], copies=self.group_size),
            group_size=self.group_size,
            outputs=self.prompts.outputs,
            samples=samples,
            timeout=CALL_TIMEOUT_S,
        )

    async def _issue(self, allowed: int) -> None:
        """Issue up to ``allowed`` prompts; those that are too long make room for the next ones."""
        in_a_row = 0
        while len(self._issued) < allowed and (pair := self.assignment.issue()) is not None:
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
                self.assignment.skip([serial])
                self._count(1)
                if self.skipped in _LOGGED:
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
