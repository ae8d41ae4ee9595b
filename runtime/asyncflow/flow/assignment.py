"""Which optimizer step each prompt belongs to.

Serials are assigned in data order, each to the lowest step that is short of prompts; a group that was filtered or
dropped leaves its step short, and the next serial takes its place. Under ``fill: completion`` a group that is finished
early changes steps with one that is late.

Invariants: every serial below ``next_serial`` belongs to exactly one step or was skipped, and a step never holds more
than ``prompts_per_step`` groups that are neither filtered nor dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple


class LedgerStep(NamedTuple):
    """A step as the ledger has it: its prompts; how many of them are not decided; of how many nothing is trained."""

    serials: Sequence[int]
    undecided: int
    excluded: int


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

    def issue(self, *, there: int | None = None) -> tuple[int, int] | None:
        """Return the next (serial, step), or None when every step has its prompts, or the next one is not there.

        there: how many prompts there are so far, None where there is no end of them.
        """
        while self._counted[self._lowest] >= self.prompts_per_step:
            self._lowest += 1
        if self._lowest > self.steps:
            return None
        if self.outruns(there):
            return None
        serial = self._missing.pop(0) if self._missing else self.next_serial
        self.note(serial=serial, step=self._lowest)
        self._undecided[self._lowest] += 1
        return serial, self._step_of[serial]

    def outruns(self, there: int | None) -> bool:
        """Return whether the next prompt that is wanted is beyond those that are ``there``; see ``issue``."""
        wanted = not (self.full or self._missing)
        return there is not None and wanted and self.next_serial >= there

    @property
    def full(self) -> bool:
        """Return whether every step had its prompts when one was asked for last."""
        return self._lowest > self.steps

    def note(self, *, serial: int, step: int) -> None:
        """Record that ``serial`` belongs to ``step``."""
        self._step_of[serial] = step
        self._counted[step] += 1
        self.next_serial = max(self.next_serial, serial + 1)

    def skip(self, serial: int) -> None:
        """Record that a serial that was issued gets no rows: its step is short of a prompt again."""
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

    def restore(
        self, steps: Mapping[int, LedgerStep], *, committed: int, next_serial: int, missing: Iterable[int]
    ) -> None:
        """Take over what the ledger knows: ``missing`` serials, which were never created, come first.

        committed: the last step of those that are full for ever; next_serial: one above the highest created.
        """
        for step in range(1, committed + 1):
            self._counted[step] = self.prompts_per_step
        for step, recorded in sorted(steps.items()):
            self._counted[step] = 0
            for serial in recorded.serials:
                self.note(serial=serial, step=step)
            self._counted[step] -= recorded.excluded
        self.next_serial = next_serial
        self._missing = sorted(missing)
        self._undecided = Counter({step: recorded.undecided for step, recorded in steps.items()})

    @property
    def running(self) -> int:
        """Prompts issued of which it is not decided yet what becomes of their groups."""
        return self._undecided.total()

    def complete(self, step: int) -> bool:
        """Return whether the step has all its prompts, and what becomes of each group is decided."""
        return self._counted[step] >= self.prompts_per_step and not self._undecided[step]

    def lacks(self, step: int) -> int:
        """Return how many prompts of the step are not issued yet, or have to be replaced."""
        return max(0, self.prompts_per_step - self._counted[step])

    @property
    def dispatched(self) -> int:
        """Prompts given out that are neither filtered nor dropped."""
        return self._counted.total()

    def complete_together(self, steps: Sequence[int]) -> bool:
        """Return whether samples may go on that are trained once all of ``steps`` are complete; those of one always."""
        return len(steps) <= 1 or all(map(self.complete, steps))

    def unfinished(self, *, trained_step: int) -> set[int]:
        """Return the steps after ``trained_step`` that have had prompts, and the one that gets the next."""
        begun = {step for step in self._counted if step > trained_step}
        return begun | set(islice(filter(self.lacks, range(trained_step + 1, self.steps + 1)), 1))
