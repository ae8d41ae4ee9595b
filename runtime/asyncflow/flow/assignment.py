"""Assignment of prompts to optimizer steps.

Serials are assigned in data order, each to the lowest step that lacks a prompt. If a group is filtered or dropped, its
step lacks a prompt again and gets the next serial. Under ``fill: completion`` a group that finishes early exchanges its
step with a group that is late.

Invariants: every serial below ``next_serial`` belongs to exactly one step, was skipped, or is missing (never created);
a step never has more than ``prompts_per_step`` groups that are neither filtered nor dropped. A committed step
needs no memory for its prompts, and a trained one no work when the driver asks for counts, which it does whenever a
group is finished.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple


class LedgerStep(NamedTuple):
    """A step as recorded in the ledger.

    serials: its prompts; undecided: number of undecided groups; excluded: number of filtered or dropped groups.
    """

    serials: Sequence[int]
    undecided: int
    excluded: int


@dataclass(kw_only=True)
class PromptAssignment:
    """The assignment of prompts to steps: pure state, which ``restore`` rebuilds from the ledger.

    dispatched: number of issued prompts that are neither filtered nor dropped; running: number of issued prompts whose
    groups are not decided yet.
    """

    prompts_per_step: int
    steps: int
    next_serial: int = 0
    dispatched: int = 0
    running: int = 0
    _step_of: dict[int, int] = field(default_factory=dict)
    _counted: Counter[int] = field(default_factory=Counter)
    _excluded: set[int] = field(default_factory=set)
    _finished: set[int] = field(default_factory=set)
    _undecided: Counter[int] = field(default_factory=Counter)
    _out: dict[int, set[int]] = field(default_factory=dict)
    _missing: list[int] = field(default_factory=list)
    _lowest: int = 1
    _highest: int = 0

    def issue(self, *, available: int | None = None) -> tuple[int, int] | None:
        """Return the next (serial, step), or None if every step has its prompts or the next prompt is not available.

        available: number of prompts that the source has so far, None if it is unlimited.
        """
        while self._counted[self._lowest] >= self.prompts_per_step:
            self._lowest += 1
        if self._lowest > self.steps:
            return None
        if self.waits_for_prompt(available):
            return None
        serial = self._missing.pop(0) if self._missing else self.next_serial
        self.note(serial=serial, step=self._lowest)
        self._undecided[self._lowest] += 1
        self.running += 1
        return serial, self._step_of[serial]

    def waits_for_prompt(self, available: int | None) -> bool:
        """Return whether the next prompt is needed and is not ``available`` yet; see ``issue``."""
        wanted = not (self.full or self._missing)
        return available is not None and wanted and self.next_serial >= available

    @property
    def issued(self) -> int:
        """Number of serials that were issued, by this driver or by earlier ones."""
        return self.next_serial - len(self._missing)

    @property
    def full(self) -> bool:
        """Return whether every step had its prompts at the last call of ``issue``."""
        return self._lowest > self.steps

    def note(self, *, serial: int, step: int) -> None:
        """Record that ``serial`` belongs to ``step``."""
        self._step_of[serial] = step
        self._counted[step] += 1
        self._highest = max(self._highest, step)
        self.dispatched += 1
        self.next_serial = max(self.next_serial, serial + 1)

    def skip(self, serial: int) -> None:
        """Record that an issued serial gets no rows; its step lacks a prompt again."""
        self.finish(serial)
        self.exclude(serial)

    def finish(self, serial: int) -> bool:
        """Record that the group was generated and decided. Return False if that was recorded before."""
        if serial not in self._step_of or serial in self._finished:
            return False
        self._finished.add(serial)
        step = self._step_of[serial]
        if self._undecided[step]:
            self._undecided[step] -= 1
            self.running -= 1
        self._remove_out(serial)
        return True

    def mark_put(self, serials: Iterable[int]) -> None:
        """Record that these prompts were put: until they are finished, other groups may take their steps (``late``)."""
        for serial in serials:
            if serial not in self._finished:
                self._out.setdefault(self._step_of[serial], set()).add(serial)

    def late(self, serial: int, *, alike: Callable[[int], object]) -> tuple[int, int] | None:
        """Return the step to which a finished group may move, and a late group of that step to exchange with.

        The step is the lowest one with an unfinished group that is below the group's own step and has the same
        ``alike``. None if there is no such step. Prompts that an earlier driver put are never late.
        """
        own = self._step_of.get(serial, 0)
        steps = [step for step in self._out if step < own and alike(step) == alike(own)]
        return (min(steps), max(self._out[min(steps)])) if steps else None

    def exchange(self, serial: int, late: int) -> None:
        """Record that a finished group and an unfinished one have exchanged their steps."""
        own, step = self._step_of[serial], self._step_of[late]
        self._remove_out(late)
        self._step_of[serial], self._step_of[late] = step, own
        self._undecided[step] -= 1
        self._undecided[own] += 1
        self.mark_put([late])

    def _remove_out(self, serial: int) -> None:
        step = self._step_of[serial]
        out = self._out.get(step, set()) - {serial}
        if out:
            self._out[step] = out
        else:
            self._out.pop(step, None)

    def exclude(self, serial: int) -> bool:
        """Record that the group was filtered or dropped; its step lacks a prompt. Return False if recorded before."""
        if serial not in self._step_of or serial in self._excluded:
            return False
        self._excluded.add(serial)
        step = self._step_of[serial]
        self._counted[step] -= 1
        self.dispatched -= 1
        self._lowest = min(self._lowest, step)
        return True

    def forget(self, *, committed: int) -> None:
        """Forget the prompts of the steps up to ``committed``: no group of theirs is generated or decided again."""
        old = {serial for serial, step in self._step_of.items() if step <= committed}
        self._step_of = {serial: step for serial, step in self._step_of.items() if serial not in old}
        self._finished -= old
        self._excluded -= old

    def restore(
        self, steps: Mapping[int, LedgerStep], *, committed: int, next_serial: int, missing: Iterable[int]
    ) -> None:
        """Restore the state from the ledger.

        committed: last committed step: all steps up to it are complete; next_serial: one above the highest created
        serial; missing: lower serials that were never created; they are issued first.
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
        self.dispatched, self.running = self._counted.total(), self._undecided.total()
        self._highest = max(self._counted, default=0)

    def complete(self, step: int) -> bool:
        """Return whether the step has all its prompts and all its groups are decided."""
        return self._counted[step] >= self.prompts_per_step and not self._undecided[step]

    def lacks(self, step: int) -> int:
        """Return the number of prompts of the step that are not issued yet or must be replaced."""
        return max(0, self.prompts_per_step - self._counted[step])

    def complete_together(self, steps: Sequence[int]) -> bool:
        """Return whether the samples of ``steps`` may be passed on: all steps are complete, or there is only one."""
        return len(steps) <= 1 or all(map(self.complete, steps))

    def unfinished(self, *, trained_step: int) -> set[int]:
        """Return the steps after ``trained_step`` that have had prompts, and the step that gets the next prompt."""
        started = set(filter(self._counted.__contains__, range(trained_step + 1, self._highest + 1)))
        return started | set(islice(filter(self.lacks, range(trained_step + 1, self.steps + 1)), 1))
