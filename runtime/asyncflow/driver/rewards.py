"""Counts of samples with and without a reward, and the rule that pauses the job when too many have none.

A sample without a reward is no sample: it is counted here by why it has none, and never trained as if it had earned 0.

Invariants: a job pauses once more than half of the samples that one step needs have failed, and more than half of those
that were judged for it; a timeout to which the manifest gives 0 does not count for that; the totals
go on over restarts of the driver, but for the last seconds of one that was killed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from asyncflow.api.status import RewardState
from asyncflow.queue.protocol.messages import LeasedRow

_MOST_WORDS = 2000
_Kept = Annotated[int, Meta(ge=0, le=1 << 50)]


class Totals(msgspec.Struct, frozen=True):
    """Counts that are kept over restarts of the driver; fields as in ``RewardTally``."""

    scored: _Kept
    failed: Annotated[dict[Annotated[str, Meta(max_length=32)], _Kept], Meta(max_length=8)]
    first_failure: Annotated[str, Meta(max_length=_MOST_WORDS)]


def failure_of(row: LeasedRow) -> str:
    """Return why a sample has no reward, "" where it has one."""
    return str(row.meta.tags.get("failure", ""))


@dataclass(kw_only=True)
class RewardTally:
    """The outcomes of all samples of a run.

    needed: samples of one optimizer step; keep: writes the totals down for the next driver, which is given them back
    by ``restore``.
    timeouts_fail: whether a sample whose reward took too long counts for a pause: not where the manifest gives it 0.
    first_failure: what is known of the first sample without a reward; paused: what a paused job waits for, "" while
    it runs.
    """

    needed: int
    keep: Callable[[Totals], None]
    timeouts_fail: bool = True
    scored: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    first_failure: str = ""
    paused: str = ""
    _judged: Counter[int] = field(default_factory=Counter)
    _failed_of: dict[int, Counter[str]] = field(default_factory=dict)
    _kept: Totals | None = None

    def restore(self, kept: Totals | None) -> None:
        """Go on from what an earlier driver kept, None where that is nothing."""
        if kept is not None:
            self.scored, self.failed, self.first_failure = kept.scored, Counter(kept.failed), kept.first_failure

    def take(self, row: LeasedRow, *, step: int | None = None) -> None:
        """Count a sample that was judged; step: the one that it is for, None where it is for an evaluation."""
        failure = failure_of(row)
        if step is not None:
            self._judged[step] += 1
        if not failure:
            self.scored += 1
            return
        self.failed[failure] += 1
        self.first_failure = self.first_failure or f"{failure}: {row.meta.tags.get('detail', '')}"[:_MOST_WORDS]
        if step is not None and (failure != "timeout" or self.timeouts_fail):
            self._failed_of.setdefault(step, Counter())[failure] += 1
            self._pause_if_most_failed(step)

    def pause(self, why: str) -> None:
        """Stop the job from taking on more work; the first reason stays."""
        self.paused = self.paused or why

    def resume(self) -> None:
        """Let the job go on, and judge each step anew."""
        self.paused = ""
        self._judged.clear()
        self._failed_of.clear()

    def flush(self) -> None:
        """Save the totals, if they have changed since they were saved."""
        totals = Totals(self.scored, dict(self.failed), self.first_failure)
        if totals != self._kept:
            self.keep(totals)
            self._kept = totals

    def forget(self, step: int) -> None:
        """Forget the counts of a step that was trained."""
        self._judged.pop(step, None)
        self._failed_of.pop(step, None)

    def outcomes(self) -> dict[str, int]:
        """Return how many samples were scored, and how many failed by why."""
        return {"scored": self.scored, **self.failed}

    @property
    def state(self) -> RewardState:
        """Counts of scored and failed samples, for the status."""
        return RewardState(scored=self.scored, failed=dict(self.failed), first_failure=self.first_failure)

    def _pause_if_most_failed(self, step: int) -> None:
        failures, judged = self._failed_of[step], self._judged[step]
        failed = failures.total()
        if 2 * failed > max(self.needed, judged):
            said = ", ".join(f"{count} {failure}" for failure, count in failures.most_common())
            last_line = self.first_failure.strip().rpartition("\n")[2][:300]
            self.pause(
                f"the reward to be mended: {failed} of {judged} samples of step {step} have none ({said}). The first: "
                f"{last_line}. Suspend the job, mend the reward and resume; or POST /v1/resume to go on as it is"
            )
