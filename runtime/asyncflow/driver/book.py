"""Assignment of prompts to steps.

Serials are given in data order, each to the lowest step that is short of prompts; a group that was filtered or dropped
leaves its step short, and the next serial takes its place.

Invariant: every serial below ``next_serial`` belongs to exactly one step or was skipped, and a step never holds more
than ``prompts_per_step`` groups that are neither filtered nor dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from asyncflow.queue.protocol.messages import PartitionSnapshot, StepState


@dataclass(kw_only=True)
class PromptBook:
    """The assignment of prompts to steps; pure, rebuilt from the ledger by ``restore``.

    running: prompts issued of which it is not decided yet what becomes of their groups.
    """

    prompts_per_step: int
    steps: int
    next_serial: int = 0
    running: int = 0
    _step_of: dict[int, int] = field(default_factory=dict)
    _counted: Counter[int] = field(default_factory=Counter)
    _excluded: set[int] = field(default_factory=set)
    _finished: set[int] = field(default_factory=set)
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
        self.running += 1
        return serial, self._step_of[serial]

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

    def finish(self, serial: int) -> None:
        """Record that the group was generated, and that it is decided what becomes of it; again changes nothing."""
        if serial not in self._finished:
            self._finished.add(serial)
            self.running = max(0, self.running - 1)

    def exclude(self, serial: int) -> None:
        """Record that the group was filtered or dropped: its step is short of a prompt again."""
        if serial in self._excluded:
            return
        self._excluded.add(serial)
        step = self._step_of[serial]
        self._counted[step] -= 1
        self._lowest = min(self._lowest, step)

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
        self.running = sum(map(_undecided, snapshot.steps.values()))

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


def _undecided(step: StepState) -> int:
    """Return how many groups of a step are neither given an advantage nor final."""
    decided = step.done.get("advantage", 0) + step.trained + step.filtered + step.dropped
    return len(step.serials) - decided // (step.group_size or 1)
