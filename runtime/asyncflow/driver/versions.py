"""Versions of the weights that the job still needs.

Invariant: a version that an unfinished step or an unfinished evaluation names is required until neither does; one that
can never be had again is not waited for.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncflow.driver.book import PromptBook
from asyncflow.driver.progress import Progress
from asyncflow.flow.schedule import Schedule
from asyncflow.weights.catalogue import Catalogue


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Looks at the catalogue with the schedule in hand. evaluates: whether the job evaluates at all."""

    catalogue: Catalogue
    schedule: Schedule
    book: PromptBook
    progress: Progress
    evaluates: bool

    @property
    def newest(self) -> int | None:
        """Step of the newest version that was ever complete, None before the first."""
        newest = self.catalogue.newest
        return None if newest is None else newest.step

    @property
    def nbytes(self) -> int | None:
        """Bytes of the newest version, None where it is not to be had."""
        newest = self.newest
        version = None if newest is None else self.catalogue.find(newest)
        return None if version is None else self.catalogue.manifest(version).nbytes

    def required(self) -> set[int]:
        """Return the steps of the versions that must not be forgotten."""
        unfinished = self.book.unfinished(trained_step=self.progress.done)
        return self.schedule.required(unfinished) | set(self.unevaluated())

    def unevaluated(self) -> list[int]:
        """Return the versions that are to be evaluated, are not, and still can be."""
        if not self.evaluates:
            return []
        newest = self.newest or 0
        return [
            step
            for step in self.schedule.evaluations()
            if step not in self.progress.evaluations and (step > newest or self.catalogue.find(step) is not None)
        ]

    def judged(self) -> int:
        """Return the step up to which every evaluation is recorded, or can not be any more."""
        unevaluated = self.unevaluated()
        return unevaluated[0] - 1 if unevaluated else self.progress.steps

    def due(self) -> list[int]:
        """Return the versions that can be evaluated now: of the history that survives, after the line of their step."""
        done = self.progress.done
        return [step for step in self.unevaluated() if step <= done and self.catalogue.find(step) is not None]
